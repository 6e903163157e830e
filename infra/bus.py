"""Messages over JetStream: publish, read, and the key-value bucket. Nothing else speaks to the server."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerInfo, Header, RawStreamMsg, StreamInfo
from nats.js.errors import APIError, NotFoundError

from contracts import codec
from contracts.errors import ContractError
from contracts.messages import Claim, Message
from contracts.subjects import BLOB, DLQ, KV_BUCKET, Channel
from infra import instruments, telemetry
from infra.blobs import HEADROOM_BYTES, BlobError, BlobStore
from infra.connection import Connection, PublishFailed, QueueFull, Unavailable
from infra.deadletters import dead_letter
from infra.messaging import Outgoing, Subscriber
from infra.pull import Raw, tail
from infra.settings import NatsSettings

__all__ = ["Bus", "PublishFailed", "QueueFull", "Received", "Subscriber", "Unavailable"]

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=Message)
T = TypeVar("T")

PUBLISH_PATIENCE = 300.0  # within the streams' duplicate window, so that repetition stays harmless
CLAIM_SECONDS = 60.0  # to read a message's body
WRONG_LAST_SEQUENCE = {10071, 10164}
TELL_PATIENCE = 5.0  # seconds
LISTEN_LIMIT = 16_384  # messages
SCHEMA_HEADER = "Tailrace-Schema"
OPERATION_HEADER = "KV-Operation"


@dataclass(frozen=True)
class Received(Generic[M]):
    """A decoded message and where it came from."""

    message: M
    sequence: int  # in its stream
    subject: str
    headers: dict[str, str]
    time_ns: int  # server time at which it was stored, unix ns
    deliveries: int = 1  # how often it was delivered, this time included


class Unusable(Exception):
    """A message that can never be used; `code` and the text go into its dead letter."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Bus:
    """One service's connection to the bus; `connect` makes it.

    Reads and requests survive the loss of the server; each method says how long it waits.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @classmethod
    async def connect(cls, settings: NatsSettings, name: str) -> Bus:
        """Connect as `name` (`[a-z0-9-]+`, part of the inbox subject).

        Raises `UserError` naming the address if the server cannot be reached within `settings.connect_timeout` seconds
        or refuses the credentials. Afterwards the connection is renewed without end.
        """
        return cls(await Connection.open(settings, name))

    @classmethod
    def later(cls, settings: NatsSettings, name: str) -> Bus:
        """Connect in the background, for as long as it takes; until then every method raises `Unavailable` at once."""
        return cls(Connection.later(settings, name))

    @property
    def connected(self) -> bool:
        """Whether the server can be talked to now: part of readiness."""
        return self.connection.connected

    async def close(self) -> None:
        """Flush and close within a few seconds."""
        await self.connection.close()

    # --- messages -----------------------------------------------------------------------------------------------------

    async def publish(
        self, channel: Channel, message: Message, *, id: str, patience: float = PUBLISH_PATIENCE, **tokens: str
    ) -> int:
        """Store a message and return its stream sequence.

        `id` names this content on its subject: publishing it again is harmless, and is what happens here until
        `patience` seconds are over. A message above the server's payload limit goes into the blob store and a `Claim`
        takes its place. Raises `InvalidMessage`, `QueueFull` at once when the stream is full, or `PublishFailed`.
        """
        return (await self.publish_all(channel, {id: message}, patience=patience, **tokens))[0]

    async def publish_all(
        self, channel: Channel, messages: Mapping[str, Message], *, patience: float = PUBLISH_PATIENCE, **tokens: str
    ) -> list[int]:
        """Store messages, given by their ids, as `publish` does one, and return their stream sequences.

        They are under way together and share one span. Whatever is raised, some of them may have been stored.
        """
        subject = channel.subject(**tokens)
        bodies = [codec.encode(message) for message in messages.values()]
        with telemetry.producer_span(channel.template, len(messages)):
            context: dict[str, str] = {}
            telemetry.inject(context)
            outgoing = []
            for (id, message), body in zip(messages.items(), bodies, strict=True):
                payload, headers = await self._claimed(message, body, tokens)
                # A stream remembers ids without their subject, and is shared by many runs.
                outgoing.append(Outgoing(f"{subject}/{id}", payload, headers | context))
            try:
                stored = await self.connection.send_all(subject, outgoing, patience=patience)
            except APIError as error:
                raise PublishFailed(f"{subject}: {error.description}") from error
        return [message.sequence for message in stored]

    async def _claimed(self, message: Message, body: bytes, tokens: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        """Payload and headers of a message, or of the claim that takes its place where the server would refuse it."""
        headers = codec.headers_of(message)
        if len(body) <= self.connection.max_payload - HEADROOM_BYTES:
            return body, headers
        digest = await BlobStore(self.connection, BLOB, tokens["run"]).put(body)
        claim = Claim(schema=headers[SCHEMA_HEADER], digest=digest, size=len(body))
        return codec.encode(claim), codec.headers_of(claim)

    async def read(
        self,
        channel: Channel,
        *,
        kind: type[M] | None = None,
        start: int | None = None,
        last: bool = False,
        follow: bool = True,
        consumer: str,
        **tokens: str,
    ) -> AsyncGenerator[Received[M], None]:
        """Messages in order, without end: from stream sequence `start`, or all that is retained.

        `last` begins with the last message of each subject instead; `follow=False` ends at the present end. Tokens not
        given match anything. A message that cannot be used becomes a dead letter of `consumer` and is skipped. Loss of
        the server or of the consumer is waited out and skips nothing. Raises `UserError` if the stream does not exist.
        Close it (`contextlib.aclosing`) when you stop early.
        """
        expected = kind or channel.message
        source = tail(
            self.connection,
            channel.stream,
            channel.filter(**tokens),
            name=consumer,
            start=start,
            last=last,
            follow=follow,
        )
        async with aclosing(source):
            async for raw in source:
                received = await self._usable(raw, channel, expected, consumer)
                if received is not None:
                    instruments.consumed(channel.template, 1, consumer)
                    yield received  # type: ignore[misc]  # `expected` is `kind` where the caller gave one

    # --- messages that are not stored: to whoever listens now --------------------------------------------------------

    async def tell(self, channel: Channel, message: Message, *, patience: float = TELL_PATIENCE, **tokens: str) -> None:
        """Publish on a core subject. Raises `InvalidMessage`, or `Unavailable` after `patience` seconds without server.

        That it was sent does not say that anybody got it; some may get it twice.
        """
        subject, body, headers = channel.subject(**tokens), codec.encode(message), codec.headers_of(message)
        telemetry.inject(headers)

        async def request(client: Client, _: float) -> None:
            await client.publish(subject, body, headers=headers)

        await self.connection.call(request, patience=patience)

    async def listen(
        self, channel: Channel, take: Callable[[M], None], *, kind: type[M], limit: int = LISTEN_LIMIT, **tokens: str
    ) -> Subscriber:
        """Give each message of a core subject to `take`, which must not block; `connection.unsubscribe` ends it.

        What cannot be used is logged and dropped, and so is what comes while `limit` messages wait. What is sent while
        the server is away is missed. Raises `Unavailable`.
        """

        async def usable(raw: Msg) -> None:
            try:
                message = codec.decode(memoryview(raw.data), kind)
            except Exception as error:  # hostile content must not stop a listener, whatever it manages to raise
                instruments.dropped(channel.template)
                log.warning("message dropped", subject=raw.subject, size=len(raw.data), reason=str(error))
                return
            instruments.consumed(channel.template, 1)
            take(message)

        return await self.connection.subscribe(channel.filter(**tokens), usable, limit=limit)

    # --- facts about messages and streams ----------------------------------------------------------------------------

    async def open(self, raw: Raw, kind: type[M]) -> Received[M]:
        """Decode a message, fetching its body where a claim stands for it. Raises `Unusable` or `Unavailable`."""
        try:
            data = memoryview(raw.data)
            if raw.headers.get(SCHEMA_HEADER) == codec.schema_of(Claim):
                claim, run = codec.decode(data, Claim), raw.subject.split(".")[2]
                blobs, limit = BlobStore(self.connection, BLOB, run), min(claim.size, codec.MAX_BYTES)
                data = memoryview(await blobs.get(claim.digest, timeout=CLAIM_SECONDS, max_bytes=limit))
            message = codec.decode(data, kind)
        except (ContractError, BlobError) as error:
            raise Unusable(error.code, str(error)) from error
        except Unavailable:
            raise
        except Exception as error:  # hostile content must not stop a reader, whatever it manages to raise
            raise Unusable(ContractError.code, f"{type(error).__name__}: {error}") from error
        return Received(message, raw.sequence, raw.subject, raw.headers, raw.time_ns, raw.deliveries)

    async def bury(self, raw: Raw, *, stream: str, consumer: str, code: str, reason: str) -> None:
        """Publish the dead letter of a message, once per message and consumer. Raises as `publish` does."""
        log.warning("dead letter", stream=stream, subject=raw.subject, sequence=raw.sequence, code=code, reason=reason)
        letter = dead_letter(raw, stream=stream, consumer=consumer, code=code, reason=reason, at_ns=time.time_ns())
        await self.publish(DLQ, letter, id=f"dlq.{stream}.{raw.sequence}.{consumer}.{code}", stream=stream.lower())

    async def _usable(self, raw: Raw, channel: Channel, kind: type[M], consumer: str) -> Received[M] | None:
        while True:
            try:
                return await self.open(raw, kind)
            except Unusable as error:
                await self.bury(raw, stream=channel.stream, consumer=consumer, code=error.code, reason=str(error))
                return None
            except Unavailable as error:  # its blob is out of reach for now, which says nothing about the message
                if self.connection.closed:
                    raise
                log.info("reading waits for the server", reason=str(error))

    async def withdraw(self, channel: Channel, sequence: int, *, patience: float = TELL_PATIENCE) -> None:
        """Delete a message that was published and is not wanted any more, handled or not. Raises `Unavailable`."""

        async def request(client: Client, limit: float) -> None:
            with contextlib.suppress(APIError):  # it is gone already
                await client.jetstream(timeout=limit).delete_msg(channel.stream, sequence)

        await self.connection.call(request, patience=patience)

    async def stream_info(self, name: str) -> StreamInfo:
        """Configuration and state of a stream. Raises nats-py's `NotFoundError`, or `Unavailable`."""
        return await self.connection.call(lambda client, limit: client.jetstream(timeout=limit).stream_info(name))

    async def consumer_info(self, stream: str, name: str) -> ConsumerInfo:
        """Configuration and state of a consumer. Raises nats-py's `NotFoundError`, or `Unavailable`."""

        async def request(client: Client, limit: float) -> ConsumerInfo:
            return await client.jetstream(timeout=limit).consumer_info(stream, name)

        return await self.connection.call(request)

    async def subjects(self, stream: str, filter: str) -> dict[str, int]:
        """How many messages a stream retains on each subject that matches."""
        return await self.connection.subjects(stream, filter)

    async def at_last(self, read: Callable[[], Awaitable[T]]) -> T:
        """What `read` gives, as soon as the server is there to give it. Raises `Unavailable` once this is closed."""
        told = False
        while True:
            try:
                return await read()
            except Unavailable as error:
                if self.connection.closed:
                    raise
                if not told:
                    log.warning("following waits for the server", error=str(error))
                    told = True

    # --- key-value ----------------------------------------------------------------------------------------------------

    async def get(self, key: str, *, bucket: str = KV_BUCKET) -> tuple[bytes, int] | None:
        """Value and revision of a key; None when it does not exist."""
        stored = await self._stored(f"KV_{bucket}", f"$KV.{bucket}.{key}")
        if stored is None or OPERATION_HEADER in (stored.headers or {}):
            return None
        return stored.data or b"", stored.seq or 0

    async def put(self, key: str, value: bytes, *, bucket: str = KV_BUCKET) -> int:
        """Set a key whatever it was and return the new revision. Raises `PublishFailed`."""
        return await self._write(key, value, bucket, {})

    async def create(self, key: str, value: bytes, *, bucket: str = KV_BUCKET) -> int | None:
        """Set a key that does not exist and return its revision; None when it exists. Raises `PublishFailed`."""
        revision = await self._compare_and_set(key, value, 0, bucket)
        if revision is None:
            stored = await self._stored(f"KV_{bucket}", f"$KV.{bucket}.{key}")
            if stored is None or OPERATION_HEADER in (stored.headers or {}):  # deleted, or expired in between
                return await self._compare_and_set(key, value, stored.seq or 0 if stored else 0, bucket)
        return revision

    async def update(self, key: str, value: bytes, revision: int, *, bucket: str = KV_BUCKET) -> int | None:
        """Set a key that is at `revision`, return the new one; None when it has moved on. Raises `PublishFailed`."""
        return await self._compare_and_set(key, value, revision, bucket)

    async def delete(self, key: str, revision: int, *, bucket: str = KV_BUCKET) -> bool:
        """Delete a key that is at `revision`; False when it has moved on. Raises `PublishFailed`."""
        return await self._compare_and_set(key, b"", revision, bucket, {OPERATION_HEADER: "DEL"}) is not None

    async def keys(self, pattern: str, *, bucket: str = KV_BUCKET) -> set[str]:
        """Keys that match a subject pattern; a deleted one may still be among them."""
        prefix = f"$KV.{bucket}."
        return {name.removeprefix(prefix) for name in await self.subjects(f"KV_{bucket}", prefix + pattern)}

    async def _compare_and_set(
        self, key: str, value: bytes, revision: int, bucket: str, headers: dict[str, str] | None = None
    ) -> int | None:
        expected = {**(headers or {}), Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision)}
        message_id = secrets.token_hex(12)
        try:
            return await self._write(key, value, bucket, expected, message_id)
        except APIError as error:
            if error.err_code not in WRONG_LAST_SEQUENCE:
                raise PublishFailed(f"key {key}: {error.description}") from error
        # The comparison comes before the server's search for duplicates: it may have been our own write, repeated.
        stored = await self._stored(f"KV_{bucket}", f"$KV.{bucket}.{key}")
        if stored is not None and (stored.headers or {}).get(Header.MSG_ID.value) == message_id:
            return stored.seq
        return None

    async def _write(
        self, key: str, value: bytes, bucket: str, headers: dict[str, str], message_id: str | None = None
    ) -> int:
        stored = await self.connection.send(
            f"$KV.{bucket}.{key}",
            value,
            id=message_id or secrets.token_hex(12),
            headers=headers,
            patience=PUBLISH_PATIENCE,
        )
        return stored.sequence

    async def _stored(self, stream: str, subject: str) -> RawStreamMsg | None:
        try:
            return await self.connection.call(
                lambda client, limit: client.jetstream(timeout=limit).get_msg(stream, subject=subject, direct=True)
            )
        except NotFoundError:
            return None
