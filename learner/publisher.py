"""Weights out: each version until it is there for everybody, whatever the store's state, and again when it got lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from contracts.messages import PolicyRef
from contracts.policies import TensorSpec
from infra import instruments
from infra.blobs import BlobError
from infra.bus import Bus, QueueFull, Unavailable
from infra.policies import PolicyStore
from learner.settings import LearnerSettings

log = structlog.get_logger(__name__)

T = TypeVar("T")

FULL_PAUSE = 1.0  # seconds before a full store is tried again
REPAIR_SECONDS = 2.0  # between looks for generators that cannot read the newest version


class Publisher:
    """Publishes the versions of one generation, in order."""

    def __init__(self, bus: Bus, run: str, settings: LearnerSettings, generation: int) -> None:
        self.policy: PolicyRef | None = None  # the newest one that is out
        self._store = PolicyStore(bus, run, keyframe_every=settings.keyframe_every)
        self._keep = settings.keep_versions
        self._generation = generation
        self._bundle = ""

    async def start(self, files: dict[str, bytes]) -> None:
        """Store what generators need besides weights: configuration and tokenizer."""
        self._bundle = await self._with_room(lambda: self._store.put_bundle(files))

    async def publish(self, weights: tuple[memoryview, list[TensorSpec]], version: int) -> PolicyRef:
        """Store and announce a version. Raises as `PolicyStore.publish`, except that a full store is waited for."""
        data, tensors = weights
        published = await self._with_room(
            lambda: self._store.publish(
                generation=self._generation,
                version=version,
                data=data,
                tensors=tensors,
                bundle=self._bundle,
                parent=self.policy,
            )
        )
        instruments.weights(published.transfer, "publish")
        self.policy = published.policy
        return published.policy

    async def collect(self) -> None:
        """Delete the versions nobody needs."""
        await self._store.collect(self._keep)

    async def repair(self) -> None:
        """Help, without end, generators that can read the newest version by no way: they wait for it to go on, and the
        learner may wait for what they sample."""
        while True:
            await asyncio.sleep(REPAIR_SECONDS)
            try:
                if await self._with_room(self._store.repair):
                    log.warning("weights are stored whole, a generator could not read them", policy=self.policy)
            except (Unavailable, BlobError) as error:
                log.warning("weights could not be stored again", error=str(error))

    async def _with_room(self, put: Callable[[], Awaitable[T]]) -> T:
        """A full store is back-pressure: all versions but the newest are given up, and it is tried until it works."""
        while True:
            try:
                return await put()
            except QueueFull as error:
                log.warning("the store is full, waiting", error=str(error))
            await self._store.collect(1)
            await asyncio.sleep(FULL_PAUSE)
