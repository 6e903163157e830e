"""A reader's copy of the weights, brought from version to version by as few bytes as possible."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

import structlog

from contracts.errors import InvalidMessage
from contracts.messages import PolicyRef, PolicyVersion
from infra import patches
from infra.blobs import BlobError, BlobStore
from infra.chains import Route, routes
from infra.retention import Retention

log = structlog.get_logger(__name__)

FETCH_SECONDS = 120.0
SLOWEST_BYTES_PER_SECOND = 5_000_000


@dataclass(frozen=True)
class Weights:
    """Verified weights, and how many bytes were fetched for them."""

    data: bytearray
    fetched: int


class Mirror:
    """Holds one copy of the bytes; `PolicyStore.mirror` makes it."""

    def __init__(self, blobs: BlobStore, retention: Retention) -> None:
        self._blobs = blobs
        self._retention = retention
        self._held: tuple[PolicyRef, bytearray] | None = None

    @property
    def held(self) -> tuple[PolicyRef, bytearray] | None:
        """The policy and the bytes of the copy; None while it is empty or being changed."""
        return self._held

    async def bring_to(self, version: PolicyVersion) -> Weights:
        """The weights of `version`, verified by their digest: patched in place where the copy held allows it.

        So what an earlier call returned must not be in use any more. Falls back to the keyframe with all patches, and
        to the whole weights. Raises as `BlobStore.get`, or `InvalidMessage` if the bytes are not what was announced;
        the next call then starts from nothing. While it reads, `collect` leaves alone what it needs; `QueueFull` where
        it has no room to say so.
        """
        held, self._held = self._held, None
        ways = routes(version, held[0] if held else None)
        async with self._retention.reading(version.policy.digest):
            for way in ways:
                start = held[1] if held and way.held else None
                held = None  # the attempt takes it, or nobody can: one copy at a time
                try:
                    data, count = await self._go(way, version, start)
                except (BlobError, InvalidMessage) as error:
                    if way is ways[-1]:
                        raise
                    log.warning("weights come another way", version=version.policy.version, error=str(error))
                else:
                    self._held = version.policy, data
                    return Weights(data, count)
        raise AssertionError("the last way returns or raises")

    async def _go(self, way: Route, version: PolicyVersion, data: bytearray | None) -> tuple[bytearray, int]:
        """The weights by one way, and the bytes fetched."""
        limit = fetch_seconds(version.size)
        where = f"policy {version.policy.version}"
        # What is most likely missing comes first. Together the patches are smaller than the weights.
        changes = [await self._blobs.get(patch.digest, timeout=limit, max_bytes=patch.size) for patch in way.patches]
        count = sum(map(len, changes))
        if data is None:
            data = await self._blobs.get(way.start.digest, timeout=limit, max_bytes=version.size)
            count += len(data)
            if len(data) != version.size:
                raise InvalidMessage(f"{where}: {len(data)} weight bytes, announced {version.size}")
        if changes:  # otherwise these bytes have been verified already
            found = await asyncio.to_thread(_patched, data, changes, version)
            if found != version.policy.digest:
                raise InvalidMessage(f"{where}: its patches make the weights {found}, not {version.policy.digest}")
        return data, count


def fetch_seconds(size: int) -> float:
    """How long reading a blob of weights may take."""
    return FETCH_SECONDS + size / SLOWEST_BYTES_PER_SECOND


def _patched(data: bytearray, changes: list[bytearray], version: PolicyVersion) -> str:
    """Apply all changes; the digest of the result."""
    for change in changes:
        patches.apply(data, change, version.tensors)
    return hashlib.sha256(data).hexdigest()
