"""Liveness and readiness of a process, and the two HTTP endpoints that tell them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from infra.errors import UserError

REQUEST_BYTES = 8192
REQUEST_SECONDS = 5.0


class Connected(Protocol):
    """What readiness needs to know of the bus."""

    @property
    def connected(self) -> bool: ...


class Health:
    """What a service knows about itself. `clock` gives seconds.

    Liveness counts from the first `ready`: how long a start may take is the orchestrator's decision (a startup probe on
    /readyz).
    """

    def __init__(self, limit: float, clock: Callable[[], float], *, needs_bus: bool = True) -> None:
        """`limit` in seconds; without `needs_bus` the service does its work while the bus is away."""
        self._limit = limit
        self._clock = clock
        self._needs_bus = needs_bus
        self._last_beat: float | None = None
        self.is_ready = False
        self.detail = "starting"

    def ready(self, detail: str) -> None:
        """The service does its work."""
        self.is_ready, self.detail = True, detail
        self.beat()

    def not_ready(self, detail: str) -> None:
        """The service cannot do its work now, for this reason."""
        self.is_ready, self.detail = False, detail

    def beat(self) -> None:
        """The main loop goes on."""
        self._last_beat = self._clock()

    def liveness(self) -> tuple[bool, str]:
        """Whether the main loop goes on, and a sentence."""
        if self._last_beat is None:
            return True, "starting"
        silent = self._clock() - self._last_beat
        return silent <= self._limit, f"last beat {silent:.1f} s ago, limit {self._limit:g} s"

    def readiness(self, connected: bool) -> tuple[bool, str]:
        """Whether the service can do its work, and a sentence."""
        if not connected and self._needs_bus:
            return False, "not connected to NATS"
        away = "" if connected else "; not connected to NATS"
        return self.is_ready, (self.detail or "ready") + away


@asynccontextmanager
async def serve_health(health: Health, bus: Connected, host: str, port: int) -> AsyncIterator[int]:
    """Answer GET /healthz and /readyz with 200 or 503 and a sentence; yields the port. Raises `UserError` if taken."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(respond(request, health, bus.connected))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # a broken client costs its own request only
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, host, port, limit=REQUEST_BYTES)
    except OSError as error:
        raise UserError(
            f"service.http_port {port} on {host}: {error.strerror}; choose another port, or 0 for any free one"
        ) from None
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def respond(request: bytes, health: Health, connected: bool) -> bytes:
    """The HTTP response to a request head."""
    method, _, rest = request.split(b"\r\n", 1)[0].partition(b" ")
    path = rest.split(b" ")[0].split(b"?")[0]
    if method != b"GET":
        return _response("405 Method Not Allowed", "only GET")
    if path == b"/healthz":
        good, sentence = health.liveness()
    elif path == b"/readyz":
        good, sentence = health.readiness(connected)
    else:
        return _response("404 Not Found", "/healthz or /readyz")
    return _response("200 OK" if good else "503 Service Unavailable", sentence)


def _response(status: str, sentence: str) -> bytes:
    body = (sentence + "\n").encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
