"""Leases: at most one holder of a key at a time, and a generation number that fences out the former ones.

A lease is a key that expires unless its holder renews it. Expiry alone cannot stop a holder that was frozen and wakes
up, so every acquisition takes the next generation, messages carry it, and readers refuse an older one.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time

import structlog

from contracts.subjects import KV_LEASES, LEASE_TTL
from infra.bus import Bus
from infra.connection import QueueFull, Unavailable
from infra.errors import UserError

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.5


class Lease:
    """A lease held by this process; `acquire` makes it. `lost` is set when another holder has taken the key."""

    def __init__(self, bus: Bus, key: str, value: bytes, revision: int, bucket: str, ttl: float) -> None:
        self.generation = 0
        self.lost = asyncio.Event()
        self._bus = bus
        self._key = key
        self._value = value
        self._revision = revision
        self._bucket = bucket
        self._ttl = ttl
        self._renewing: asyncio.Task[None] | None = None

    async def release(self) -> None:
        """Stop renewing and free the key at once, unless it is another's by now."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        if self.lost.is_set():
            return
        try:
            async with asyncio.timeout(self._ttl):  # by then it has expired anyway
                await self._bus.delete(self._key, self._revision, bucket=self._bucket)
        except (TimeoutError, Unavailable):
            log.warning("lease not released, it expires by itself", key=self._key)

    def _start(self) -> None:
        self._renewing = asyncio.create_task(self._renew(), name=f"lease {self._key}")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl / 3)
            try:
                if await self._still_ours():
                    continue
            except (Unavailable, QueueFull) as error:  # a renewal that ended here would never notice the loss
                log.warning("lease not renewed", key=self._key, reason=str(error))
                continue
            log.error("lease lost", key=self._key, generation=self.generation)
            self.lost.set()
            return

    async def _still_ours(self) -> bool:
        revision = await self._bus.update(self._key, self._value, self._revision, bucket=self._bucket)
        if revision is None:
            # Expired while the server or this process was away. Nobody else may have had it in between.
            revision = await self._bus.create(self._key, self._value, bucket=self._bucket)
            if revision is None:
                return False
            if await current_generation(self._bus, self._key) != self.generation:
                await self._bus.delete(self._key, revision, bucket=self._bucket)
                return False
        self._revision = revision
        return True


async def acquire(
    bus: Bus, key: str, holder: str, *, wait: float, bucket: str = KV_LEASES, ttl: float = LEASE_TTL
) -> Lease:
    """Take the lease on `key` and the key's next generation, and renew it until `Lease.release`.

    Waits up to `wait` seconds for a previous holder's lease to expire, also for one of the same name; then raises
    `UserError` naming the holder. `ttl` is the bucket's, in seconds.
    """
    value = json.dumps({"holder": holder, "token": secrets.token_hex(8)}).encode()
    deadline = time.monotonic() + wait
    waiting = False
    while True:
        revision = await bus.create(key, value, bucket=bucket)
        if revision is not None:
            lease = Lease(bus, key, value, revision, bucket, ttl)
            lease.generation = await _next_generation(bus, key)
            # A process frozen since `create` may hold a generation, but no longer the lease.
            if await lease._still_ours():
                lease._start()
                log.info("lease acquired", key=key, generation=lease.generation)
                return lease
        other = await _holder(bus, key, bucket)
        if time.monotonic() > deadline:
            raise UserError(
                f"{key} is held by {other or 'another process'}, and was for {wait:g} s: stop that process first"
            )
        if not waiting and other:
            log.info("waiting for a lease", key=key, holder=other, limit_seconds=wait)
            waiting = True
        await asyncio.sleep(min(POLL_SECONDS, ttl / 3))


async def current_generation(bus: Bus, key: str) -> int:
    """The generation of the last acquisition of `key`; 0 when there was none."""
    entry = await bus.get(f"{key}.generation")
    return int(entry[0]) if entry is not None else 0


async def _next_generation(bus: Bus, key: str) -> int:
    name = f"{key}.generation"
    while True:
        entry = await bus.get(name)
        generation = 1 if entry is None else int(entry[0]) + 1
        value = str(generation).encode()
        taken = await (bus.create(name, value) if entry is None else bus.update(name, value, entry[1]))
        if taken is not None:
            return generation


async def _holder(bus: Bus, key: str, bucket: str) -> str:
    entry = await bus.get(key, bucket=bucket)
    if entry is None:
        return ""
    try:
        return str(json.loads(entry[0])["holder"])
    except (ValueError, KeyError, TypeError):
        return "an unknown process"
