"""vLLM as an `Engine`: groups in, new policies in flight, and a new engine where the old one has died.

`_keep` starts vLLM with the newest policy, again and again if need be; `load` swaps weights under the requests in
flight; `_hand_over` gives vLLM the groups that wait. The engine itself runs in other processes (`vllm_core`).

**Which policy a token is from** is noted by the engine's own process, which changes its label between two steps, while
it is paused and nothing is being computed. Here, tokens computed before a swap may well arrive after it. So it is
vLLM's own record that says which policy sampled which span: it comes with a completion that has ended, and
`Core.spans` looks it up earlier where somebody reads along.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from contracts.messages import PolicyRef
from generator.engines.base import EngineError, EngineFull, EngineStats, SampledToken, SampleRequest
from generator.engines.decoder import end_tokens
from generator.engines.intervals import Intervals
from generator.engines.schedule import Limits, check
from generator.engines.vllm_completions import Collected, NotFinite, check_temperature, label, parameters
from generator.engines.vllm_core import DIED, Core, prepare
from generator.engines.vllm_weights import WeightFolders, skeleton
from generator.settings import GeneratorSettings
from infra.errors import UserError
from infra.supervisor import Backoff

STALL_SECONDS = 300.0  # an engine with requests that makes no token for longer counts as hung
CLOSE_SECONDS = 30.0  # longest wait for the end of its processes

log = logging.getLogger(__name__)


class _Group:
    """A group on its way: waiting, or as one vLLM request per completion."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        # At most one item per token.
        self.output: asyncio.Queue[list[SampledToken] | EngineError] = asyncio.Queue()
        self.tasks: list[asyncio.Task[None]] = []


class VllmEngine:
    """`Engine` over vLLM's `AsyncLLM`. Needs a running event loop; `close` ends its processes.

    A completion's tokens come in one list when it has ended, unless they are asked for as they come. Completions share
    the KV cache of what their prompts have in common, also over groups; one that begins with a new policy finds nothing
    that an older one has cached, whatever happens to the cache of those in flight. `busy_seconds` is wall time with a
    request in vLLM that is not paused, `load_seconds` from pause to resumption; a restart is neither. Meanwhile groups
    wait; those that were being sampled when the engine died end with `EngineError`.
    """

    def __init__(self, settings: GeneratorSettings, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        """`folder` describes the model. Raises `UserError` if vLLM is not installed or the folder is unusable."""
        prepare(settings)
        model = skeleton(folder)
        self._settings = settings
        self._eos = sorted(end_tokens(model, tokenizer))
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._folders = WeightFolders(folder, model)
        self._policy: PolicyRef | None = None
        self._folder: Path | None = None  # of the policy above: what an engine is started with
        self._core: Core | None = None
        self._limits: Limits | None = None  # known from the first start on
        self._changing = asyncio.Lock()  # held while weights or engine change
        self._started = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._waiting: deque[_Group] = deque()
        self._groups: set[_Group] = set()
        self._running = 0  # completions in vLLM
        self._held = 0  # completions of groups that have not ended
        self._paused = False
        self._tainted = False  # since this engine started, a policy gave numbers that are not finite
        self._names = itertools.count()
        self._tokens, self._last_token = 0, time.monotonic()
        self._busy, self._loads = Intervals(time.monotonic), Intervals(time.monotonic)

    @property
    def policy(self) -> PolicyRef | None:
        return self._policy if self._started.is_set() else None

    @property
    def error(self) -> str | None:
        return str(self._failure) if self._failure else None

    @property
    def unable(self) -> str | None:
        """See `Engine.unable`."""
        if self._core is not None and not self._core.dead:
            return None
        return "vLLM is starting" if self._folder else "vLLM starts with the first policy"

    @property
    def stats(self) -> EngineStats:
        waiting = sum(group.request.group_size for group in self._waiting)
        return EngineStats(self._tokens, self._busy.seconds, self._loads.seconds, self._running, waiting)

    # -- policies ------------------------------------------------------------------------------------------------

    async def load(self, policy: PolicyRef, weights: dict[str, Tensor]) -> float:
        """See `Engine.load`. The first one starts vLLM and takes as long as that does."""
        self._check_open()
        began = time.monotonic()
        async with self._changing:
            folder = await asyncio.to_thread(self._folders.write, policy, weights)
            former = self._folder
            try:
                if self._core is not None and not self._tainted:
                    await self._swap(self._core, policy, folder)
            except BaseException:
                self._folders.remove(folder)
                raise
            self._policy, self._folder = policy, folder
            if former is not None and former != folder:
                self._folders.remove(former)
            if self._core is not None and self._tainted:  # the cache would carry it over to the next policy
                self._core.condemn("the vLLM engine was stopped: its last policy gave numbers that are not finite")
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        await self._started.wait()
        self._check_open()
        return time.monotonic() - began

    async def _swap(self, core: Core, policy: PolicyRef, folder: Path) -> None:
        """Reload under the requests in flight. An engine that fails at it holds nobody knows what, and is replaced."""
        self._paused = True
        self._busy.end()
        self._loads.begin()
        try:
            await core.reload(folder, label(policy), recompute=self._settings.vllm.kv_cache == "recompute")
        except BaseException as error:
            core.condemn(f"the vLLM engine was stopped: policy {policy.version} could not be loaded")
            if isinstance(error, Exception):
                raise EngineError(f"loading policy {policy.version} failed: {error}") from error
            raise
        finally:
            self._paused = False
            self._loads.end()
            if self._running:
                self._busy.begin()
        self._last_token = time.monotonic()
        self._hand_over()

    # -- the engine's life ---------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Start vLLM and, each time it dies, start it again; gives up when that fails too often in a row."""
        backoff = Backoff()
        while True:
            began = time.monotonic()
            try:
                reason = await self._live()
            except Exception as error:  # whatever vLLM raises, it does not run
                if isinstance(error, UserError) and not self._started.is_set():
                    return self._give_up(error)
                reason = f"{error}" if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            delay = backoff.failed(time.monotonic() - began)
            if delay is None:
                return self._give_up(EngineError(f"vLLM failed {backoff.failures} times in a row: {reason}"))
            log.error("vLLM ended: %s; starting it again in %g s", reason, delay)
            await asyncio.sleep(delay)

    async def _live(self) -> str:
        """One life of the engine; returns why it ended."""
        async with self._changing:
            assert self._folder is not None and self._policy is not None
            core = await Core.start(self._settings, self._folder, label(self._policy))
            slots, window = self._settings.max_requests, core.window
            self._limits = Limits(slots, slots * window, window, window, self._vocabulary)
            self._core, self._tainted = core, False
        self._started.set()
        self._hand_over()
        try:
            while not core.died.done():
                await asyncio.wait({core.died}, timeout=1.0)
                if self._running and not self._paused and time.monotonic() - self._last_token > STALL_SECONDS:
                    core.condemn(f"the vLLM engine made no token in {STALL_SECONDS:.0f} s")
            return core.died.result()
        finally:
            self._core = None
            reason = core.died.result() if core.died.done() else "the engine is closed"
            self._fail(reason, waiting=False)
            await core.stop(reason)

    def _give_up(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        self._started.set()  # whoever waits for it looks at the failure next
        self._fail(str(failure), waiting=True)

    async def close(self) -> None:
        """See `Engine.close`."""
        self._give_up(EngineError("the engine is closed"))
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=CLOSE_SECONDS)
        await asyncio.to_thread(self._folders.close)

    def _check_open(self) -> None:
        if isinstance(self._failure, UserError):
            raise self._failure
        if self._failure is not None:
            raise EngineError(str(self._failure))

    # -- requests ------------------------------------------------------------------------------------------------

    async def submit(self, request: SampleRequest) -> AsyncGenerator[list[SampledToken], None]:
        """See `Engine.submit`. Refuses temperatures that vLLM would change: below 0.01 but not 0, and above 2."""
        self._check_open()
        if self._limits is None:
            raise EngineError("no policy has been loaded yet")
        check_temperature(request)
        check(request, self._limits)
        if self._held and self._held + request.group_size > 2 * self._settings.max_requests:
            raise EngineFull(f"{self._held} completions are in flight or waiting already")
        group = _Group(request)
        self._held += request.group_size
        self._groups.add(group)
        self._waiting.append(group)
        self._hand_over()
        try:
            remaining = request.group_size
            while remaining:
                item = await group.output.get()  # `_keep` sees to it that one comes
                if isinstance(item, EngineError):
                    raise item
                remaining -= item[-1].finish is not None
                yield item
        finally:
            self._held -= request.group_size
            self._groups.discard(group)
            with contextlib.suppress(ValueError):
                self._waiting.remove(group)
            for task in group.tasks:
                task.cancel()

    def _hand_over(self) -> None:
        """Give vLLM the groups from the head of the queue for which it has slots."""
        core, slots = self._core, self._settings.max_requests
        if core is None or self._paused or core.dead:
            return
        while self._waiting and self._running + self._waiting[0].request.group_size <= slots:
            group = self._waiting.popleft()
            for index in range(group.request.group_size):
                if not self._running:
                    self._busy.begin()
                    self._last_token = time.monotonic()
                self._running += 1
                task = asyncio.create_task(self._sample(core, group, index))
                task.add_done_callback(self._left)
                group.tasks.append(task)

    def _left(self, _: asyncio.Task[None]) -> None:
        self._running -= 1
        if not self._running:
            self._busy.end()
        self._hand_over()

    async def _sample(self, core: Core, group: _Group, index: int) -> None:
        """One completion from beginning to end, into its group's queue."""
        assert self._policy is not None and self._limits is not None
        request, collected = group.request, Collected(group.request, index)
        # The salt keeps what one policy has computed from requests that begin with another one.
        prompt: Any = {"prompt_token_ids": request.prompt, "cache_salt": label(self._policy)}
        sampling = parameters(request, index, self._limits.window, self._eos)
        name = f"{next(self._names)}"
        try:
            async with contextlib.aclosing(core.llm.generate(prompt, sampling, name)) as outputs:
                async for output in outputs:
                    (completion,) = output.outputs
                    self._tokens += len(completion.token_ids)
                    self._last_token = time.monotonic()
                    if sampled := collected.add(completion, core.spans(name) if request.stream else None):
                        group.output.put_nowait(sampled)
        except NotFinite as error:
            self._tainted = True
            version = f"{self._policy.generation}.{self._policy.version}"
            group.output.put_nowait(EngineError(f"sampling failed: policy {version} gives {error}"))
        except EngineError as error:
            group.output.put_nowait(error)
        except Exception as error:  # whatever vLLM raises is the end of this group
            reason = DIED if core.dead else f"sampling failed: {type(error).__name__}: {error}"
            group.output.put_nowait(EngineError(reason))

    def _fail(self, reason: str, *, waiting: bool) -> None:
        """End the groups that vLLM was sampling, and those that wait for it too where nothing will come of it."""
        for group in list(self._groups):
            if group.tasks or waiting:
                for task in group.tasks:
                    task.cancel()
                group.output.put_nowait(EngineError(reason))
