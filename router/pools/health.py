"""Whether a pool may be called: its breaker, and its slots.

The breaker is pure; times are seconds of any clock that only goes forwards.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

LONGEST_FACTOR = 8  # of the cooldown, which doubles each time
LONGEST_RETRY_AFTER = 3600.0  # seconds; an upstream that asks for more is asked again all the same
PROBE_SECONDS = 1.0  # told to those who come while another call finds out whether the pool is back


class State(StrEnum):
    """Of a breaker."""

    CLOSED = "closed"  # calls go through
    COOLING = "cooling down"  # none does
    HALF_OPEN = "probing"  # the cooldown is over: one call at a time finds out whether the pool is back


class Breaker:
    """Leaves a pool alone after `failures` failed calls in a row, for `cooldown` seconds, then twice as long, ….

    Every call that was admitted reports once how it ended: `succeeded`, `failed` or `abandoned`; a stream says `spoke`
    before that, on its first token. Where the call that finds out whether the pool is back takes longer than the
    cooldown took, as a long answer that is not streamed does, another one may try beside it.
    """

    def __init__(self, failures: int, cooldown: float) -> None:
        self._failures = failures
        self._cooldown = cooldown
        self._row = 0  # failures since the last success
        self._trips = 0  # cooldowns since the last success
        self._last = cooldown  # seconds of the last one
        self._until = 0.0
        self._open = False  # tripped, and no call has succeeded since
        self._probed = 0.0  # until when nobody else finds out whether the pool is back

    def state(self, now: float) -> State:
        """What a call would meet."""
        if not self._open:
            return State.CLOSED
        return State.COOLING if now < self._until else State.HALF_OPEN

    def retry_after(self, now: float) -> float:
        """Seconds until a call may be admitted; 0 = now."""
        match self.state(now):
            case State.COOLING:
                return self._until - now
            case State.HALF_OPEN if now < self._probed:
                return PROBE_SECONDS
            case _:
                return 0.0

    def admit(self, now: float) -> bool:
        """Whether a call may start. True obliges to report its end."""
        if self.retry_after(now) > 0:
            return False
        if self._open:
            self._probed = now + self._last
        return True

    def spoke(self, now: float) -> None:
        """A stream gave its first token: the pool is back, but one more failure trips the breaker again."""
        if self.state(now) is State.HALF_OPEN:
            self._open = False
            self._row = self._failures - 1

    def succeeded(self, now: float) -> None:
        """The pool answered, if only to refuse. What was asked before it tripped does not shorten its cooldown."""
        if self.state(now) is not State.COOLING:
            self._row = self._trips = 0
            self._open = False

    def failed(self, now: float, *, retry_after: float | None = None, at_once: bool = False) -> None:
        """The call failed by the pool's fault; `retry_after` as it asked for, `at_once` where more calls are no use."""
        cooling = self.state(now) is State.COOLING  # others failed before this one did: that is one failure, not many
        self._row += 1
        if not cooling and (at_once or retry_after or self._open or self._row >= self._failures):
            self._last = self._cooldown * min(2**self._trips, LONGEST_FACTOR)
            self._until = now + self._last
            self._trips += 1
            self._open = True
        self._probed = 0.0
        if retry_after:
            self._until = max(self._until, now + min(retry_after, LONGEST_RETRY_AFTER))

    def abandoned(self) -> None:
        """The call was given up before it said anything about the pool."""
        self._probed = 0.0


class Full(Exception):
    """As many calls wait for a slot as may."""


class Slots:
    """Calls at once, first come, first served; at most `waiting` more wait."""

    def __init__(self, concurrency: int, waiting: int) -> None:
        self._semaphore = asyncio.Semaphore(concurrency)
        self._most = waiting
        self.waiting = 0
        self.taken = 0

    @property
    def full(self) -> bool:
        """Whether one more call would be refused."""
        return self._semaphore.locked() and self.waiting >= self._most

    async def take(self, longest: float) -> None:
        """Wait for a slot, at most `longest` seconds. Raises `Full`, `TimeoutError`."""
        if self.full:
            raise Full
        if self._semaphore.locked():
            self.waiting += 1
            try:
                async with asyncio.timeout(longest):
                    await self._semaphore.acquire()
            finally:
                self.waiting -= 1
        else:
            await self._semaphore.acquire()
        self.taken += 1

    def give(self) -> None:
        """Free one."""
        self.taken -= 1
        self._semaphore.release()
