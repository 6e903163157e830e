"""What the router publishes, kept on disk until the bus has it: NATS may be away, requests do not notice.

`put` only remembers. One task writes what has come together to the spool, another publishes from its other end, in
order, and moves on when the server has stored it. So the way is the same with and without NATS: a killed process loses
what it was given in its last fraction of a second, and the next one goes on where the spool says. Message ids are the
same in every attempt, so the stream keeps each message once. Beyond the server's duplicate window (10 minutes) a
message whose acknowledgement was lost with the server may be there twice; consumers know it by its id.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgpack
import structlog

from contracts import codec
from contracts.errors import ContractError
from contracts.messages import Message
from contracts.subjects import FEEDBACK, ROUTE_DECISION, ROUTE_OUTCOME, Channel
from infra.bus import Bus, QueueFull, Unavailable
from router.spool import Spool

log = structlog.get_logger(__name__)

CHANNELS = {channel.name: channel for channel in (ROUTE_DECISION, ROUTE_OUTCOME, FEEDBACK)}
QUEUE = 10_000  # messages in memory, while the disk is slow
SPOOL_BYTES = 256 * 1024 * 1024  # some 200,000 requests
BATCH = 256
GATHER_SECONDS = 0.02
SYNC_SECONDS = 1.0  # between writes to disk that survive a loss of power too
PATIENCE = 3.0  # seconds of one attempt to publish a batch
PAUSE_SECONDS = 0.5  # before the next one
CLOSE_SECONDS = 5.0  # to publish what is left when the service stops; the rest stays on disk


class Outbox:
    """Publishes to the ROUTES stream of one run from a folder of its own. `run` is a background task."""

    def __init__(self, bus: Bus, directory: Path, run: str, *, spool_bytes: int = SPOOL_BYTES) -> None:
        """Open the spool in `directory`/outbox. Raises `UserError` where it cannot be used."""
        self._bus, self._run = bus, run
        self._spool = Spool(directory / "outbox", spool_bytes)
        self._memory: deque[tuple[Channel, str, Message]] = deque()
        self._given, self._spooled = asyncio.Event(), asyncio.Event()
        self._closing, self._written, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._trouble = ""
        self.lost = 0  # messages that found neither room in memory nor in the spool, or were no messages

    @property
    def backlog(self) -> int:
        """Bytes on disk that the bus does not have yet."""
        return self._spool.size

    def put(self, channel: Channel, message: Message, *, id: str) -> None:
        """Publish a message soon; never waits. Where there is no room it is counted in `lost`, the oldest stay."""
        if len(self._memory) >= QUEUE:
            self._lose(1, "too many wait for the disk")
        else:
            self._memory.append((channel, id, message))
            self._given.set()

    async def run(self) -> None:
        """Spool and publish until `close`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(), name="outbox to disk")
                tasks.create_task(self._publish(), name="outbox to the bus")
        finally:
            self._ended.set()
            with suppress(OSError):  # of the last sync: what is in the file is read by the next process
                self._spool.close()

    async def close(self) -> None:
        """Spool everything, publish what can be published within a few seconds, and end `run`."""
        self._closing.set()
        self._given.set()
        self._spooled.set()
        await _wait(self._ended, 2 * CLOSE_SECONDS)

    # --- memory to disk -----------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        synced = time.monotonic()
        while not self._closing.is_set() or self._memory:
            await _wait(self._given, SYNC_SECONDS)
            if not self._closing.is_set():
                await asyncio.sleep(GATHER_SECONDS)
            self._given.clear()
            if self._memory:
                batch = [self._memory.popleft() for _ in range(min(len(self._memory), 16 * BATCH))]
                await self._append(await asyncio.to_thread(self._encoded, batch))
                self._spooled.set()
            if time.monotonic() - synced >= SYNC_SECONDS:
                with suppress(OSError):  # tried again in a second; what cannot be written at all is said in `_append`
                    await asyncio.to_thread(self._spool.sync)
                synced = time.monotonic()
        self._written.set()
        self._spooled.set()

    async def _append(self, records: list[bytes]) -> None:
        """Into the spool; a disk that refuses is asked again, for as long as memory has room for what comes."""
        while True:
            try:
                kept = await asyncio.to_thread(self._spool.append, records)
            except OSError as error:
                log.error("the outbox cannot be written", error=str(error), waiting=len(records) + len(self._memory))
                if self._closing.is_set():
                    self._lose(len(records), str(error))
                    return
                await _wait(self._closing, SYNC_SECONDS)
                continue
            if kept < len(records):
                self._lose(len(records) - kept, "the spool has reached its limit, and the bus is away")
            return

    def _encoded(self, batch: list[tuple[Channel, str, Message]]) -> list[bytes]:
        records = []
        for channel, id, message in batch:
            try:
                records.append(msgpack.packb([channel.name, id, codec.encode(message)]))
            except ContractError as error:
                self._lose(1, f"{channel.name} {id}: {error}")
        return records

    def _lose(self, count: int, reason: str) -> None:
        before, self.lost = self.lost, self.lost + count
        if self.lost.bit_length() != before.bit_length():  # 1, 2, 4, 8, …
            log.error("messages are not published", lost=self.lost, reason=reason)

    # --- disk to bus --------------------------------------------------------------------------------------------------

    async def _publish(self) -> None:
        until: float | None = None
        while True:
            if self._closing.is_set():
                until = until or time.monotonic() + CLOSE_SECONDS
                done = self._written.is_set() and not self._spool.size
                if done or time.monotonic() > until or not self._bus.connected:
                    return
            self._spooled.clear()
            if not self._bus.connected:
                await _wait(self._closing, PAUSE_SECONDS)
                continue
            try:
                records = await asyncio.to_thread(self._spool.peek, BATCH)
                if records:
                    await self._send(records)
                    await asyncio.to_thread(self._spool.advance)
            except (Unavailable, QueueFull, OSError) as error:  # the bus, or the disk: no reason to stop answering
                if str(error) != self._trouble:
                    log.warning("publishing waits", reason=str(error), backlog_bytes=self._spool.size)
                self._trouble = str(error)
                await _wait(self._closing, PAUSE_SECONDS)
                continue
            self._trouble = ""
            if not records:
                await _wait(self._spooled, GATHER_SECONDS if self._closing.is_set() else PAUSE_SECONDS)

    async def _send(self, records: list[bytes]) -> None:
        """Publish a batch: decisions before the outcomes that name them, each channel in its order."""
        batches: dict[str, dict[str, Message]] = {name: {} for name in CHANNELS}
        for record in records:
            try:
                name, id, body = msgpack.unpackb(record)
                batches[name][id] = codec.decode(body, CHANNELS[name].message)
            except (ContractError, ValueError, KeyError, TypeError) as error:  # spooled by another version
                self._lose(1, f"a spooled message cannot be read: {error}")
        for name, messages in batches.items():
            if messages:
                await self._bus.publish_all(CHANNELS[name], messages, patience=PATIENCE, run=self._run)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
