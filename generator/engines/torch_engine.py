"""Continuous batching over a Hugging Face model: one thread owns the model, the event loop talks to it by messages."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from contracts.messages import PolicyRef
from generator.engines.base import (
    EngineError,
    EngineFull,
    EngineStats,
    SampledToken,
    SampleRequest,
)
from generator.engines.batch import Batch, Output
from generator.engines.decoder import Decoder, end_tokens
from generator.engines.schedule import Limits, check

CACHE_SPAN = 2048  # the cache holds max_requests sequences of this length, or fewer longer ones
CLOSE_SECONDS = 10.0  # longest wait for the step that runs when the engine is closed
DELIVER_SECONDS = 0.05  # tokens of short steps go to the event loop together: each delivery wakes it
STALL_SECONDS = 300.0  # an engine in one step for longer counts as hung

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Submit:
    """A group as the event loop sees it; its own key."""

    request: SampleRequest
    # Bounded by group_size * max_tokens; the thread never waits for a reader.
    output: asyncio.Queue[list[SampledToken] | EngineError]
    remaining: int  # completions whose end has not arrived
    unfinished: int  # completions that the engine's thread still samples


@dataclass(eq=False)
class _Load:
    policy: PolicyRef
    weights: dict[str, Tensor]
    done: asyncio.Future[float]


@dataclass(frozen=True)
class _Abort:
    group: _Submit


class _Close:
    """The last command."""


class TorchEngine:
    """`Engine` over transformers, on one device, in the model's own dtype.

    A group's prompt is prefilled once, at most `prefill_tokens` between two decode steps so that running completions
    never wait long. The number of torch threads is the caller's choice (`torch.set_num_threads`). Starts a thread;
    `close` ends it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        max_requests: int,
        prefill_tokens: int = 512,
    ) -> None:
        self._decoder = Decoder(model)
        window = self._decoder.window
        cache_tokens = max(max_requests * min(window, CACHE_SPAN), window)
        self._limits = Limits(max_requests, cache_tokens, prefill_tokens, window, self._decoder.vocabulary)
        # Its own copy: a tokenizer that encodes in one thread refuses to decode in another.
        text = copy.deepcopy(tokenizer.backend_tokenizer)
        self._batch = Batch(
            self._decoder,
            self._limits,
            end_tokens(model, tokenizer),
            lambda tokens: text.decode(tokens, skip_special_tokens=False),
        )
        self._commands: queue.SimpleQueue[_Submit | _Load | _Abort | _Close] = queue.SimpleQueue()
        self._policy: PolicyRef | None = None
        self._error: str | None = None
        self._closed = False
        self._held = 0  # completions submitted whose end has not arrived
        self._tokens, self._busy, self._loads = 0, 0.0, 0.0
        self._computing_since: float | None = None
        self._undelivered: Output = {}
        self._delivered = 0.0  # monotonic time of the last delivery
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # The event loop's side.

    @property
    def policy(self) -> PolicyRef | None:
        return self._policy

    @property
    def error(self) -> str | None:
        since = self._computing_since
        if since is not None and time.monotonic() - since > STALL_SECONDS:
            return f"the engine has been in one step for {time.monotonic() - since:.0f} s"
        return self._error

    @property
    def unable(self) -> str | None:
        return None

    @property
    def stats(self) -> EngineStats:
        inflight = self._batch.inflight
        return EngineStats(self._tokens, self._busy, self._loads, inflight, max(0, self._held - inflight))

    async def load(self, policy: PolicyRef, weights: dict[str, Tensor]) -> float:
        """See `Engine.load`."""
        self._check_running()
        self._loop = asyncio.get_running_loop()
        command = _Load(policy, weights, self._loop.create_future())
        self._commands.put(command)
        try:
            return await asyncio.wait_for(command.done, STALL_SECONDS)
        except TimeoutError:
            raise EngineError(f"loading policy {policy.version} took longer than {STALL_SECONDS:.0f} s") from None

    async def submit(self, request: SampleRequest) -> AsyncGenerator[list[SampledToken], None]:
        """See `Engine.submit`."""
        self._check_running()
        check(request, self._limits)
        if self._policy is None:
            raise EngineError("no policy has been loaded yet")
        if self._held and self._held + request.group_size > 2 * self._limits.slots:
            raise EngineFull(f"{self._held} completions are in flight or waiting already")
        self._loop = asyncio.get_running_loop()
        group = _Submit(request, asyncio.Queue(), request.group_size, request.group_size)
        self._held += request.group_size
        self._commands.put(group)
        try:
            while group.remaining or not group.output.empty():
                item = await self._next(group)
                if isinstance(item, EngineError):
                    raise item
                yield item
        finally:
            if group.remaining:
                self._commands.put(_Abort(group))
                self._give_back(group, group.remaining)

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        self._loop = asyncio.get_running_loop()
        self._commands.put(_Close())
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    async def _next(self, group: _Submit) -> list[SampledToken] | EngineError:
        while True:
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    return await group.output.get()
            except TimeoutError:
                if not self._thread.is_alive():
                    return EngineError("the engine's thread has ended")
                if self.error:
                    return EngineError(self.error)

    def _check_running(self) -> None:
        if self._closed or self._error:
            raise EngineError(self._error or "the engine is closed")

    def _give_back(self, group: _Submit, completions: int) -> None:
        group.remaining -= completions
        self._held -= completions

    def _deliver(self, output: Output) -> None:
        for group, item in output.items():
            assert isinstance(group, _Submit)
            if isinstance(item, EngineError):
                self._give_back(group, group.remaining)
            elif group.remaining:
                self._give_back(group, sum(token.finish is not None for token in item))
            group.output.put_nowait(item)

    # The engine thread's side.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._serve_commands():
                    self._step()
            self._fail("the engine is closed")
        except Exception as error:
            log.exception("the engine thread ended")
            self._error = f"the engine has failed: {type(error).__name__}: {error}"
            self._fail(self._error)

    def _serve_commands(self) -> bool:
        """Take what has been asked for, waiting only when there is nothing to compute; False to end."""
        while True:
            try:
                command = self._commands.get(block=self._batch.idle)
            except queue.Empty:
                return True
            if isinstance(command, _Close):
                return False
            if isinstance(command, _Load):
                self._copy(command)
            elif isinstance(command, _Abort):
                self._batch.abort(command.group)
            else:
                self._batch.add(command, command.request)

    def _step(self) -> None:
        assert self._policy is not None  # `submit` sees to it
        started = self._computing_since = time.monotonic()
        output = self._batch.step(self._policy)
        now = time.monotonic()
        self._busy += now - started
        self._computing_since = None
        self._tokens += sum(len(item) for item in output.values() if isinstance(item, list))
        self._pass_on(output, now)

    def _pass_on(self, output: Output, now: float) -> None:
        """Deliver what there is at the end of a group, and else from time to time."""
        due = now - self._delivered > DELIVER_SECONDS
        for group, item in output.items():
            earlier = self._undelivered.setdefault(group, item)
            if isinstance(item, EngineError):
                self._undelivered[group], due = item, True
            else:
                if isinstance(earlier, list) and earlier is not item:
                    earlier += item
                assert isinstance(group, _Submit)
                group.unfinished -= sum(token.finish is not None for token in item)
                due = due or not group.unfinished
        if due:
            self._tell(self._deliver, self._undelivered)
            self._undelivered, self._delivered = {}, now

    def _copy(self, command: _Load) -> None:
        started = self._computing_since = time.monotonic()
        try:
            self._decoder.load(command.weights)
        except EngineError as refused:
            self._tell(_settle, command.done, refused)
        except Exception as error:  # nobody knows how much was copied: the engine cannot go on
            self._tell(_settle, command.done, EngineError(f"loading failed: {error}"))
            raise
        else:
            self._policy = command.policy
            self._tell(_settle, command.done, time.monotonic() - started)
        finally:
            self._loads += time.monotonic() - started
            self._computing_since = None

    def _fail(self, reason: str) -> None:
        """End every group and load that is known or still on its way."""
        groups = self._batch.keys()
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if isinstance(command, _Submit):
                groups.append(command)
            elif isinstance(command, _Load):
                self._tell(_settle, command.done, EngineError(reason))
        self._tell(self._deliver, {group: EngineError(reason) for group in groups})

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None  # every command comes from it
        # A loop that has been closed has no readers left.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)


def _settle(done: asyncio.Future[float], result: float | EngineError) -> None:
    if done.done():  # the caller has given up
        return
    if isinstance(result, EngineError):
        done.set_exception(result)
    else:
        done.set_result(result)
