"""Routers of one run share their policies through the key-value bucket: versions by name, and the newest head."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from infra.bus import Bus
from router.policy.store import PolicyStore
from router.policy.versions import Head, Invalid, decode, decode_head

log = structlog.get_logger(__name__)


async def share(bus: Bus, run: str, store: PolicyStore) -> None:
    """Take a newer head from the bus, or give one's own. What is damaged there is refused, and replaced in time.

    Raises `Unavailable` or `PublishFailed` without the server.
    """
    key = f"{run}.routing.head"
    entry = await bus.get(key)
    theirs = Head()
    if entry is not None:
        try:
            theirs = decode_head(entry[0])
        except Invalid as error:
            log.error("routing policies of the bus refused", reason=str(error))
    mine = store.head
    if theirs.serial > mine.serial or (theirs.serial == mine.serial and theirs != mine):
        found = {version: await _fetched(bus, run, store, version) for version in _named(theirs)}
        documents = {version: data for version, data in found.items() if data is not None}
        await asyncio.to_thread(store.adopt, theirs, documents)
    elif theirs.serial < mine.serial:
        for version in _named(mine):
            await _give(bus, run, store, version)
        data = msgspec.json.encode(mine)
        if entry is None:
            await bus.create(key, data)
        else:
            await bus.update(key, data, entry[1])  # another router was quicker: its head is looked at next time


async def _fetched(bus: Bus, run: str, store: PolicyStore, version: str) -> bytes | None:
    """A version that is not here yet; None where it is here, or cannot be had."""
    if store.has(version):
        return None
    entry = await bus.get(_key(run, version))
    try:
        if entry is None:
            raise Invalid(f"routing policy {version}: it is not on the bus")
        decode(version, entry[0])
    except Invalid as error:
        log.error("routing policy of the bus refused", version=version, reason=str(error))
        return None
    return entry[0]


async def _give(bus: Bus, run: str, store: PolicyStore, version: str) -> None:
    try:
        data = store.read(version)
        decode(version, data)
    except Invalid as error:
        log.error("routing policy not shared", version=version, reason=str(error))
        return
    await bus.create(_key(run, version), data)


def _named(head: Head) -> list[str]:
    """Versions that a router needs to follow a head: those in force before as well, for the way back."""
    return sorted({*head.history, *([head.trial] if head.trial else [])})


def _key(run: str, version: str) -> str:
    return f"{run}.routing.policy.{version}"
