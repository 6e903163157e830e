"""The tasks a learner publishes. The same index gives the same task, whichever learner of the run publishes it."""

from __future__ import annotations

import asyncio
import time

import structlog

from contracts import subjects
from contracts.messages import Purpose, Sampling, Split, Task
from infra.bus import QueueFull
from infra.service import Service
from infra.settings import RunSettings
from learner.gate import training_id
from learner.settings import LearnerSettings

log = structlog.get_logger(__name__)

BACKPRESSURE_PAUSE = 1.0  # seconds before a full task queue is tried again


def training_task(run: RunSettings, settings: LearnerSettings, generation: int, version: int, index: int) -> Task:
    """Prompt `index` of the run, to be sampled with `version` or a newer one."""
    return Task(
        id=training_id(index),
        run=run.name,
        purpose=Purpose.TRAIN,
        environment=run.environment,
        seed=(run.seed << 40) + index,
        group_size=settings.group_size,
        sampling=Sampling(**settings.sampling.model_dump()),
        generation=generation,
        min_version=version,
        issued_ns=time.time_ns(),
    )


def evaluation_task(run: RunSettings, settings: LearnerSettings, generation: int, version: int, item: int) -> Task:
    """Held-out item `item`, to be sampled once and greedily with `version`."""
    return Task(
        id=f"eval-{version}-{item}",
        run=run.name,
        purpose=Purpose.EVAL,
        environment=run.environment,
        seed=item,
        group_size=1,
        sampling=Sampling(max_tokens=settings.sampling.max_tokens, temperature=0.0, stop=settings.sampling.stop),
        split=Split.HELDOUT,
        generation=generation,
        min_version=version,
        issued_ns=time.time_ns(),
    )


async def publish_task(service: Service, task: Task, pool: str) -> None:
    """Put a task on the work queue. A full queue is back-pressure: it is waited for as long as it lasts."""
    while True:
        try:
            await service.bus.publish(
                subjects.TASK, task, id=f"{task.run}.{task.id}", run=task.run, purpose=task.purpose, pool=pool
            )
            return
        except QueueFull:
            log.warning("task queue is full, waiting", task=task.id)
            await asyncio.sleep(BACKPRESSURE_PAUSE)
