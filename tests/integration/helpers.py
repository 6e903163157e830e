"""What several integration tests need: bounded waiting, the start of an endless read, raw payloads, dead letters."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from contracts.messages import DeadLetter
from contracts.subjects import DLQ, Channel
from infra.bus import Bus

T = TypeVar("T")


async def until(condition: Callable[[], object], expected: bool = True, seconds: float = 10.0) -> bool:
    """Wait until a condition holds, or not, and return what it is at the end."""
    deadline = time.monotonic() + seconds
    while bool(condition()) is not expected and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return bool(condition())


async def first(source: AsyncGenerator[T, None], count: int, seconds: float = 15.0) -> list[T]:
    """The first messages of an endless read."""
    found: list[T] = []
    async with asyncio.timeout(seconds), aclosing(source) as items:
        async for item in items:
            found.append(item)
            if len(found) == count:
                return found
    raise AssertionError("the read ended")


async def dead_letters(bus: Bus, run: str) -> list[DeadLetter]:
    """The run's dead letters so far."""
    letters = [got.message async for got in bus.read(DLQ, kind=DeadLetter, consumer="test", follow=False)]
    return [letter for letter in letters if f".{run}." in letter.subject]


async def retained(bus: Bus, channel: Channel, **tokens: str) -> int:
    """How many messages a channel retains; tokens not given match anything."""
    return sum((await bus.subjects(channel.stream, channel.filter(**tokens))).values())


async def publish_raw(bus: Bus, subject: str, payload: bytes, **headers: str) -> int:
    """Store bytes as they are and return their stream sequence."""
    stored = await bus.connection.send(subject, payload, id=secrets.token_hex(8), headers=headers, patience=20.0)
    return stored.sequence
