"""Answers as server-sent events: `data: {chunk}` … `data: [DONE]`, and comments while there is nothing to say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

from starlette.types import Send

from router.gateway.body import ClientGone
from router.gateway.headers import Raw

STALL_SECONDS = 60.0  # of a client that does not read; its answer is given up then, for it holds a slot of a pool
SILENCE_SECONDS = 10.0  # after which a comment says that the answer is still being made; proxies give up after 30 to 60


class Events:
    """The response to a streaming request.

    It begins with the first event, so that what fails before is an error of its own with its status; or with a comment
    after `silence` seconds, and then also a failure is an event. An async context manager: comments end with it. Where
    the client reads nothing for `stall` seconds, what is inside is cancelled, and `ClientGone` raised.
    """

    def __init__(
        self,
        send: Send,
        headers: Callable[[], Raw],
        silence: float = SILENCE_SECONDS,
        stall: float = STALL_SECONDS,
    ) -> None:
        self.started = False
        self._send = send
        self._headers = headers
        self._silence = silence
        self._stall = stall
        self._last = 0.0  # when the last event was begun
        self._sending = False
        self._stalled = False
        self._task: asyncio.Task[Any] | None = None
        self._pulse: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Events:
        self._last = asyncio.get_running_loop().time()
        self._task = asyncio.current_task()
        self._pulse = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._pulse is not None and self._task is not None, "not entered"
        self._pulse.cancel()
        if self._stalled and isinstance(error, asyncio.CancelledError) and self._task.uncancel() == 0:
            raise ClientGone from None

    async def data(self, payload: bytes) -> None:
        """Send an event. Waits while the client does not read."""
        await self._write(b"data: %b\n\n" % payload)

    async def comment(self, text: str) -> None:
        """Send a line that clients skip."""
        await self._write(b": %b\n\n" % text.encode())

    async def end(self) -> None:
        """Nothing more comes."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, event: bytes) -> None:
        self._last = asyncio.get_running_loop().time()
        self._sending = True
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers()})
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        self._sending = False

    async def _watch(self) -> None:
        """Send a comment whenever it has been silent for long; give up where the client does not read."""
        assert self._task is not None
        loop = asyncio.get_running_loop()
        while True:
            limit = self._stall if self._sending else self._silence
            await asyncio.sleep(max(self._last + limit - loop.time(), 0.01))
            waited = loop.time() - self._last
            if self._sending and waited >= self._stall:
                self._stalled = True
                self._task.cancel()
                return
            if not self._sending and waited >= self._silence:
                await self.comment("keep-alive")
