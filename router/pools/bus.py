"""Our own generators as a pool: requests on the work queue, tokens back while they are sampled.

A task survives its generator: another one takes it after the redelivery time. Whether its answer can still be used is
decided by `assembly.Assembly`. Whoever is not waited for any more is told so, so that its slot is free at once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import structlog

from contracts import subjects
from contracts.messages import Cancel, Purpose, Task, Tokens
from infra.bus import Bus, PublishFailed, QueueFull, Subscriber, Unavailable
from infra.policies import PolicyStore
from router.chat import Chunk, Reply
from router.pools.asking import Terms, terms_of
from router.pools.assembly import Assembly
from router.pools.base import Fault, PoolError
from router.settings import PoolSettings

log = structlog.get_logger(__name__)

PUBLISH_SECONDS = 3.0  # for the server to store a request
WITHDRAW_SECONDS = 30.0  # to tell generators that nobody waits, over a reconnection
CLOSE_SECONDS = 2.0  # for the same when the pool is closed
WAITING = 4096  # stretches that one slow reader may leave waiting
ENVIRONMENT = "serve"  # what rollouts of requests are filed under
SEED_BITS = 48


class _Inbox:
    """What has come for one task and was not read yet."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Tokens] = asyncio.Queue(WAITING)
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def put(self, message: Tokens) -> None:
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            self.fail("the reader was too slow")

    def fail(self, sentence: str) -> None:
        if not self.failed.done():
            self.failed.set_result(sentence)


class BusPool:
    """The generators of one pool that serve the promoted policy of a run."""

    def __init__(self, name: str, settings: PoolSettings, bus: Bus, run: str) -> None:
        self.name = name
        self.settings = settings
        self._bus = bus
        self._run = run
        self._production = PolicyStore(bus, run).production
        self._promoted = False  # whether a policy serves, as far as is known
        self._reply = secrets.token_hex(8)  # token of the subject on which this pool is answered
        self._listening: asyncio.Task[Subscriber] | None = None
        self._inboxes: dict[str, _Inbox] = {}  # by task
        self._withdrawing: set[asyncio.Task[None]] = set()

    async def complete(self, body: dict[str, Any]) -> Reply:
        """The whole answer. Where a generator dies, another one's answer is waited for, as long as the limits allow."""
        request = terms_of(body, self.settings)
        task = self._task(request)
        assembly = Assembly(self.name, task, logprobs=request.logprobs, keeps=True)
        async with aclosing(self._chunks(task, assembly)) as chunks:
            async for _ in chunks:
                pass
        return assembly.reply()

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes; the last chunk, and no other, bears usage, policy and rollout."""
        request = terms_of(body, self.settings)
        task = self._task(request)
        assembly = Assembly(self.name, task, logprobs=request.logprobs, keeps=False)
        async with aclosing(self._chunks(task, assembly)) as chunks:
            async for chunk in chunks:
                yield chunk
        yield assembly.last()

    async def close(self) -> None:
        """Fail what is in flight, tell the generators, and stop listening, in bounded time."""
        for inbox in self._inboxes.values():
            inbox.fail("the pool is being closed")
        await asyncio.sleep(0)
        if self._withdrawing:
            await asyncio.wait(self._withdrawing, timeout=CLOSE_SECONDS)
        for task in self._withdrawing:
            task.cancel()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait({self._listening})
            if not self._listening.cancelled() and self._listening.exception() is None:
                await self._bus.connection.unsubscribe(self._listening.result())
            self._listening = None

    def _task(self, request: Terms) -> Task:
        now = time.time_ns()
        return Task(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            run=self._run,
            purpose=Purpose.SERVE,
            environment=ENVIRONMENT,
            seed=secrets.randbits(SEED_BITS) if request.seed is None else request.seed,
            group_size=request.choices,
            sampling=request.sampling,
            issued_ns=now,
            turns=request.turns,
            tools=request.tools,
            reply=self._reply,
            deadline_ns=now + int(self.settings.total_seconds * 1e9),
        )

    async def _chunks(self, task: Task, assembly: Assembly) -> AsyncGenerator[Chunk, None]:
        """Publish the task and read what comes, until the answer is complete."""
        if not self._bus.connected:
            raise PoolError(Fault.UNAVAILABLE, f"{self.name}: there is no connection to the NATS server")
        clock, settings = asyncio.get_running_loop().time, self.settings
        lost, began, sequence = self._bus.connection.lost, clock(), 0
        until, token_by = began + settings.total_seconds, began + settings.first_token_seconds
        inbox = self._inboxes[task.id] = _Inbox()
        try:
            sequence = await self._publish(task)
            while not assembly.complete:
                message = await self._next(inbox, lost, min(token_by, until), assembly)
                for chunk in assembly.take(message):
                    yield chunk
                if assembly.began:
                    token_by = clock() + settings.next_token_seconds
        finally:
            del self._inboxes[task.id]
            if not assembly.complete:
                self._withdraw(task.id, sequence)

    async def _publish(self, task: Task) -> int:
        tokens = {"run": self._run, "purpose": Purpose.SERVE.value, "pool": self.settings.generators}
        try:
            async with asyncio.timeout(PUBLISH_SECONDS):
                if not self._promoted and await self._production.current() is None:
                    raise PoolError(Fault.UNAVAILABLE, f"{self.name}: no policy is promoted yet, so nothing serves")
                self._promoted = True
                await self._listen()
                id = f"{self._run}.{task.id}"
                return await self._bus.publish(subjects.TASK, task, id=id, patience=PUBLISH_SECONDS, **tokens)
        except QueueFull:
            raise PoolError(Fault.UNAVAILABLE, f"{self.name}: the queue of requests is full") from None
        except (Unavailable, PublishFailed, TimeoutError):
            raise PoolError(Fault.UNAVAILABLE, f"{self.name}: the NATS server did not take the request") from None

    async def _next(self, inbox: _Inbox, lost: asyncio.Future[None], until: float, assembly: Assembly) -> Tokens:
        """The next stretch, by `until` on the loop's clock."""
        if not inbox.queue.empty():
            return inbox.queue.get_nowait()
        remaining = until - asyncio.get_running_loop().time()
        arriving = asyncio.ensure_future(inbox.queue.get())
        try:
            waited: set[asyncio.Future[Any]] = {arriving, inbox.failed, lost}
            await asyncio.wait(waited, timeout=max(remaining, 0.0), return_when=asyncio.FIRST_COMPLETED)
        finally:
            arriving.cancel()
        if arriving.done() and not arriving.cancelled():
            return arriving.result()
        fault = Fault.BROKEN if assembly.began else Fault.UNAVAILABLE
        if inbox.failed.done():
            raise PoolError(fault, f"{self.name}: {inbox.failed.result()}", usage=assembly.usage)
        if lost.done():
            raise PoolError(fault, f"{self.name}: the connection to the NATS server was lost", usage=assembly.usage)
        sentence = "no further token came in time" if assembly.began else "no generator answered in time"
        raise PoolError(Fault.TIMEOUT, f"{self.name}: {sentence}", usage=assembly.usage)

    async def _listen(self) -> None:
        """Hear what generators say to this pool, from the first request on."""
        if self._listening is None or (self._listening.done() and self._listening.exception() is not None):
            listening = self._bus.listen(subjects.TOKENS, self._take, kind=Tokens, run=self._run, reply=self._reply)
            self._listening = asyncio.create_task(listening, name=f"tokens for {self.name}")
        await asyncio.shield(self._listening)

    def _take(self, message: Tokens) -> None:
        inbox = self._inboxes.get(message.task_id)
        if inbox is not None:
            inbox.put(message)
        elif message.start == 0 and message.attempt > 1 and not message.code:
            self._withdraw(message.task_id, 0)  # somebody answers again what is answered already

    def _withdraw(self, task: str, sequence: int) -> None:
        """Tell that nobody waits, beside everything else and within a limit."""
        withdrawing = asyncio.create_task(self._tell(task, sequence))
        self._withdrawing.add(withdrawing)
        withdrawing.add_done_callback(self._withdrawing.discard)

    async def _tell(self, task: str, sequence: int) -> None:
        try:
            await self._bus.tell(
                subjects.CANCEL, Cancel(run=self._run, task_id=task), patience=WITHDRAW_SECONDS, run=self._run
            )
            if sequence:
                await self._bus.withdraw(subjects.TASK, sequence, patience=WITHDRAW_SECONDS)
        except Unavailable as error:  # its deadline will do
            log.warning("request not withdrawn", task=task, error=str(error))
