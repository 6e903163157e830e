"""The bus as an onlooker sees it: reads everything, publishes nothing, not even dead letters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import structlog
from nats.aio.client import Client
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, NotFoundError

from contracts import subjects
from contracts.messages import DeadLetter, Message, Purpose
from contracts.subjects import Channel
from infra.bus import Bus, Received, Unavailable, Unusable
from infra.cli.board import Board, Queue
from infra.errors import UserError
from infra.pull import tail
from infra.summary import Summary

log = structlog.get_logger(__name__)

RECENT_EVENTS = 4000  # of the events stream: enough to see every process and the last steps' pace
QUEUE_SECONDS = 2.0  # between looks at the queues


async def observe(
    bus: Bus, channel: Channel, tokens: Mapping[str, str], *, start: int | None = None, follow: bool = True
) -> AsyncGenerator[Received[Message], None]:
    """The usable messages of a channel in order; others are passed over. Raises `UserError` without its stream."""
    source = tail(bus.connection, channel.stream, channel.filter(**tokens), name="onlooker", start=start, follow=follow)
    async with aclosing(source):
        async for raw in source:
            try:
                yield await bus.open(raw, channel.message)
            except Unusable:
                continue  # whoever consumes it for a purpose publishes the dead letter


def concerns(message: Message, run: str) -> bool:
    """Whether a record belongs to the run: dead letters of all runs share their subjects."""
    return not isinstance(message, DeadLetter) or message.subject.split(".")[2:3] == [run]


async def collect(bus: Bus, run: str) -> dict[str, Any]:
    """The summary of a run from everything the bus retains of it; rollouts pass through one by one."""
    summary = Summary()
    channels: list[tuple[Channel, dict[str, str]]] = [
        (subjects.POLICY_PUBLISHED, {"run": run}),
        (subjects.STEP, {"run": run}),
        (subjects.GENERATOR, {"run": run}),
        (subjects.DISCARD, {"run": run}),
        (subjects.HEARTBEAT, {"run": run}),
        (subjects.ROLLOUT, {"run": run}),
        (subjects.DLQ, {}),
    ]
    for channel, tokens in channels:
        records = observe(bus, channel, tokens, follow=False)
        async with aclosing(records):
            async for received in records:
                if concerns(received.message, run):
                    summary.add(received.message, received.time_ns)
    return {"run": run, **summary.result()}


@asynccontextmanager
async def watching(bus: Bus, board: Board, pools: Sequence[str]) -> AsyncIterator[None]:
    """Keep the board up to date while the block runs. Raises `UserError` on a server without our streams."""
    run = board.run
    try:
        events = (await bus.stream_info(subjects.STEP.stream)).state
    except NotFoundError:
        raise UserError(
            f"the NATS server has no stream {subjects.STEP.stream}: no run has been started there"
        ) from None
    recent = max(events.first_seq, events.last_seq - RECENT_EVENTS, 1)
    run_tokens = {"run": run}
    feeds = [
        _feed(bus, board, subjects.POLICY_PUBLISHED, run_tokens),
        _feed(bus, board, subjects.STEP, run_tokens),
        _feed(bus, board, subjects.DISCARD, run_tokens),
        _feed(bus, board, subjects.GENERATOR, run_tokens, recent),
        _feed(bus, board, subjects.HEARTBEAT, run_tokens, recent),
        _feed(bus, board, subjects.ROLLOUT, {"run": run, "purpose": Purpose.EVAL}),
        _feed(bus, board, subjects.DLQ, {}),
        _watch_queues(bus, board, pools),
    ]
    tasks = [asyncio.create_task(feed) for feed in feeds]
    for task in tasks:
        task.add_done_callback(_report)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report(task: asyncio.Task[None]) -> None:
    """A view that stays behind must not stop the run it shows, but somebody has to learn of it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the view is incomplete from here on", exc_info=error)


async def _feed(bus: Bus, board: Board, channel: Channel, tokens: Mapping[str, str], start: int | None = None) -> None:
    while True:
        try:
            records = observe(bus, channel, tokens, start=start)
            async with aclosing(records):
                async for received in records:
                    start = received.sequence + 1
                    if concerns(received.message, board.run):
                        board.add(received.message)
        except Unavailable:  # the body of a large message is out of reach for now
            await asyncio.sleep(QUEUE_SECONDS)


async def _watch_queues(bus: Bus, board: Board, pools: Sequence[str]) -> None:
    while True:
        queues = []
        for purpose in Purpose:
            for pool in pools:
                try:
                    queue = await _queue(bus, board.run, purpose, pool)
                except (APIError, Unavailable):
                    continue
                if purpose is not Purpose.SERVE or queue.waiting or queue.taken:  # most runs serve nobody
                    queues.append(queue)
        board.queues = queues
        await asyncio.sleep(QUEUE_SECONDS)


async def _queue(bus: Bus, run: str, purpose: str, pool: str) -> Queue:
    tokens = {"run": run, "purpose": purpose, "pool": pool}
    info = await bus.consumer_info(subjects.TASK.stream, subjects.TASK_WORKERS.name(**tokens))

    async def oldest(client: Client, limit: float) -> RawStreamMsg:
        stream, subject = subjects.TASK.stream, subjects.TASK.subject(**tokens)
        return await client.jetstream(timeout=limit).get_msg(stream, seq=1, subject=subject, direct=True, next=True)

    try:
        stored = (await bus.connection.call(oldest)).time
        age = time.time() - stored.timestamp() if stored else None
    except NotFoundError:
        age = None
    return Queue(f"tasks {purpose} {pool}", info.num_pending or 0, info.num_ack_pending or 0, age)
