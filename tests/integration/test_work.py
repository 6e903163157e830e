"""Workers on a real work queue: slots, acknowledgement, redelivery, dead letters, draining and faults."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import infra.work
from contracts import codec
from contracts.messages import Purpose, Sampling, Task
from contracts.subjects import TASK, TASK_WORKERS, Durable
from infra.bootstrap import ensure_consumer
from infra.bus import Bus, Received
from infra.errors import UserError
from infra.server import EmbeddedServer
from infra.work import DEADLY, Reject, Retry, work
from tests.integration.helpers import dead_letters, publish_raw, retained, until

QUICK = Durable("{run}-{purpose}-{pool}", TASK, ack_wait=1.2, max_deliver=2)


def task(run: str, number: int) -> Task:
    return Task(
        id=f"task-{number}",
        run=run,
        purpose=Purpose.TRAIN,
        environment="reverse-text",
        seed=number,
        group_size=2,
        sampling=Sampling(max_tokens=4),
    )


class Queue:
    """The tasks of one pool of one run, and a worker on them."""

    def __init__(self, bus: Bus, run: str, durable: Durable, pool: str, purpose: str = "train") -> None:
        self.bus, self.run, self.durable = bus, run, durable
        self.tokens = {"run": run, "purpose": purpose, "pool": pool}
        self.name = durable.name(**self.tokens)

    async def add(self, numbers: range) -> None:
        for number in numbers:
            await self.bus.publish(TASK, task(self.run, number), id=f"task-{number}", **self.tokens)

    async def left(self) -> int:
        return await retained(self.bus, TASK, **self.tokens)

    async def empty(self, seconds: float = 10.0) -> bool:
        async with asyncio.timeout(seconds):
            while await self.left():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return True

    @asynccontextmanager
    async def worker(
        self,
        handler: Callable[[Received[Any]], Awaitable[None]],
        *,
        slots: Any = 4,
        drain: float = 5.0,
        **shared: Any,
    ) -> AsyncIterator[asyncio.Event]:
        stopping = asyncio.Event()
        running = asyncio.create_task(
            work(self.bus, self.durable, handler, slots=slots, stopping=stopping, drain=drain, **shared, **self.tokens)
        )
        try:
            yield stopping
        finally:
            stopping.set()
            async with asyncio.timeout(drain + 10):
                await running


@pytest.fixture
def queue(bus: Bus, run: str) -> Queue:
    return Queue(bus, run, TASK_WORKERS, "default")


@pytest.fixture
async def quick(bus: Bus, run: str) -> Queue:
    """Delivers again after 1.2 s without a sign of life, and at most twice."""
    queue = Queue(bus, run, QUICK, "quick")
    await ensure_consumer(bus, QUICK, create=True, **queue.tokens)
    return queue


async def test_every_task_is_handled_once_and_leaves_the_queue(queue: Queue) -> None:
    seen: list[str] = []

    async def handler(got: Received[Task]) -> None:
        assert got.subject == TASK.subject(**queue.tokens)
        seen.append(got.message.id)

    await queue.add(range(30))
    async with queue.worker(handler):
        assert await queue.empty()
    assert sorted(seen) == sorted(f"task-{number}" for number in range(30))


@pytest.mark.parametrize("kind", ["number", "function"])
async def test_it_never_holds_more_than_its_slots(queue: Queue, kind: str) -> None:
    held = most = 0

    async def handler(got: Received[Task]) -> None:
        nonlocal held, most
        held += 1
        most = max(most, held)
        await asyncio.sleep(0.02)
        held -= 1

    await queue.add(range(12))
    async with queue.worker(handler, slots=3 if kind == "number" else lambda: 3 - held):
        await asyncio.sleep(0.1)
        info = await queue.bus.consumer_info(TASK.stream, queue.name)
        assert (info.num_ack_pending or 0) <= 3
        assert await queue.empty()
    assert most == 3


async def test_workers_that_share_slots_never_hold_more_than_there_are(bus: Bus, run: str, queue: Queue) -> None:
    queues = [queue, Queue(bus, run, TASK_WORKERS, "default", purpose="eval")]
    held = 0
    seen: list[int] = []

    async def handler(got: Received[Task]) -> None:
        nonlocal held
        held += 1
        seen.append(held)
        await asyncio.sleep(0.05)
        held -= 1

    for each in queues:
        await each.add(range(12))
    turn = asyncio.Lock()

    def slots() -> int:
        return 3 - held

    async with queues[0].worker(handler, slots=slots, turn=turn), queues[1].worker(handler, slots=slots, turn=turn):
        for each in queues:
            assert await each.empty()
        await queue.add(range(12, 13))  # one that comes while both wait
        assert await queue.empty()
    assert len(seen) == 25 and max(seen) <= 3


async def test_no_slots_no_messages(queue: Queue) -> None:
    slots = 0

    async def handler(got: Received[Task]) -> None:
        assert slots

    await queue.add(range(2))
    async with queue.worker(handler, slots=lambda: slots):
        await asyncio.sleep(0.3)
        assert await queue.left() == 2
        slots = 2
        assert await queue.empty()


async def test_a_slot_that_is_free_before_its_handler_ends_is_taken_when_that_is_said(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infra.work, "POLL_SECONDS", 60.0)
    held, freed, both, seen = 0, asyncio.Event(), asyncio.Event(), []

    async def handler(got: Received[Task]) -> None:
        nonlocal held
        held += 1
        seen.append(got.message.id)
        await asyncio.sleep(0.05)
        held -= 1  # the slot is free, the work goes on
        freed.set()
        freed.clear()
        if len(seen) == 2:
            both.set()
        async with asyncio.timeout(10.0):
            await both.wait()

    await queue.add(range(2))
    async with queue.worker(handler, slots=lambda: 1 - held, freed=freed):
        assert await queue.empty()
    assert sorted(seen) == ["task-0", "task-1"]


@pytest.mark.parametrize("problem", [Retry(0.2), RuntimeError("no luck")], ids=["retry", "error"])
async def test_what_fails_comes_again(queue: Queue, problem: Exception) -> None:
    tries = 0

    async def handler(got: Received[Task]) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise problem

    await queue.add(range(1))
    async with queue.worker(handler):
        assert await queue.empty()
    assert tries == 2
    assert await dead_letters(queue.bus, queue.run) == []


async def test_what_can_never_be_handled_is_a_dead_letter(queue: Queue) -> None:
    handled: list[str] = []

    async def handler(got: Received[Task]) -> None:
        if got.message.id == "task-0":
            raise Reject("bad_task", "there is no such environment")
        handled.append(got.message.id)

    subject = TASK.subject(**queue.tokens)
    await queue.add(range(1))
    await publish_raw(queue.bus, subject, b"junk")
    await publish_raw(queue.bus, subject, codec.encode(task(queue.run, 5)).replace(b"group_size", b"group_sise"))
    await queue.add(range(1, 2))
    async with queue.worker(handler):
        assert await queue.empty()
    assert handled == ["task-1"]
    letters = await dead_letters(queue.bus, queue.run)
    assert sorted(letter.code for letter in letters) == ["bad_task", "invalid", "malformed"]
    assert {letter.consumer for letter in letters} == {queue.name}
    assert "no such environment" in next(letter.reason for letter in letters if letter.code == "bad_task")


@pytest.mark.parametrize("problem", [Retry(0.05), RuntimeError("no luck")], ids=["retry", "error"])
async def test_deliveries_are_limited(quick: Queue, problem: Exception) -> None:
    tries = 0

    async def handler(got: Received[Task]) -> None:
        nonlocal tries
        tries += 1
        raise problem

    await quick.add(range(1))
    async with quick.worker(handler):
        assert await quick.empty()
    assert tries == QUICK.max_deliver
    (letter,) = await dead_letters(quick.bus, quick.run)
    assert letter.code == "max_deliveries" and letter.deliveries == QUICK.max_deliver


async def test_a_task_that_kills_its_workers_is_not_tried_for_ever(quick: Queue) -> None:
    async def handler(got: Received[Task]) -> None:
        raise AssertionError("must not be handled")

    await quick.add(range(1))
    jetstream = quick.bus.connection.client.jetstream()
    doomed = await jetstream.pull_subscribe_bind(quick.name, TASK.stream)
    for _ in range(DEADLY * QUICK.max_deliver):  # as often, somebody takes it and does not finish it
        (message,) = await doomed.fetch(1, timeout=4)
        await message.nak()
    await doomed.unsubscribe()
    async with quick.worker(handler):
        assert await quick.empty()
    (letter,) = await dead_letters(quick.bus, quick.run)
    assert letter.code == "max_deliveries" and letter.deliveries == DEADLY * QUICK.max_deliver + 1


async def test_workers_that_stop_are_not_held_against_a_task(quick: Queue) -> None:
    done: list[str] = []

    async def handler(got: Received[Task]) -> None:
        done.append(got.message.id)

    await quick.add(range(1))
    for _ in range(QUICK.max_deliver + 1):
        started = asyncio.Event()

        async def endless(got: Received[Task], started: asyncio.Event = started) -> None:
            started.set()
            await asyncio.sleep(60)

        async with quick.worker(endless, drain=0.1):
            await started.wait()
    async with quick.worker(handler):
        assert await quick.empty()
    assert done == ["task-0"]
    assert await dead_letters(quick.bus, quick.run) == []


async def test_long_work_is_kept_alive(quick: Queue) -> None:
    tries = 0

    async def handler(got: Received[Task]) -> None:
        nonlocal tries
        tries += 1
        await asyncio.sleep(2 * QUICK.ack_wait)

    await quick.add(range(1))
    async with quick.worker(handler):
        assert await quick.empty()
    assert tries == 1


async def test_work_outlives_the_connection(quick: Queue, server: EmbeddedServer) -> None:
    """The server is away for longer than ack_wait: the task is not handled twice at the same time, and acknowledged."""
    tries = held = 0

    async def handler(got: Received[Task]) -> None:
        nonlocal tries, held
        tries += 1
        held += 1
        assert held == 1
        await asyncio.sleep(2.5)
        held -= 1

    await quick.add(range(1))
    async with quick.worker(handler):
        assert await until(lambda: tries)
        server.kill()
        await asyncio.sleep(1.5 * QUICK.ack_wait)
        server.start()
        assert await quick.empty()
        await quick.add(range(1, 2))
        assert await quick.empty()
    assert tries == 2
    assert await dead_letters(quick.bus, quick.run) == []


async def test_stopping_lets_work_finish(queue: Queue) -> None:
    finished: list[str] = []
    started = asyncio.Event()

    async def handler(got: Received[Task]) -> None:
        started.set()
        await asyncio.sleep(0.3)
        finished.append(got.message.id)

    await queue.add(range(5))
    async with queue.worker(handler, slots=2) as stopping:
        await started.wait()
        stopping.set()
    assert len(finished) == 2
    assert await queue.left() == 3


async def test_unfinished_work_is_given_back_at_once(queue: Queue) -> None:
    started = asyncio.Event()
    done: list[str] = []

    async def endless(got: Received[Task]) -> None:
        started.set()
        await asyncio.sleep(60)

    async def quick_handler(got: Received[Task]) -> None:
        done.append(got.message.id)

    await queue.add(range(2))
    async with queue.worker(endless, drain=0.1) as stopping:
        await started.wait()
        stopping.set()
    async with queue.worker(quick_handler):
        assert await queue.empty(seconds=5)  # far below the 30 s without a sign of life
    assert sorted(done) == ["task-0", "task-1"]


async def test_a_killed_process_has_its_work_done_by_another(
    quick: Queue, server: EmbeddedServer, tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        """
import asyncio, sys
from infra.bus import Bus
from infra.settings import NatsSettings
from infra.work import work
from tests.integration.test_work import QUICK

async def handler(got):
    print(got.message.id, flush=True)
    await asyncio.sleep(60)

async def main(url, user, password, run):
    bus = await Bus.connect(NatsSettings(url=url, user=user, password=password), "doomed")
    tokens = {"run": run, "purpose": "train", "pool": "quick"}
    await work(bus, QUICK, handler, slots=1, stopping=asyncio.Event(), drain=0.0, **tokens)

asyncio.run(main(*sys.argv[1:]))
"""
    )
    settings = server.settings
    arguments = [settings.url, settings.user, settings.password.get_secret_value(), quick.run]
    await quick.add(range(1))
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": "."},
    )
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "task-0\n"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    done: list[str] = []

    async def handler(got: Received[Task]) -> None:
        done.append(got.message.id)

    async with quick.worker(handler):
        assert await quick.empty()
    assert done == ["task-0"]


async def test_a_deleted_consumer_is_a_sentence(queue: Queue) -> None:
    async def handler(got: Received[Task]) -> None:
        raise AssertionError("must not be handled")

    running = asyncio.create_task(
        work(queue.bus, TASK_WORKERS, handler, slots=1, stopping=asyncio.Event(), drain=0.0, **queue.tokens)
    )
    await asyncio.sleep(0.3)
    await queue.bus.connection.client.jetstream().delete_consumer(TASK.stream, queue.name)
    async with asyncio.timeout(10):
        with pytest.raises(UserError, match=rf"consumer {queue.name} of stream TASKS was deleted"):
            await running


async def test_a_missing_or_differing_consumer_is_a_sentence(bus: Bus, run: str) -> None:
    async def handler(got: Received[Task]) -> None:
        raise AssertionError("must not be handled")

    async def start(durable: Durable, pool: str) -> None:
        await work(
            bus, durable, handler, slots=1, stopping=asyncio.Event(), drain=0.0, run=run, purpose="train", pool=pool
        )

    with pytest.raises(UserError, match=rf"consumer {run}-train-nowhere of stream TASKS does not exist"):
        await start(TASK_WORKERS, "nowhere")
    with pytest.raises(UserError, match=r"ack_wait: found 30.0, expected 1.2"):
        await start(QUICK, "default")
