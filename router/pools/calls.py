"""One call of one pool: it takes a slot, tells the breaker how it ended, and leaves an attempt, come what may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span

from contracts.base import PolicyRef
from contracts.routing import Attempt, Role, Status, Verdict
from router import instruments
from router.chat import Chunk, Reply, Usage
from router.pools.base import Fault, Pool, PoolError
from router.pools.counting import completed, spoken
from router.pools.errors import sentence
from router.pools.health import Breaker, Full, Slots
from router.prices import cost
from router.settings import PoolSettings

WAITING_PER_SLOT = 4  # calls that may wait for a slot, for each of them
HELD = 16  # chunks without content that are waited through for the first token

_ALIVE = (Fault.REFUSED, Fault.TOO_LONG)  # faults of the application: the pool is well


class Seat:
    """A pool and what is kept about it between calls."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.name = pool.name
        self.breaker = Breaker(self.settings.failures, self.settings.cooldown_seconds)
        self.slots = Slots(self.settings.concurrency, self.settings.concurrency * WAITING_PER_SLOT)

    @property
    def settings(self) -> PoolSettings:
        return self.pool.settings


class Skipped(Exception):
    """The pool was not called: it cools down, or too many wait for it."""


@dataclass(frozen=True)
class Job:
    """What a call is made for."""

    body: dict[str, Any]
    attempts: list[Attempt]
    subtask: str


class Call:
    """`whole` or `begin` first; then `settle`, `rest` or `abandon`, whichever comes to pass.

    Its attempt is recorded exactly once it was sent, however it ends: a cancelled one with the tokens known so far.
    """

    def __init__(self, seat: Seat, job: Job, role: Role, clock: Callable[[], float]) -> None:
        self.seat = seat
        self.role = role
        self._job = job
        self._clock = clock
        self._running = False
        self._span: Span = INVALID_SPAN
        self._sent = 0.0
        self._first: float | None = None
        self._reply: Reply | None = None
        self._chunks: AsyncGenerator[Chunk, None] | None = None
        self._held: list[Chunk] = []
        self._size = 0  # bytes sampled, as far as was seen
        self._usage: Usage | None = None
        self._model = ""
        self._policy: tuple[int, int, str] | None = None
        self._rollout = ""

    async def whole(self) -> None:
        """Get the whole answer; `settle` gives it. Raises `PoolError`, `Skipped`."""
        await self._open()
        try:
            with instruments.within(self._span):
                reply = await self.seat.pool.complete(self._job.body)
        except BaseException as error:
            self._failed(error)
            raise
        self._first = self._clock()
        self._usage, self._model, self._policy, self._rollout = reply.usage, reply.model, reply.policy, reply.rollout
        self._reply = reply if reply.pool else replace(reply, pool=self.seat.name)

    def settle(self) -> Reply:
        """The answer of `whole`, recorded."""
        assert self._reply is not None, "the call has no answer"
        self._close(Status.OK, self._reply.usage)
        return self._reply

    async def begin(self) -> None:
        """Wait for the first token; until then nothing was given on. Raises `PoolError`, `Skipped`."""
        await self._open()
        self._chunks = self.seat.pool.stream(self._job.body)
        try:
            with instruments.within(self._span):
                await self._wait_for_token(self._chunks)
        except BaseException as error:
            self._failed(error)
            await self._chunks.aclose()
            raise
        self._first = self._clock()
        self.seat.breaker.spoke(self._first)

    async def rest(self) -> AsyncGenerator[Chunk, None]:
        """All chunks of a call that has begun. Raises `PoolError` in mid-stream."""
        assert self._chunks is not None, "the call has not begun"
        try:
            for chunk in self._held:
                yield chunk
            async for chunk in self._chunks:
                yield self._noted(chunk)
            self._close(Status.OK, self._seen())
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            await self._chunks.aclose()

    async def abandon(self) -> None:
        """Drop a call that another has outrun; what it had cost is recorded."""
        self._close(Status.CANCELLED, self._seen())
        if self._chunks is not None:
            await self._chunks.aclose()

    async def _open(self) -> None:
        seat = self.seat
        if seat.breaker.retry_after(self._clock()) > 0:
            raise Skipped
        try:
            await seat.slots.take(seat.settings.first_token_seconds)
        except (Full, TimeoutError):
            raise Skipped from None
        if not seat.breaker.admit(self._clock()):  # it failed for others in the meantime
            seat.slots.give()
            raise Skipped
        self._running, self._sent = True, self._clock()
        self._span = instruments.call(seat.name, self.role, self._job.subtask)

    async def _wait_for_token(self, chunks: AsyncGenerator[Chunk, None]) -> None:
        async for chunk in chunks:
            self._held.append(self._noted(chunk))
            if self._size or chunk.finish or chunk.usage is not None or len(self._held) >= HELD:
                return
        raise PoolError(Fault.BROKEN, f"{self.seat.name}: an empty stream")

    def _noted(self, chunk: Chunk) -> Chunk:
        choices = chunk.body.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._size += spoken(choice.get("delta") or {})
        self._usage = chunk.usage or self._usage
        self._model = self._model or str(chunk.body.get("model") or "")
        self._policy, self._rollout = chunk.policy or self._policy, chunk.rollout or self._rollout
        return chunk if chunk.pool else replace(chunk, pool=self.seat.name)

    def _seen(self) -> Usage:
        """Usage as told, else as far as was seen."""
        return completed(self._usage, self._job.body, self._size)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, PoolError):
            status = Status.PARTIAL if self._first is not None or error.usage.completion else Status.ERROR
            usage = error.usage if error.usage.prompt or not self._size else self._seen()
            self._close(status, usage, error)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            # who stops listening after the usage, which is the last chunk, has heard everything
            self._close(Status.CANCELLED if self._usage is None else Status.OK, self._seen())
        else:
            self._close(Status.ERROR, self._seen(), error)

    def _close(self, status: Status, usage: Usage, error: BaseException | None = None) -> None:
        """Once: free the slot, tell the breaker, record the attempt."""
        if not self._running:
            return
        self._running = False
        self.seat.slots.give()
        self._report(status, error)
        now = self._clock()
        attempt = Attempt(
            subtask=self._job.subtask,
            pool=self.seat.name,
            model=self._model,
            role=self.role,
            status=status,
            verdict=Verdict.NONE,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
            cost=cost(self.seat.settings, usage),
            estimated=usage.estimated,
            seconds=now - self._sent,
            first_token_seconds=0.0 if self._first is None else self._first - self._sent,
            error="" if error is None else sentence(error),
            tier=self.seat.settings.tier,
            policy=None if self._policy is None else PolicyRef(*self._policy),
            rollout=self._rollout,
        )
        self._job.attempts.append(attempt)
        instruments.called(self._span, attempt)

    def _report(self, status: Status, error: BaseException | None) -> None:
        breaker = self.seat.breaker
        if isinstance(error, PoolError) and error.fault not in _ALIVE:
            # 403 is also what moderated upstreams say of one prompt, which must not take the pool from all others
            at_once = error.fault is Fault.UNAUTHORISED and error.status != 403
            breaker.failed(self._clock(), retry_after=error.retry_after, at_once=at_once)
        elif status is Status.OK or isinstance(error, PoolError):
            breaker.succeeded(self._clock())
        else:
            breaker.abandoned()
