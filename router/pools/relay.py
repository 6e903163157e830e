"""Calls to pools with retries, fallback, cooldown and hedging. Which pools, in which order, is decided elsewhere."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from contracts.routing import Attempt, Role
from router.chat import Chunk, Reply
from router.pools.base import Fault, Pool, PoolError, PoolState
from router.pools.calls import Call, Job, Seat, Skipped

# What may pass at a second try; who was silent for as long as may be is not waited for once more.
AGAIN = frozenset({Fault.RATE_LIMITED, Fault.UNAVAILABLE, Fault.BROKEN})
BACKOFF_SECONDS = 0.1  # before the first retry, doubled for each further one, with a jitter of half of it
LONGEST_BACKOFF_SECONDS = 2.0
BUSY_SECONDS = 1.0  # told where pools are only busy


class Relay:
    """The pools of one router. `draw` gives the jitter, uniform in [0, 1)."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._seats = {name: Seat(pool) for name, pool in pools.items()}
        self._clock = clock
        self._draw = draw

    def states(self) -> list[PoolState]:
        """How the pools are at this moment; what their prompt caches hold is not known here."""
        return [_state(name, seat, self._clock()) for name, seat in self._seats.items()]

    async def complete(
        self,
        order: Iterable[str],
        body: dict[str, Any],
        attempts: list[Attempt],
        *,
        subtask: str = "",
        role: Role = Role.ANSWER,
    ) -> Reply:
        """The answer of the first pool in `order` that gives one; its attempt is then the last in `attempts`.

        Raises `PoolError`: the first relevant one (see `_Search.relevant`), with `retry_after` where waiting helps.
        """
        call = await self._first(order, Job(body, attempts, subtask), role, Call.whole)
        return call.settle()

    async def stream(
        self,
        order: Iterable[str],
        body: dict[str, Any],
        attempts: list[Attempt],
        *,
        subtask: str = "",
        role: Role = Role.ANSWER,
    ) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes, its usage last. Goes on to the next pool until there was a first token, not after.

        Its attempt is recorded at its end; closing the iterator is one, and stops the upstream. Raises `PoolError`.
        """
        call = await self._first(order, Job(body, attempts, subtask), role, Call.begin)
        async with aclosing(call.rest()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def close(self) -> None:
        """Close all pools."""
        await asyncio.gather(*(seat.pool.close() for seat in self._seats.values()))

    async def _first(
        self, order: Iterable[str], job: Job, role: Role, begin: Callable[[Call], Awaitable[None]]
    ) -> Call:
        """The first call that began well. A refusal is raised at once: every pool would refuse."""
        seats = [self._seats[name] for name in dict.fromkeys(order)]
        queue = deque(seats)
        search = _Search(job, begin)
        while queue:
            seat = queue.popleft()
            if seat.settings.window <= search.too_small:
                continue
            call = await self._hedged(seat, queue, search, role)
            if call is not None:
                return call
        raise search.relevant(seats, self._clock())

    async def _hedged(self, seat: Seat, queue: deque[Seat], search: _Search, role: Role) -> Call | None:
        """A call of this pool; after its silence the next in the queue is called as well. The first to speak wins."""
        if not (seat.settings.hedge_seconds and queue):
            return await self._tried(seat, search, role)
        tasks = {asyncio.create_task(self._tried(seat, search, role))}
        winner: Call | None = None
        try:
            done, pending = await asyncio.wait(tasks, timeout=seat.settings.hedge_seconds)
            other = next((each for each in queue if _state(each.name, each, self._clock()).available), None)
            if pending and other is not None:
                queue.remove(other)
                tasks.add(asyncio.create_task(self._tried(other, search, Role.HEDGE)))
            pending = set(tasks)
            while pending and winner is None:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                winner = next((call for task in done if (call := task.result()) is not None), None)
            return winner
        finally:
            await _dropped(tasks, keep=winner)

    async def _tried(self, seat: Seat, search: _Search, role: Role) -> Call | None:
        """A call of this pool that began well, retries included; None where none did. Raises what all would refuse."""
        for attempt in range(1 + seat.settings.retries):
            if attempt:
                longest = min(BACKOFF_SECONDS * 2 ** (attempt - 1), LONGEST_BACKOFF_SECONDS)
                await asyncio.sleep(longest * (0.5 + 0.5 * self._draw()))
            call = Call(seat, search.job, role, self._clock)
            try:
                await search.begin(call)
            except Skipped:
                search.skipped.append(seat)
                return None
            except PoolError as error:
                search.failed(seat, error)
                if error.fault is Fault.REFUSED:
                    raise
                if error.fault not in AGAIN:
                    return None
            else:
                return call
        return None


@dataclass
class _Search:
    """A call that is looked for, and what went wrong on the way."""

    job: Job
    begin: Callable[[Call], Awaitable[None]]
    errors: list[tuple[Seat, PoolError]] = field(default_factory=list)
    skipped: list[Seat] = field(default_factory=list)  # they might have answered, but were not called
    too_small: int = 0  # largest window that was too small

    def failed(self, seat: Seat, error: PoolError) -> None:
        self.errors.append((seat, error))
        if error.fault is Fault.TOO_LONG:
            self.too_small = max(self.too_small, seat.settings.window)

    def relevant(self, seats: list[Seat], now: float) -> PoolError:
        """The error that tells most: not the last one's noise.

        The first one of the most preferred pool that could have answered. A prompt that is too long is the reason
        where it would have fitted none of those that failed otherwise or were left alone.
        """
        able = [seat for seat in seats if seat.settings.window > self.too_small]
        error = next((error for seat, error in self.errors if seat in able), None)
        if error is None and self.errors and not any(seat in able for seat in self.skipped):
            return next(error for _, error in self.errors if error.fault is Fault.TOO_LONG)
        error = error or PoolError(Fault.RATE_LIMITED, "every pool that could answer this is busy or cooling down")
        wait = min((seat.breaker.retry_after(now) for seat in able), default=0.0)
        if wait > 0:
            error.retry_after = wait
        elif error.fault is Fault.RATE_LIMITED:
            error.retry_after = BUSY_SECONDS
        return error


def _state(name: str, seat: Seat, now: float) -> PoolState:
    wait = seat.breaker.retry_after(now)
    if wait > 0:
        return PoolState(name, seat.settings, False, seat.breaker.state(now).value, retry_after=wait)
    if seat.slots.full:
        return PoolState(name, seat.settings, False, "full", retry_after=BUSY_SECONDS)
    return PoolState(name, seat.settings)


async def _dropped(tasks: set[asyncio.Task[Call | None]], keep: Call | None) -> None:
    """End the calls that did not win; all of them if that is cancelled."""
    for task in tasks:
        task.cancel()
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        keep = None
        raise
    finally:  # those that have not ended yet end without a call: they are cancelled
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                call = task.result()
                if call is not None and call is not keep:
                    await call.abandon()
