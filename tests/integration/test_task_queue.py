"""What the task queue of a real server says of tasks: which have been taken, and whether any is left."""

import asyncio

import msgspec

from contracts import subjects
from contracts.examples import EXAMPLES
from contracts.messages import Purpose, Task
from infra.bus import Bus, Received
from infra.work import work
from learner.tasks import queue_is_empty, taken_up_to
from tests.integration.helpers import until


async def test_the_queue_tells_how_far_generators_have_taken_tasks(bus, run):
    example = EXAMPLES["task"]
    assert isinstance(example, Task)

    async def publish(index: int) -> int:
        task = msgspec.structs.replace(example, id=f"train-{index}", run=run, purpose=Purpose.TRAIN)
        return await bus.publish(subjects.TASK, task, id=task.id, run=run, purpose=Purpose.TRAIN, pool="default")

    sequences = [await publish(index) for index in range(4)]
    assert await publish(0) == sequences[0], "what is published again is where it was"
    assert await taken_up_to(bus, run, "default") < sequences[0]
    begun, stopping, release = [], asyncio.Event(), asyncio.Event()

    async def handle(received: Received[Task]) -> None:
        begun.append(received.message.id)
        await release.wait()

    worker = asyncio.create_task(
        work(
            bus, subjects.TASK_WORKERS, handle, slots=2, stopping=stopping, drain=5.0,
            run=run, purpose=Purpose.TRAIN, pool="default",
        )
    )  # fmt: skip
    try:
        assert await until(lambda: len(begun) == 2)
        assert await taken_up_to(bus, run, "default") == sequences[1]
        release.set()
        assert await until(lambda: len(begun) == 4)
        assert await taken_up_to(bus, run, "default") == sequences[3]
    finally:
        stopping.set()
        await asyncio.wait_for(worker, 15)
    assert await queue_is_empty(bus, run, "default")


async def test_a_queue_that_does_not_answer_says_nothing(bus: Bus, run: str):
    assert await taken_up_to(bus, run, "no-such-pool") is None
    assert not await queue_is_empty(bus, run, "no-such-pool")
