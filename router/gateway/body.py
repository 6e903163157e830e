"""Reading a request from its connection: its body within a limit, and whether the client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from router.chat import ApiError

BODY_SECONDS = 60.0


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def read_body(receive: Receive, length: str | None, most: int, seconds: float = BODY_SECONDS) -> bytes:
    """The whole body; `length` is the header content-length.

    Raises `ApiError` 413 above `most` bytes and 408 after `seconds`, or `ClientGone`.
    """
    if length is not None and length.isdigit() and int(length) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(seconds):
            return await _received(receive, most)
    except TimeoutError:
        raise ApiError(408, f"the body of your request did not arrive within {seconds:g} s") from None


async def _received(receive: Receive, most: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise _too_large(most)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body of your request is longer than {most} bytes", code="request_too_large")


@asynccontextmanager
async def unless_gone(receive: Receive) -> AsyncIterator[None]:
    """Cancel what is inside as soon as the client closes its connection; raises `ClientGone` then.

    To be left before the last part of the response is sent: from then on it is the server that may close.
    """
    task = asyncio.current_task()
    assert task is not None, "needs a task that can be cancelled"
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
