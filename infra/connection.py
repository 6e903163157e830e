"""One NATS connection that never gives up: endless reconnection, and requests repeated over it until patience is over.

Everything that talks to the server goes through `Connection.call`: each attempt has a short limit, ends at once when
the connection drops, and is repeated once it is back. nats-py alone loses a publish issued just after the server died,
and can wait forever on a write buffer whose flusher has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import BadHeaderError, BadSubjectError, MaxPayloadError, SlowConsumerError
from nats.errors import Error as NatsError
from nats.js.errors import APIError, ServiceUnavailableError

from infra.errors import UserError
from infra.messaging import Outgoing, Stored, Subscriber, store, subscribe
from infra.settings import NatsSettings

log = structlog.get_logger(__name__)

T = TypeVar("T")

SMALLEST_PAYLOAD = 64 * 1024  # bytes; half of it is left for chunks of blobs beside their headers
ATTEMPT_SECONDS = 3.0  # limit of the first attempt; it doubles with each one that runs into it
ATTEMPT_SECONDS_MAX = 30.0
PAUSE_SECONDS = 0.1  # between attempts, doubling
PAUSE_SECONDS_MAX = 2.0
REACH_SECONDS_MAX = 30.0  # between attempts to connect for the first time, where they fail for good
CALL_PATIENCE = 60.0
TOLD_ATTEMPTS = {4, 16, 64}  # that many failures of one request are worth a line in the log
CLOSE_SECONDS = 3.0
WATCH_SECONDS = 1.0
CANCEL_SECONDS = 0.5

FULL = {10002, 10023, 10047, 10077}  # account, server or stream limits: the publisher decides
TOO_MANY_REQUESTS = 429
PERMANENT = (BadSubjectError, BadHeaderError, MaxPayloadError)


class Unavailable(Exception):
    """The server gave no usable answer within the caller's patience."""


class PublishFailed(Unavailable):
    """A message was not stored: forbidden, refused, or no acknowledgement within the caller's patience."""


class QueueFull(Exception):
    """The stream refuses new messages because it is full: back-pressure, the caller decides."""


class Connection:
    """A connection of one service; `open` makes it."""

    def __init__(self, settings: NatsSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._client = Client()
        self._closing = False
        self._refused: asyncio.Future[str] | None = None  # awaited while connecting for the first time
        self._up = asyncio.Event()
        self._reached = asyncio.Event()  # the server has been there once
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forbidden: set[str] = set()  # subjects the server refused lately
        self._last_trouble = ""
        self._reaching: asyncio.Task[None] | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._subscribers: list[Subscriber] = []

    @classmethod
    async def open(cls, settings: NatsSettings, name: str) -> Connection:
        """Connect within `settings.connect_timeout` seconds.

        Raises `UserError` naming the address if nobody answers there, the credentials are refused, or messages have to
        be smaller than `SMALLEST_PAYLOAD`.
        """
        _check_credentials(settings)
        connection = cls(settings, name)
        connection._refused = asyncio.get_running_loop().create_future()
        connecting = asyncio.create_task(connection._connect())
        try:
            waited: set[asyncio.Future[Any]] = {connecting, connection._refused}
            done, _ = await asyncio.wait(
                waited,
                timeout=settings.connect_timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            if not connecting.done():
                await _bounded(connecting, 0.0)
        if connecting in done:
            try:
                connecting.result()
            except (NatsError, ValueError, ImportError) as error:
                raise UserError(f"NATS server {settings.url}: {error}; check nats.url and nats.credentials") from None
            connection._refused = None
            if too_small := connection._too_small():
                await connection.close()
                raise UserError(too_small)
            connection._watching = asyncio.create_task(connection._watch(), name="connection watch")
            return connection
        connection._closing = True
        if connection._refused in done:
            raise UserError(
                f"NATS server {settings.url} refused the credentials of user {settings.user!r}; "
                "check nats.user, nats.password and nats.credentials"
            )
        raise UserError(
            f"NATS server {settings.url} cannot be reached within {settings.connect_timeout:g} s "
            f"({connection._last_trouble or 'no answer'}); start it or correct nats.url"
        )

    @classmethod
    def later(cls, settings: NatsSettings, name: str) -> Connection:
        """Connect in the background, for as long as it takes.

        Until the server has been reached for the first time, what is asked of it raises `Unavailable` at once. Raises
        `UserError` if there is no credentials file.
        """
        _check_credentials(settings)
        connection = cls(settings, name)
        connection._reaching = asyncio.create_task(connection._reach(), name="connecting")
        return connection

    async def reached(self) -> None:
        """Wait, without end, until the server has been reached for the first time."""
        await self._reached.wait()

    @property
    def connected(self) -> bool:
        """Whether the server can be talked to now."""
        return self._client.is_connected and not self._client.is_draining

    @property
    def closed(self) -> bool:
        """Whether `close` was called: nothing will ever be answered again."""
        return self._closing

    @property
    def client(self) -> Client:
        """The nats-py client of the moment; another one may take its place after an error that closed it."""
        return self._client

    @property
    def lost(self) -> asyncio.Future[None]:
        """Done when the present connection has dropped: what was asked over it may never be answered."""
        return self._lost

    @property
    def max_payload(self) -> int:
        """The server's limit on a message with its headers, in bytes."""
        return self._client.max_payload

    async def call(
        self, request: Callable[[Client, float], Coroutine[Any, Any, T]], *, patience: float = CALL_PATIENCE
    ) -> T:
        """Repeat an idempotent request, given the client and the attempt's limit in seconds, until it is answered.

        An answer that is a lasting error is raised as nats-py's `APIError`; `Unavailable` after `patience` seconds, and
        at once where the server has never been reached.
        """
        if not self._reached.is_set():
            trouble = self._last_trouble or "no answer"
            raise Unavailable(f"NATS server {self._settings.url} has not been reached yet ({trouble})")
        deadline = time.monotonic() + patience
        limit, pause = ATTEMPT_SECONDS, PAUSE_SECONDS
        trouble, attempts = "not connected", 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._up.wait()
            if self._closing:
                raise Unavailable("this connection to the NATS server has been closed")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise Unavailable(f"NATS server {self._settings.url}: {trouble} for {patience:g} s")
            try:
                return await self._attempt(request, min(limit, remaining))
            except APIError as error:
                if not _transient(error):
                    raise
                trouble = str(error)
            except PERMANENT:
                raise
            except TimeoutError:
                trouble, limit = "no answer", min(limit * 2, ATTEMPT_SECONDS_MAX)
            except (NatsError, OSError) as error:
                trouble = str(error)
            attempts += 1
            tell = log.warning if attempts in TOLD_ATTEMPTS else log.debug
            tell("request is repeated", attempts=attempts, trouble=trouble)
            await asyncio.sleep(min(pause, max(deadline - time.monotonic(), 0)))
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    async def _attempt(self, request: Callable[[Client, float], Coroutine[Any, Any, T]], limit: float) -> T:
        # In a task of its own, because nats-py swallows cancellation while it flushes.
        task = asyncio.create_task(request(self._client, limit))
        task.add_done_callback(_retrieve)
        try:
            waited: set[asyncio.Future[Any]] = {task, self._lost}
            done, _ = await asyncio.wait(waited, timeout=limit + 1.0, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if task in done:
            return task.result()
        raise ConnectionError("connection lost") if self._lost in done else TimeoutError("no answer")

    async def send(
        self, subject: str, payload: bytes, *, id: str, headers: Mapping[str, str], patience: float
    ) -> Stored:
        """Publish one message to a stream and wait until it is stored. Raises as `send_all`."""
        return (await self.send_all(subject, [Outgoing(id, payload, headers)], patience=patience))[0]

    async def send_all(self, subject: str, messages: Sequence[Outgoing], *, patience: float) -> list[Stored]:
        """Publish messages to a stream, all at once, and wait until each is stored; an attempt repeats what is missing.

        Raises `QueueFull` at once when the stream is full, `PublishFailed` when the server forbids the subject or
        `patience` seconds are over, and nats-py's `APIError` when the stream refuses a message for good. Some of the
        messages may be stored then.
        """
        stored: dict[int, Stored] = {}

        async def attempt(client: Client, limit: float) -> None:
            if subject in self._forbidden:
                self._forbidden.discard(subject)
                raise PublishFailed(f"{subject}: this user has no permission to publish there")
            await store(client, subject, messages, stored, limit)

        try:
            await self.call(attempt, patience=patience)
        except APIError as error:
            if error.err_code in FULL:
                raise QueueFull(f"{subject}: {error.description}") from error
            raise
        except PublishFailed:
            raise
        except Unavailable as error:
            missing = [message.id for number, message in enumerate(messages) if number not in stored]
            if missing:  # the last answer may have come just as the time was over
                raise PublishFailed(f"message {missing[0]}: {error}") from error
        return [stored[number] for number in range(len(messages))]

    async def subjects(self, stream: str, filter: str) -> dict[str, int]:
        """How many messages a stream retains on each subject that matches. Raises as `call`."""
        info = await self.call(
            lambda client, limit: client.jetstream(timeout=limit).stream_info(stream, subjects_filter=filter)
        )
        return info.state.subjects or {}

    async def subscribe(self, subject: str, take: Callable[[Msg], Awaitable[None]], *, limit: int) -> Subscriber:
        """Take messages of a core subject, in order, until `unsubscribe`; what is sent while disconnected is missed.

        What is published over this connection after it returns finds the subscription in place. Raises `Unavailable`.
        """
        subscriber = Subscriber(subject, take, limit)
        await self.call(lambda client, _: subscribe(client, subscriber))
        self._subscribers.append(subscriber)
        return subscriber

    async def unsubscribe(self, subscriber: Subscriber) -> None:
        """End a subscription; a server that is away never learns of it, and forgets it by itself."""
        self._subscribers.remove(subscriber)
        if subscriber.subscription is not None:
            with contextlib.suppress(NatsError, OSError):
                await subscriber.subscription.unsubscribe()

    async def close(self) -> None:
        """Flush and close, in bounded time whatever the server does."""
        self._closing = True
        for task in (self._reaching, self._watching, self._reopening):
            if task is not None:
                task.cancel()
        await _bounded(self._close_client(), CLOSE_SECONDS)
        self._up.set()  # whoever waits for the connection finds it closed

    async def _close_client(self) -> None:
        with contextlib.suppress(NatsError, OSError):
            if self.connected:
                await self._client.flush(timeout=1)
        with contextlib.suppress(NatsError, OSError):
            await self._client.close()

    async def _reach(self) -> None:
        """Connect for the first time, whatever stands in the way and for however long."""
        pause = PAUSE_SECONDS_MAX
        while not self._closing:
            try:
                await self._connect()
            except (NatsError, OSError, ValueError, ImportError) as error:
                self._last_trouble = str(error)
                log.error("NATS cannot be reached", url=self._settings.url, error=str(error))
                await asyncio.sleep(pause)
                pause = min(pause * 2, REACH_SECONDS_MAX)
                continue
            if too_small := self._too_small():
                log.error(too_small)
            self._watching = asyncio.create_task(self._watch(), name="connection watch")
            return

    def _too_small(self) -> str:
        """A sentence where the server takes only messages that are too small; otherwise empty."""
        if self.max_payload >= SMALLEST_PAYLOAD:
            return ""
        return (
            f"NATS server {self._settings.url}: its max_payload is {self.max_payload} bytes, "
            f"Tailrace needs at least {SMALLEST_PAYLOAD}; raise it in the server's configuration"
        )

    async def _connect(self) -> None:
        settings = self._settings
        self._client = Client()
        await self._client.connect(
            servers=[part.strip() for part in settings.url.split(",")],
            name=self._name,
            user=settings.user or None,
            password=settings.password.get_secret_value() or None,
            user_credentials=str(settings.credentials) if settings.credentials else None,
            inbox_prefix=f"_INBOX_{name_token(self._name)}",
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.5,  # type: ignore[arg-type]
            connect_timeout=3,
            ping_interval=15,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_connected,
            closed_cb=self._on_closed,
        )
        for subscriber in self._subscribers:  # of the client before; through reconnections it takes them along itself
            await subscribe(self._client, subscriber)
        await self._on_connected()

    async def _watch(self) -> None:
        """Close a client whose reconnecting has ended without a connection; another is opened in its place."""
        suspect: Client | None = None
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            client, reconnecting = self._client, self._client._reconnection_task
            stuck = client.is_reconnecting and (reconnecting is None or reconnecting.done())
            if stuck and client is suspect:
                log.error("reconnecting has stopped, opening another connection")
                await _bounded(client.close(), CLOSE_SECONDS)
            suspect = client if stuck else None

    async def _on_connected(self) -> None:
        self._last_trouble = ""
        self._reached.set()
        if self._lost.done():
            self._lost = asyncio.get_running_loop().create_future()
            log.info("connected again", url=self._settings.url)
        self._up.set()

    async def _on_disconnected(self) -> None:
        self._up.clear()
        # What nats-py has buffered it would send after reconnecting: requests that nobody waits for any more, and
        # subscriptions ended meanwhile, which would swallow messages. Whatever matters is repeated by `call`.
        self._client._pending.clear()
        self._client._pending_data_size = 0
        if not self._lost.done():
            self._lost.set_result(None)
            if not self._closing:
                log.warning("connection lost", url=self._settings.url)

    async def _on_closed(self) -> None:
        # nats-py closes for good on protocol errors, such as an expired credential or a payload above the limit.
        if not self._closing:
            log.error("connection closed by an error, opening another", error=str(self._client.last_error))
            self._reopening = asyncio.create_task(self._connect())

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if "permissions violation" in text.lower():
            log.error("permission violation", detail=text)
            self._forbidden |= set(re.findall(r'publish to "([^"]+)"', text, re.IGNORECASE))
        elif isinstance(error, SlowConsumerError):
            log.warning("messages dropped by the client, nobody took them in time", subject=error.subject)
        elif text != self._last_trouble:  # the same trouble at every attempt to reconnect is one line
            log.warning("connection trouble", error=text)
            self._last_trouble = text
        if "authorization" in text.lower() and self._refused is not None and not self._refused.done():
            self._refused.set_result(text)


def _transient(error: APIError) -> bool:
    # A server that is starting up answers 503, or nobody answers at all.
    busy = isinstance(error, ServiceUnavailableError) or error.code == TOO_MANY_REQUESTS
    return busy and error.err_code not in FULL


async def _bounded(work: Awaitable[None], seconds: float) -> None:
    """Wait for at most so long, then cancel."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=seconds)
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_SECONDS)
    if task.done():
        _retrieve(task)


def name_token(name: str) -> str:
    """A name as a token of subjects and consumer names."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def _retrieve(task: asyncio.Future[Any]) -> None:
    # An attempt that was abandoned may still fail; nobody waits for it.
    if not task.cancelled():
        task.exception()


def _check_credentials(settings: NatsSettings) -> None:
    if settings.credentials is not None and not settings.credentials.is_file():
        raise UserError(f"nats.credentials: there is no file {settings.credentials}")
