"""Workers on a work queue: pull what there are free slots for, keep it alive while it is handled, acknowledge after."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from contracts.subjects import Durable
from infra import instruments, telemetry
from infra.bootstrap import ensure_consumer
from infra.bus import Bus, Received, Unusable
from infra.connection import Unavailable
from infra.errors import UserError
from infra.pull import EXPIRES_SECONDS, NANOSECONDS, ConsumerLost, Pull, Raw

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.1  # how soon a slot that became free elsewhere is noticed, and how long a turn lasts at most
PAUSE_SECONDS = 0.5  # before a lost consumer is asked again
SETTLE_PATIENCE = 120.0  # acknowledging over reconnects; later, the message would have been delivered again anyway
DEADLY = 4  # times `max_deliver` deliveries: a message that nobody lives to finish or to give up
GIVE_BACK_SECONDS = 3.0  # for all messages together, when stopping
RETRY_SECONDS_MAX = 30.0

Handler = Callable[[Received[Any]], Awaitable[None]]


class Retry(Exception):
    """Raised by a handler: deliver the message again after `delay` seconds. Counts as a delivery."""

    def __init__(self, delay: float) -> None:
        super().__init__(f"again in {delay:g} s")
        self.delay = delay


class Reject(Exception):
    """Raised by a handler: the message can never be handled. `code` and `reason` go into its dead letter."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


async def work(
    bus: Bus,
    durable: Durable,
    handler: Handler,
    *,
    slots: Callable[[], int] | int,
    stopping: asyncio.Event,
    drain: float,
    turn: asyncio.Lock | None = None,
    turn_seconds: float = POLL_SECONDS,
    freed: asyncio.Event | None = None,
    **tokens: str,
) -> None:
    """Handle a work queue's messages, each in its own task, until `stopping` is set.

    Never holds more messages than there are slots. Where `slots` is a function it says how many handlers could start
    now, beside those that have. Workers that share slots share `turn`: they ask one after the other, for a moment each,
    so that no slot is promised twice: `turn_seconds`, in which the others cannot take a message. `freed`, set and
    cleared at once, says that a slot has become free although its handler goes on; without it that is noticed a little
    later. A handler that returns has its message acknowledged; `Retry` and unexpected errors give it back after a
    delay; `Reject` and an unusable message become dead letters. After `stopping`, handlers have `drain` seconds; what
    is left is cancelled and given back at once.

    The server counts every delivery, also one that ended with a worker that was stopped, which says nothing about the
    message. So it becomes a dead letter only when a handler fails at its delivery `durable.max_deliver` or later, and
    unseen after `DEADLY` times as many: then it kills its workers. A handler may take as long as it likes.
    Raises `UserError` if the consumer is missing, differs from the catalogue, or is deleted.
    """
    await ensure_consumer(bus, durable, create=False, **tokens)
    worker = _Worker(bus, durable, handler, slots, turn, turn_seconds, freed or asyncio.Event(), durable.name(**tokens))
    await worker.run(stopping, drain)


@dataclass
class _Job:
    raw: Raw  # of the latest delivery: that is the one to acknowledge
    handed: asyncio.Future[None]  # done once the handler has it, and a `slots` function counts it, or never will
    task: asyncio.Task[None] | None = None


class _Worker:
    def __init__(
        self,
        bus: Bus,
        durable: Durable,
        handler: Handler,
        slots: Callable[[], int] | int,
        turn: asyncio.Lock | None,
        turn_seconds: float,
        freed: asyncio.Event,
        consumer: str,
    ) -> None:
        self._bus = bus
        self._durable = durable
        self._channel = durable.channel
        self._handler = handler
        self._slots = slots
        self._turn = turn or asyncio.Lock()
        self._expires = EXPIRES_SECONDS if turn is None else turn_seconds
        self._freed = freed
        self._consumer = consumer
        self._jobs: dict[int, _Job] = {}  # by stream sequence

    async def run(self, stopping: asyncio.Event, drain: float) -> None:
        stop = asyncio.create_task(stopping.wait())
        limit = 0.0  # an error or a cancellation gives everything back at once
        try:
            while not stop.done():
                try:
                    async with Pull(self._bus.connection, self._channel.stream, self._consumer) as pull:
                        await self._take(pull, stop)
                        for raw in await pull.drain(GIVE_BACK_SECONDS):
                            await self._give_back(raw)
                except (ConsumerLost, NatsError, OSError) as error:
                    if self._bus.connection.closed:
                        raise Unavailable("the connection to the NATS server has been closed") from None
                    log.info("consumer is asked again", consumer=self._consumer, reason=str(error))
                    await asyncio.wait({stop}, timeout=PAUSE_SECONDS)
                    await self._check_consumer()
            limit = drain
        finally:
            stop.cancel()
            await self._finish(limit)

    async def _check_consumer(self) -> None:
        try:
            if self._bus.connected:
                await self._bus.consumer_info(self._channel.stream, self._consumer)
        except NotFoundError:
            raise UserError(f"consumer {self._consumer} of stream {self._channel.stream} was deleted") from None
        except Unavailable:
            return  # which says nothing about the consumer

    async def _take(self, pull: Pull, stop: asyncio.Future[Any]) -> None:
        while not stop.done():
            async with self._turn:
                if (free := self._free()) > 0:
                    await self._ask(pull, free, stop)
                    continue
            freed = asyncio.ensure_future(self._freed.wait())
            waited = {stop, freed, *(job.task for job in self._jobs.values() if job.task is not None)}
            try:
                await asyncio.wait(waited, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            finally:
                freed.cancel()

    async def _ask(self, pull: Pull, free: int, stop: asyncio.Future[Any]) -> None:
        """One request from beginning to end, until everything it brought is counted where `slots` are counted."""
        await pull.request(free, expires=self._expires)
        while pull.remaining and not stop.done():
            raw = await pull.next(stop)
            if raw is not None:
                self._start(raw)
        while not stop.done() and (waited := {job.handed for job in self._jobs.values() if not job.handed.done()}):
            await asyncio.wait({stop, *waited}, return_when=asyncio.FIRST_COMPLETED)

    def _free(self) -> int:
        return self._slots() if callable(self._slots) else self._slots - len(self._jobs)

    def _start(self, raw: Raw) -> None:
        job = self._jobs.get(raw.sequence)
        if job is not None:  # delivered again, because the connection was away for longer than ack_wait
            job.raw = raw
            return
        instruments.consumed(self._channel.template, 1, self._consumer)
        self._jobs[raw.sequence] = job = _Job(raw, asyncio.get_running_loop().create_future())
        job.task = asyncio.create_task(self._process(job), name=f"{self._consumer} {raw.sequence}")
        job.task.add_done_callback(lambda _: self._forget(raw.sequence))

    def _forget(self, sequence: int) -> None:
        job = self._jobs.pop(sequence)
        if not job.handed.done():
            job.handed.set_result(None)

    async def _process(self, job: _Job) -> None:
        beating = asyncio.create_task(self._beat(job))
        try:
            settle = await self._outcome(job)
            await self._settle(job, settle)
        except asyncio.CancelledError:
            await self._give_back(job.raw)
        except Unavailable as error:  # it will be delivered again, here or elsewhere
            log.error("message not settled", consumer=self._consumer, sequence=job.raw.sequence, error=str(error))
        finally:
            beating.cancel()

    async def _outcome(self, job: _Job) -> bytes:
        """Handle a message and return the acknowledgement that it gets."""
        raw, last = job.raw, job.raw.deliveries >= self._durable.max_deliver
        if raw.deliveries > DEADLY * self._durable.max_deliver:
            return await self._bury(job, "max_deliveries", f"delivered {raw.deliveries} times and never finished")
        try:
            received = await self._bus.open(raw, self._channel.message)
            with telemetry.consumer_span(self._channel.template, raw.headers):
                job.handed.set_result(None)
                await self._handler(received)
        except Unusable as error:
            return await self._bury(job, error.code, str(error))
        except Reject as error:
            return await self._bury(job, error.code, error.reason)
        except Retry as error:
            if last:
                return await self._bury(job, "max_deliveries", f"asked for another delivery {raw.deliveries} times")
            return _nak(error.delay)
        except Exception as error:
            log.exception("handler failed", consumer=self._consumer, sequence=raw.sequence, deliveries=raw.deliveries)
            if last:
                return await self._bury(job, "max_deliveries", f"{type(error).__name__}: {error}")
            return _nak(min(2.0 ** (raw.deliveries - 1), RETRY_SECONDS_MAX))
        return b"+ACK"

    async def _bury(self, job: _Job, code: str, reason: str) -> bytes:
        await self._bus.bury(job.raw, stream=self._channel.stream, consumer=self._consumer, code=code, reason=reason)
        return f"+TERM {code}".encode()

    async def _settle(self, job: _Job, answer: bytes) -> None:
        """Acknowledge and wait until the server has noted it."""

        async def request(client: Client, limit: float) -> None:
            await client.request(job.raw.reply, answer, timeout=limit)

        await self._bus.connection.call(request, patience=SETTLE_PATIENCE)

    async def _give_back(self, raw: Raw) -> None:
        await self._tell(raw, _nak(0.0))

    async def _beat(self, job: _Job) -> None:
        while True:
            await asyncio.sleep(self._durable.ack_wait / 3)
            await self._tell(job.raw, b"+WPI")

    async def _tell(self, raw: Raw, answer: bytes) -> None:
        """Answer without waiting; while the server is away there is nobody to tell."""
        with contextlib.suppress(NatsError, OSError):
            if self._bus.connected:
                await self._bus.connection.client.publish(raw.reply, answer)

    async def _finish(self, limit: float) -> None:
        tasks = {job.task for job in self._jobs.values() if job.task is not None}
        if tasks and limit > 0:
            _, tasks = await asyncio.wait(tasks, timeout=limit)
        for task in tasks:
            task.cancel()
        if tasks:
            log.warning("unfinished messages are given back", consumer=self._consumer, messages=len(tasks))
            await asyncio.wait(tasks, timeout=GIVE_BACK_SECONDS)
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            if self._bus.connected:
                await self._bus.connection.client.flush(timeout=1)


def _nak(delay: float) -> bytes:
    return b"-NAK " + json.dumps({"delay": int(delay * NANOSECONDS)}).encode() if delay > 0 else b"-NAK"
