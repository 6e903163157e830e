"""Pulling from JetStream consumers: one inbox per reader, and the endless ordered read built on it.

nats-py's own `fetch` leaves an orphan request behind when cancelled, sleeps through a server that died, and reports a
deleted consumer as an empty result. Here every request has a heartbeat, and closing the inbox ends what it asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, Self

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from infra.connection import Connection, Unavailable, name_token
from infra.errors import UserError

log = structlog.get_logger(__name__)

EXPIRES_SECONDS = 4.5  # a request waits this long at the server
HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0  # neither message nor heartbeat: the consumer is gone
BATCH = 256
BATCH_BYTES = 16 * 1024 * 1024
TURN_SECONDS = 0.01  # how long a reader that always finds a message may keep the event loop
INACTIVE_SECONDS = 60.0  # the server forgets an ephemeral consumer that nobody pulls from
PAUSE_SECONDS = 0.2
PAUSE_SECONDS_MAX = 2.0
NANOSECONDS = 1_000_000_000


class ConsumerLost(Exception):
    """The consumer does not answer, is gone, or skipped a message."""


@dataclass(frozen=True)
class Raw:
    """A message as a consumer delivered it."""

    subject: str
    data: bytes
    headers: dict[str, str]
    reply: str  # where to acknowledge
    sequence: int  # in the stream
    consumer_sequence: int
    deliveries: int  # 1 = the first time
    time_ns: int  # server time at which it was stored, unix ns

    @classmethod
    def of(cls, message: Msg) -> Raw:
        """Read what the server wrote into the acknowledgement subject."""
        tokens = message.reply.split(".")
        # $JS.ACK.[domain.account.]stream.consumer.deliveries.sequence.consumer sequence.time.pending[.random]
        deliveries, sequence, consumer_sequence, time_ns = tokens[4:8] if len(tokens) == 9 else tokens[6:10]
        return cls(
            subject=message.subject,
            data=message.data,
            headers=message.headers or {},
            reply=message.reply,
            sequence=int(sequence),
            consumer_sequence=int(consumer_sequence),
            deliveries=int(deliveries),
            time_ns=int(time_ns),
        )


class Pull:
    """One inbox for pull requests to one consumer, used by one task: `request`, then `next` until nothing `remains`."""

    def __init__(self, connection: Connection, stream: str, consumer: str) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._queue: asyncio.Queue[Msg] = asyncio.Queue()  # bounded by what is requested
        self._subscription: Subscription | None = None
        self._lost = connection.lost
        self._turn_ends = 0.0  # monotonic time
        self.remaining = 0  # messages that the request in force may still bring
        self.exhausted = False  # the last request ended because the stream had no more messages

    async def __aenter__(self) -> Self:
        client = self._connection.client
        if not self._connection.connected:
            raise ConsumerLost("not connected")
        self._lost = self._connection.lost
        # nats-py may drop what exceeds the limits of a subscription; requests stay well below them.
        self._subscription = await client.subscribe(client.new_inbox(), cb=self._queue.put)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._subscription is not None:
            with contextlib.suppress(NatsError, OSError):
                await self._subscription.unsubscribe()

    async def request(
        self, batch: int, *, max_bytes: int | None = None, wait: bool = True, expires: float = EXPIRES_SECONDS
    ) -> None:
        """Ask for up to `batch` messages within `expires` seconds; without `wait`, only for those there are now."""
        assert self._subscription is not None
        body: dict[str, int | bool] = {"batch": batch}
        if max_bytes is not None:
            body["max_bytes"] = max_bytes
        if wait:
            body["expires"] = int(expires * NANOSECONDS)
            if expires > 2 * HEARTBEAT_SECONDS:
                body["idle_heartbeat"] = int(HEARTBEAT_SECONDS * NANOSECONDS)
        else:
            body["no_wait"] = True
        if self._lost.done():  # nats-py would send it after reconnecting, for an inbox that is gone by then
            raise ConsumerLost("connection lost")
        self.remaining, self.exhausted = batch, False
        await self._connection.client.publish(
            self._subject, json.dumps(body).encode(), reply=self._subscription.subject
        )

    async def next(self, *wake: asyncio.Future[Any]) -> Raw | None:
        """The next message; None when the request has ended or one of `wake` is done. Raises `ConsumerLost`."""
        while self.remaining > 0:
            message = await self._get(*wake)
            if message is None:
                return None
            if message.reply.startswith("$JS.ACK."):
                self.remaining -= 1
                return Raw.of(message)
            headers = message.headers or {}
            status, description = headers.get("Status", ""), headers.get("Description", "")
            if status == "100":  # heartbeat
                continue
            if status == "409" and description == "Batch Completed":
                # What it leaves undelivered, because of the limit on bytes, is not to come; with nothing left it only
                # follows the last message, and may arrive during the next request.
                self.remaining = max(self.remaining - int(headers.get("Nats-Pending-Messages", 0)), 0)
                self.exhausted = False
                continue
            full = status == "409" and description.startswith("Message Size Exceeds MaxBytes")
            if not full and status not in ("404", "408"):
                raise ConsumerLost("no such consumer" if status == "503" else f"status {status} {description}")
            self.remaining, self.exhausted = 0, not full
        return None

    async def drain(self, seconds: float) -> list[Raw]:
        """End the request at the server and return the messages that were already on their way."""
        assert self._subscription is not None
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self._subscription.drain()
        left = []
        while not self._queue.empty():
            message = self._queue.get_nowait()
            if message.reply.startswith("$JS.ACK."):
                left.append(Raw.of(message))
        return left

    async def _get(self, *wake: asyncio.Future[Any]) -> Msg | None:
        if not self._queue.empty():
            if time.monotonic() > self._turn_ends:
                await asyncio.sleep(0)
                self._turn_ends = time.monotonic() + TURN_SECONDS
            return self._queue.get_nowait()
        getter = asyncio.create_task(self._queue.get())
        waited: set[asyncio.Future[Any]] = {getter, self._lost, *wake}
        try:
            done, _ = await asyncio.wait(waited, timeout=SILENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not getter.done():
                getter.cancel()
        if getter in done:
            return getter.result()
        if done and self._lost not in done:
            return None
        raise ConsumerLost("connection lost" if done else "the consumer is silent")


async def tail(
    connection: Connection,
    stream: str,
    subject: str,
    *,
    name: str,
    start: int | None = None,
    last: bool = False,
    follow: bool = True,
) -> AsyncGenerator[Raw, None]:
    """Every message on a subject filter in order, from stream sequence `start` (None = all that is retained) on.

    `last` begins with the last message of each subject instead. Without `follow` it ends at the stream's present end.
    An ephemeral consumer does the work; whatever happens to it or to the server, another takes over behind the last
    message seen. A `start` below the first retained message goes on at that one. Raises `UserError` if the stream does
    not exist, `Unavailable` once the connection has been closed.
    """
    pause = PAUSE_SECONDS
    while True:
        try:
            async with _ordered_consumer(connection, stream, subject, name, start, last) as pull:
                expected = 1
                while True:
                    if pull.remaining == 0:
                        if pull.exhausted and not follow:
                            return
                        limit = max(BATCH_BYTES, 2 * connection.max_payload)
                        await pull.request(BATCH, max_bytes=limit, wait=follow)
                    raw = await pull.next()
                    if raw is None:
                        continue
                    if raw.consumer_sequence != expected:
                        raise ConsumerLost(f"message {expected} of the consumer is missing")
                    expected += 1
                    start, last, pause = raw.sequence + 1, False, PAUSE_SECONDS
                    yield raw
        except (ConsumerLost, Unavailable, NatsError, OSError) as error:
            if connection.closed:
                raise Unavailable("the connection to the NATS server has been closed") from None
            if isinstance(error, NotFoundError):
                raise UserError(f"stream {stream} does not exist on the NATS server; create it first") from None
            log.info("reading goes on with a new consumer", stream=stream, subject=subject, reason=str(error))
        await asyncio.sleep(pause)
        pause = min(pause * 2, PAUSE_SECONDS_MAX)


@contextlib.asynccontextmanager
async def _ordered_consumer(
    connection: Connection, stream: str, subject: str, name: str, start: int | None, last: bool
) -> AsyncIterator[Pull]:
    if start is not None:
        info = await connection.call(lambda client, limit: client.jetstream(timeout=limit).stream_info(stream))
        if start > info.state.last_seq + 1:
            # Otherwise new messages would be skipped until the sequence is reached.
            log.warning("the stream ends before the position asked for", stream=stream, position=start,
                        last=info.state.last_seq)  # fmt: skip
            start = info.state.last_seq + 1
    consumer = f"{name_token(name)}-{secrets.token_hex(4)}"
    config = ConsumerConfig(
        name=consumer,
        deliver_policy=_deliver_policy(start, last),
        opt_start_seq=None if last or not start else start,
        ack_policy=AckPolicy.NONE,
        filter_subject=subject,
        inactive_threshold=INACTIVE_SECONDS,
        mem_storage=True,
        num_replicas=1,
    )
    await connection.call(lambda client, limit: client.jetstream(timeout=limit).add_consumer(stream, config))
    try:
        async with Pull(connection, stream, consumer) as pull:
            yield pull
    finally:
        # Best effort and without waiting: the server forgets it anyway.
        with contextlib.suppress(NatsError, OSError):
            if connection.connected:
                await connection.client.publish(f"$JS.API.CONSUMER.DELETE.{stream}.{consumer}")


def _deliver_policy(start: int | None, last: bool) -> DeliverPolicy:
    if last:
        return DeliverPolicy.LAST_PER_SUBJECT
    return DeliverPolicy.BY_START_SEQUENCE if start else DeliverPolicy.ALL
