"""A learner whose streams are full waits, frees what it may, goes on, and has lost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from contracts.messages import PolicyVersion
from contracts.subjects import KV_BUCKET, POLICY_PUBLISHED, WEIGHTS
from infra.blobs import BlobError, BlobStore
from infra.bus import Bus
from infra.policies import PolicyStore
from learner.publisher import Publisher
from learner.settings import LearnerSettings
from tests.integration.helpers import retained
from tests.integration.test_weight_patches import SIZE, SPECS, weights


@pytest.fixture
async def publisher(bus: Bus, run: str) -> Publisher:
    publisher = Publisher(bus, run, LearnerSettings(keyframe_every=2), generation=1)
    await publisher.start({"config.json": b"{}"})
    return publisher


async def publish(publisher: Publisher, version: int) -> None:
    await publisher.publish((memoryview(weights(version)), SPECS), version)


@asynccontextmanager
async def limited(bus: Bus, stream: str, **changes: Any) -> AsyncIterator[None]:
    """A stream with other limits for a while."""
    jetstream = bus.connection.client.jetstream()
    config = (await jetstream.stream_info(stream)).config
    await jetstream.update_stream(config, **changes)
    try:
        yield
    finally:
        await jetstream.update_stream(config)


async def published(bus: Bus, run: str) -> list[PolicyVersion]:
    read = bus.read(POLICY_PUBLISHED, kind=PolicyVersion, follow=False, consumer="test", run=run)
    return [received.message async for received in read]


async def test_a_full_weight_store_gives_up_old_versions_for_new_ones(bus: Bus, run: str, publisher: Publisher) -> None:
    for version in range(4):  # two keyframes, two patches
        await publish(publisher, version)
    used = (await bus.stream_info(WEIGHTS.stream)).state.bytes
    async with limited(bus, WEIGHTS.stream, max_bytes=used + SIZE // 2):
        async with asyncio.timeout(20):
            await publish(publisher, 4)
    store = PolicyStore(bus, run)
    versions = await published(bus, run)
    assert [version.policy.version for version in versions] == [0, 1, 2, 3, 4]
    assert await store.head() == versions[-1]
    assert bytes(await store.fetch(versions[-1])) == weights(4)
    assert versions[0].policy.digest not in await BlobStore(bus.connection, WEIGHTS, run).list()


async def test_a_weight_store_that_others_have_filled_is_waited_for(bus: Bus, run: str, publisher: Publisher) -> None:
    await publish(publisher, 0)
    await publish(publisher, 1)
    used = (await bus.stream_info(WEIGHTS.stream)).state.bytes
    async with limited(bus, WEIGHTS.stream, max_bytes=used + SIZE // 2):
        waiting = asyncio.create_task(publish(publisher, 2))
        await asyncio.sleep(1.5)
        assert not waiting.done()
    async with asyncio.timeout(20):
        await waiting
    versions = await published(bus, run)
    assert [version.policy.version for version in versions] == [0, 1, 2]
    assert bytes(await PolicyStore(bus, run).fetch(versions[-1])) == weights(2)


async def test_a_repair_that_finds_the_store_full_makes_room(
    bus: Bus, run: str, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.publisher.REPAIR_SECONDS", 0.1)
    for version in range(4):  # two keyframes, two patches
        await publish(publisher, version)
    newest = (await published(bus, run))[-1]
    blobs, store = BlobStore(bus.connection, WEIGHTS, run), PolicyStore(bus, run)
    await blobs.delete(newest.patches[-1].digest)
    await store.ask_for_whole(newest.policy)
    used = (await bus.stream_info(WEIGHTS.stream)).state.bytes
    async with limited(bus, WEIGHTS.stream, max_bytes=used + SIZE // 2):
        repairing = asyncio.create_task(publisher.repair())
        try:
            async with asyncio.timeout(20):
                while newest.policy.digest not in await blobs.list() or not await readable(store, newest):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        finally:
            repairing.cancel()


async def readable(store: PolicyStore, version: PolicyVersion) -> bool:
    try:
        return bytes(await store.fetch(version)) == weights(version.policy.version)
    except BlobError:
        return False


@pytest.mark.parametrize("stream", [POLICY_PUBLISHED.stream, f"KV_{KV_BUCKET}"], ids=["announcement", "head"])
async def test_a_version_whose_announcement_or_head_found_no_room_comes_later_and_once(
    bus: Bus, run: str, publisher: Publisher, stream: str
) -> None:
    await publish(publisher, 0)
    used = (await bus.stream_info(stream)).state.bytes
    async with limited(bus, stream, max_bytes=used + 10, discard="new"):
        waiting = asyncio.create_task(publish(publisher, 1))
        await asyncio.sleep(1.5)
        assert not waiting.done()
        assert [version.policy.version for version in await published(bus, run)] == [0]
    async with asyncio.timeout(20):
        await waiting
    await publish(publisher, 2)
    versions = await published(bus, run)
    assert [version.policy.version for version in versions] == [0, 1, 2]
    assert versions[1].keyframe == versions[0].policy
    assert await retained(bus, WEIGHTS, run=run, digest=versions[1].patches[-1].digest) == 2, "stored once"
    mirror = PolicyStore(bus, run).mirror()
    for number, version in enumerate(versions):
        assert bytes((await mirror.bring_to(version)).data) == weights(number)
