"""The life of an engine: started with the first policy, brought to each newer one while requests are in flight."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Protocol, TypeVar

import structlog
from transformers import PreTrainedTokenizerFast

from contracts import subjects
from contracts.errors import InvalidMessage
from contracts.messages import PolicyVersion
from contracts.subjects import STREAMS
from generator.engines import Engine, EngineError, make_engine
from generator.instruments import weights_applied
from generator.settings import GeneratorSettings
from infra import instruments, models, weights
from infra.blobs import BlobError
from infra.bus import QueueFull, Unavailable
from infra.policies import PolicyStore
from infra.service import Service

log = structlog.get_logger(__name__)

T = TypeVar("T")

POLICY_RETRY_SECONDS = 5.0  # before a policy that could not be read or loaded is tried again
WEIGHTS = next(stream for stream in STREAMS if stream.name == subjects.WEIGHTS.stream)
STUCK_SECONDS = 60.0  # a generator that has failed to load for so long leaves its tasks to others


class Worker(Protocol):
    """What uses the engine."""

    async def work(self) -> None:
        """Take tasks until asked to stop; the engine holds a policy."""

    async def report(self) -> None:
        """Say without end how the time was spent; raise when the engine cannot go on."""


async def sample(
    service: Service,
    policies: PolicyStore,
    source: AsyncGenerator[PolicyVersion],
    make: Callable[[Loader, PreTrainedTokenizerFast], Worker],
) -> None:
    """Let a worker sample with the newest policy of `source` until the service is asked to stop."""
    settings: GeneratorSettings = service.settings.section("generator")
    async with aclosing(source) as versions:
        first = await unless_stopped(service, anext(versions))
        if first is None:
            return
        with tempfile.TemporaryDirectory(prefix="tailrace-model-") as folder:
            files = await policies.get_bundle(first.bundle)
            models.unbundle(files, Path(folder))
            tokenizer = models.load_tokenizer(Path(folder))
            engine = await asyncio.to_thread(make_engine, settings, Path(folder), tokenizer)
        try:
            loader = Loader(engine, policies, files)
            worker = make(loader, tokenizer)
            loops = [
                service.spawn(loader.follow(first, versions), "policies"),
                service.spawn(worker.report(), "reports"),
            ]
            try:
                await unless_stopped(service, loader.has_policy())
                await worker.work()
            finally:
                for loop in loops:
                    loop.cancel()
                await asyncio.wait(loops)  # `versions` can be closed only when nobody reads it
        finally:
            await engine.close()


async def unless_stopped(service: Service, waited_for: Awaitable[T]) -> T | None:
    """What was waited for, or None if the service is asked to stop first."""
    waiting = asyncio.ensure_future(waited_for)
    stopping = asyncio.ensure_future(service.stopping.wait())
    try:
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        stopping.cancel()
        waiting.cancel()
        await asyncio.wait({waiting})


class Loader:
    """Brings one engine from policy to policy."""

    def __init__(self, engine: Engine, policies: PolicyStore, files: dict[str, bytes]) -> None:
        """`files` are those of the policies' bundle."""
        self.engine = engine
        self.loaded = asyncio.Condition()  # notified after each load, and each attempt at one
        self._policies = policies
        self._files = files
        self._version: PolicyVersion | None = None  # that was loaded last
        self._moving = asyncio.Lock()  # held while the mirror's bytes change, or must not
        self._mirror = policies.mirror()
        self._failing_since: float | None = None  # monotonic time since when no policy could be loaded

    async def follow(self, first: PolicyVersion, versions: AsyncGenerator[PolicyVersion]) -> None:
        """Load each newer policy while requests are in flight. One that cannot be loaded is tried again."""
        version, waiting = first, asyncio.ensure_future(anext(versions))
        try:
            while True:
                loaded = await self._try(version)
                self._failing_since = None if loaded else self._failing_since or time.monotonic()
                async with self.loaded:
                    self.loaded.notify_all()
                done, _ = await asyncio.wait({waiting}, timeout=None if loaded else POLICY_RETRY_SECONDS)
                if done:
                    version, waiting = waiting.result(), asyncio.ensure_future(anext(versions))
        finally:
            waiting.cancel()
            await asyncio.wait({waiting})

    async def _try(self, version: PolicyVersion) -> bool:
        """Load a policy; False when it has to be tried again: somebody may wait for what is sampled with it.

        Where it could not be read, the learner has been asked to see to it.
        """
        try:
            await self.load(version)
        except EngineError as error:
            log.error("policy not loaded", version=version.policy.version, error=str(error))
            return False
        except (BlobError, InvalidMessage, QueueFull, Unavailable) as error:
            log.error("policy not loaded", version=version.policy.version, error=str(error))
            with contextlib.suppress(Unavailable, QueueFull):
                await self._policies.ask_for_whole(version.policy)
            return False
        return True

    async def load(self, version: PolicyVersion) -> None:
        """Fetch, verify and swap in one policy."""
        async with self._moving:
            got = await self._mirror.bring_to(version)
            await self.engine.load(version.policy, weights.unpack(got.data, version.tensors))
            self._version = version
        seconds = (time.time_ns() - version.published_ns) / 1e9
        instruments.weights(got.fetched, "load")
        weights_applied(seconds)
        log.info("policy loaded", version=version.policy.version, seconds_since_published=round(seconds, 2))

    async def keep_stored(self) -> None:
        """Store again what is loaded, where that is old and the store has lost it. Raises as `PolicyStore.keep`."""
        async with self._moving:
            version, held = self._version, self._mirror.held
            if version is None or held is None or held[0] != version.policy:
                return
            if (time.time_ns() - version.published_ns) / 1e9 > WEIGHTS.max_age / 2:
                await self._policies.keep(version, memoryview(held[1]), self._files)

    async def has_policy(self) -> None:
        """Return when the engine holds a policy: from then on there is a point in taking tasks."""
        async with self.loaded:
            await self.loaded.wait_for(lambda: self.engine.policy is not None)

    @property
    def stuck(self) -> bool:
        """Whether others should do the tasks: what this engine holds may be all that the learner waits for."""
        return self._failing_since is not None and time.monotonic() - self._failing_since > STUCK_SECONDS
