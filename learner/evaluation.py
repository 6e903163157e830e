"""Held-out evaluation over the bus: the same generators, greedy sampling, items that training never sees."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import structlog

from contracts import subjects
from contracts.messages import Purpose, Rollout, Sampling, Split, Task
from infra.bus import QueueFull
from infra.service import Service
from learner.settings import LearnerSettings

log = structlog.get_logger(__name__)

PROGRESS_SECONDS = 5.0


def evaluation_task(
    run: str, environment: str, settings: LearnerSettings, generation: int, version: int, item: int
) -> Task:
    """The task that samples held-out item `item` once, greedily, with `version`; the same for every learner."""
    sampling = Sampling(max_tokens=settings.sampling.max_tokens, temperature=0.0, stop=settings.sampling.stop)
    return Task(
        id=f"eval-{version}-{item}",
        run=run,
        purpose=Purpose.EVAL,
        environment=environment,
        seed=item,
        group_size=1,
        sampling=sampling,
        split=Split.HELDOUT,
        generation=generation,
        min_version=version,
        issued_ns=time.time_ns(),
    )


async def evaluate(service: Service, settings: LearnerSettings, generation: int, version: int) -> float | None:
    """Have every held-out item sampled with `version` and return the share that is right.

    Results that are already on the bus, from a learner that died while it waited, count; only missing ones are asked
    for. None if evaluation is off, the service is stopping, or the deadline passes first.
    """
    run = service.settings.run
    tasks = [
        evaluation_task(run.name, run.environment, settings, generation, version, item)
        for item in range(settings.evaluation.prompts)
    ]
    if not tasks:
        return None
    scores: dict[str, float] = {}
    wanted = {task.id for task in tasks}
    complete = asyncio.Event()

    async def collect() -> None:
        rollouts = service.bus.read(
            subjects.ROLLOUT, kind=Rollout, consumer=service.instance, run=run.name, purpose=Purpose.EVAL
        )
        async with aclosing(rollouts):
            async for received in rollouts:
                rollout = received.message
                if rollout.task_id in wanted:
                    scores[rollout.task_id] = rollout.reward or 0.0
                if len(scores) == len(wanted):
                    complete.set()
                    return

    async def ask() -> None:
        for task in tasks:
            while task.id not in scores:
                try:
                    await service.bus.publish(
                        subjects.TASK, task, id=f"{run.name}.{task.id}", run=run.name, purpose=task.purpose,
                        pool=settings.pool,
                    )  # fmt: skip
                    break
                except QueueFull:
                    await asyncio.sleep(1.0)

    collecting, asking = asyncio.create_task(collect()), asyncio.create_task(ask())
    started = time.monotonic()
    try:
        while not complete.is_set() and not service.stopping.is_set():
            for task in (collecting, asking):
                if task.done():
                    task.result()
            waited = time.monotonic() - started
            log.info("evaluating", version=version, done=len(scores), of=len(wanted), seconds=round(waited, 1))
            if waited > settings.evaluation.deadline_seconds:
                log.error("evaluation given up", version=version, done=len(scores), of=len(wanted))
                return None
            try:
                await asyncio.wait_for(complete.wait(), PROGRESS_SECONDS)
            except TimeoutError:
                continue
    finally:
        for task in (collecting, asking):
            task.cancel()
        await asyncio.gather(collecting, asking, return_exceptions=True)
    return sum(scores.values()) / len(wanted) if complete.is_set() else None
