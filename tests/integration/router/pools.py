"""Pools before real upstreams, for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from contracts.routing import Attempt, Role, Status
from router.chat import Chunk, Reply
from router.pools.openai import OpenAIPool
from router.pools.relay import Relay
from router.settings import PoolSettings
from tests.upstream import Answer, Script, Upstream

BODY: dict[str, Any] = {"model": "auto", "messages": [{"role": "user", "content": "How is everything?"}]}


def settings(upstream: Upstream, **changes: Any) -> PoolSettings:
    """Impatient, and without retries, unless told otherwise."""
    fields = {"url": upstream.url, "price_in": 1.0, "price_out": 10.0, "retries": 0, "first_token_seconds": 5.0}
    return PoolSettings(**{**fields, **changes})


@asynccontextmanager
async def one_pool(
    script: Script, key: str = "sk-secret", **changes: Any
) -> AsyncIterator[tuple[OpenAIPool, Upstream]]:
    async with Upstream(script) as upstream:
        pool = OpenAIPool("cloud", settings(upstream, **changes), key)
        try:
            yield pool, upstream
        finally:
            await pool.close()


class Bench:
    """A relay over upstreams a, b, …, in this order; `attempts` are of all its calls."""

    def __init__(self, upstreams: dict[str, Upstream], relay: Relay) -> None:
        self.upstreams = upstreams
        self.relay = relay
        self.order = tuple(upstreams)
        self.attempts: list[Attempt] = []

    @property
    def received(self) -> list[int]:
        """Calls per upstream."""
        return [upstream.count for upstream in self.upstreams.values()]

    @property
    def tried(self) -> list[tuple[str, Status]]:
        return [(attempt.pool, Status(attempt.status)) for attempt in self.attempts]

    async def complete(self, role: Role = Role.ANSWER) -> Reply:
        return await self.relay.complete(self.order, BODY, self.attempts, role=role)

    async def streamed(self, role: Role = Role.ANSWER) -> list[Chunk]:
        return [chunk async for chunk in self.relay.stream(self.order, BODY, self.attempts, role=role)]

    async def ask(self, streaming: bool) -> str:
        """The pool that answered."""
        return (await self.streamed())[-1].pool if streaming else (await self.complete()).pool

    def busy(self) -> list[int]:
        """Slots taken, per pool."""
        return [seat.slots.taken for seat in self.relay._seats.values()]


@asynccontextmanager
async def bench(
    *scripts: Script,
    clock: Callable[[], float] | None = None,
    each: dict[str, dict[str, Any]] | None = None,
    **changes: Any,
) -> AsyncIterator[Bench]:
    """`changes` are of all pools' settings, `each` of one."""
    names = "abcdef"[: len(scripts)]
    upstreams = {name: await Upstream(script).start() for name, script in zip(names, scripts, strict=True)}
    pools = {
        name: OpenAIPool(name, settings(upstream, **{**changes, **(each or {}).get(name, {})}))
        for name, upstream in upstreams.items()
    }
    relay = Relay(pools) if clock is None else Relay(pools, clock)
    try:
        yield Bench(upstreams, relay)
    finally:
        await relay.close()
        for upstream in upstreams.values():
            await upstream.stop()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until something holds that is soon to hold."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.005)


def failing(status: int, **headers: str) -> Answer:
    return Answer(status=status, headers=headers)
