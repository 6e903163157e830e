"""What the weight store keeps: the newest versions, and whatever somebody is reading."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from contracts.messages import PolicyRef, PolicyVersion
from contracts.subjects import KV_LEASES, LEASE_TTL, POLICY_PUBLISHED
from infra.blobs import BlobStore
from infra.bus import Bus
from infra.chains import blobs_of
from infra.connection import QueueFull, Unavailable


class Retention:
    """Readers of one run's weights say what they read; the publisher's `collect` deletes the rest."""

    def __init__(self, bus: Bus, blobs: BlobStore, run: str) -> None:
        self._bus = bus
        self._blobs = blobs
        self._run = run
        self._readers = f"{run}.policy.readers"
        self._versions: dict[PolicyRef, frozenset[str]] = {}  # those whose blobs may be there -> all they need
        self._seen: int | None = None  # stream sequence up to which `_versions` is complete

    @asynccontextmanager
    async def reading(self, digest: str) -> AsyncIterator[None]:
        """While inside, `collect` spares the blob of this digest and, where it names a policy, all its chain needs.

        Holds a key that says so and expires by itself, renewed for as long as the reading takes. Raises `QueueFull` or
        `Unavailable` where the key cannot be set.
        """
        key = f"{self._readers}.{digest}.{secrets.token_hex(8)}"

        async def renew() -> None:
            while True:
                await asyncio.sleep(LEASE_TTL / 3)
                with contextlib.suppress(Unavailable, QueueFull):  # or else a third of the time later
                    await self._bus.put(key, b"", bucket=KV_LEASES)

        await self._bus.put(key, b"", bucket=KV_LEASES)
        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()

    async def collect(self, keep: int, spared: Sequence[PolicyVersion]) -> int:
        """Delete every blob but those that the `spared` and the newest `keep` versions and readers need.

        Returns how many.
        """
        surplus = await self._blobs.list()  # looked at first: what is announced after it is not among them
        await self._learn_versions()
        surplus = surplus.difference(*map(blobs_of, spared))
        for policy in sorted(self._versions, reverse=True)[:keep]:
            surplus -= self._versions[policy]
        deleted = 0
        for digest in surplus:
            if digest not in await self._being_read():  # or else next time
                await self._blobs.delete(digest)
                deleted += 1
        await self._forget(keep)
        return deleted

    async def _being_read(self) -> set[str]:
        keys = await self._bus.keys(f"{self._readers}.>", bucket=KV_LEASES)
        named = {key.split(".")[-2] for key in keys}
        chains = [blobs for policy, blobs in self._versions.items() if policy.digest in named]
        return named.union(*chains)

    async def _forget(self, keep: int) -> None:
        """Versions beyond `keep` that nobody reads are not there any more."""
        read = await self._being_read()
        newest = set(sorted(self._versions, reverse=True)[:keep])
        self._versions = {
            policy: blobs for policy, blobs in self._versions.items() if policy in newest or policy.digest in read
        }

    async def _learn_versions(self) -> None:
        start = None if self._seen is None else self._seen + 1
        reader = self._bus.read(
            POLICY_PUBLISHED, kind=PolicyVersion, start=start, follow=False, consumer="collect", run=self._run
        )
        async with aclosing(reader):
            async for received in reader:
                self._versions[received.message.policy] = blobs_of(received.message)
                self._seen = received.sequence
