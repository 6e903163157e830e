"""The tasks a learner publishes, and what becomes of them in the queue.

The same index gives the same task, whichever learner of the run publishes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import structlog
from nats.js.errors import NotFoundError

from contracts import codec, subjects
from contracts.errors import ContractError
from contracts.messages import DeadLetter, PolicyRef, Purpose, Sampling, Split, Task
from infra.bus import Bus, QueueFull, Unavailable
from infra.service import Service
from infra.settings import RunSettings
from learner.gate import training_id
from learner.settings import LearnerSettings

log = structlog.get_logger(__name__)

ANSWER_SECONDS = 2.0  # a training step does not wait longer for what the server says of its queue
BACKPRESSURE_PAUSE = 1.0  # seconds before a full task queue is tried again
AT_ONCE = 64  # tasks under way to the queue


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


def evaluation_task(run: RunSettings, settings: LearnerSettings, policy: PolicyRef, item: int) -> Task:
    """Held-out item `item`, to be sampled once and greedily with `policy`; equal weights ask the same."""
    return Task(
        id=f"eval-{policy.version}-{policy.digest[:8]}-{item}",
        run=run.name,
        purpose=Purpose.EVAL,
        environment=run.environment,
        seed=item,
        group_size=1,
        sampling=Sampling(max_tokens=settings.sampling.max_tokens, temperature=0.0, stop=settings.sampling.stop),
        split=Split.HELDOUT,
        generation=policy.generation,
        min_version=policy.version,
        issued_ns=time.time_ns(),
    )


async def publish_tasks(
    service: Service,
    tasks: Sequence[Task],
    pool: str,
    published: Callable[[str, int], None] = lambda task, sequence: None,
) -> None:
    """Put tasks on the work queue, several at a time and each with a trace of its own.

    `published` is told of each with its stream sequence as soon as it is there, whatever the others wait for. A full
    queue is back-pressure: it is waited for as long as it lasts.
    """
    done: set[str] = set()
    while waiting := [task for task in tasks if task.id not in done][:AT_ONCE]:
        publications = [
            service.bus.publish(
                subjects.TASK, task, id=f"{task.run}.{task.id}", run=task.run, purpose=task.purpose, pool=pool
            )
            for task in waiting
        ]
        full = False
        for task, result in zip(waiting, await asyncio.gather(*publications, return_exceptions=True), strict=True):
            if isinstance(result, QueueFull):
                full = True
            elif isinstance(result, BaseException):
                raise result
            else:
                done.add(task.id)
                published(task.id, result)
        if full:
            log.warning("task queue is full, waiting", task=waiting[0].id)
            await asyncio.sleep(BACKPRESSURE_PAUSE)


async def queue_is_empty(bus: Bus, run: str, pool: str) -> bool:
    """Whether no training task waits and no generator holds one; False where the server does not say."""
    try:
        info = await bus.consumer_info(
            subjects.TASK.stream, subjects.TASK_WORKERS.name(run=run, purpose=Purpose.TRAIN, pool=pool)
        )
    except (Unavailable, NotFoundError):
        return False
    return not info.num_pending and not info.num_ack_pending


async def taken_up_to(bus: Bus, run: str, pool: str) -> int | None:
    """The stream sequence up to which generators have taken training tasks; None where the server does not say."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            info = await bus.consumer_info(
                subjects.TASK.stream, subjects.TASK_WORKERS.name(run=run, purpose=Purpose.TRAIN, pool=pool)
            )
    except (Unavailable, NotFoundError, TimeoutError):
        return None
    return info.delivered.stream_seq if info.delivered is not None else None


async def dead_tasks(bus: Bus, run: str, consumer: str) -> AsyncGenerator[tuple[str, str], None]:
    """Id and reason of each task of the run that became a dead letter, from the beginning and without end."""
    letters = bus.read(subjects.DLQ, kind=DeadLetter, consumer=consumer, stream=subjects.TASK.stream.lower())
    async with aclosing(letters):
        async for received in letters:
            letter = received.message
            if letter.subject.split(".")[2:3] != [run]:
                continue
            try:
                yield codec.decode(letter.payload, Task).id, letter.reason
            except ContractError:  # it was never a task
                continue
