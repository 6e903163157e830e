"""Versions as patches on a real server: joining late, falling behind, loss and damage, repair, collection."""

from __future__ import annotations

import hashlib
from contextlib import aclosing

import msgspec
import numpy as np
import pytest

from contracts import codec
from contracts.errors import InvalidMessage
from contracts.messages import BlobManifest, PolicyVersion
from contracts.policies import TensorSpec, WeightPatch
from contracts.subjects import POLICY_PUBLISHED, WEIGHTS
from infra import patches
from infra.blobs import BlobError, BlobMissing, BlobStore
from infra.bus import Bus
from infra.policies import PolicyStore
from tests.integration.helpers import publish_raw

ITEMS = 500_000
SPECS = [TensorSpec("weight", "bfloat16", [ITEMS], 0)]
SIZE = 2 * ITEMS


def weights(version: int, *, changed: float = 0.01) -> bytes:
    """Random weights of which every version changes a share."""
    random = np.random.default_rng(1)
    items = random.integers(0, 1 << 16, ITEMS, dtype=np.uint16)
    for _ in range(version):
        items[random.random(ITEMS) < changed] += 1
    return items.tobytes()


async def publish(store: PolicyStore, version: int, data: bytes | None = None, *, generation: int = 1) -> PolicyVersion:
    return await store.publish(
        generation=generation,
        version=version,
        data=memoryview(data or weights(version)),
        tensors=SPECS,
        bundle=await store.put_bundle({"config.json": b"{}"}),
        parent=None,
    )


def learner(bus: Bus, run: str, keyframe_every: int = 100) -> PolicyStore:
    return PolicyStore(bus, run, keyframe_every=keyframe_every)


@pytest.fixture
def blobs(bus: Bus, run: str) -> BlobStore:
    return BlobStore(bus.connection, WEIGHTS, run)


async def forge(bus: Bus, run: str, blobs: BlobStore, digest: str, content: bytes) -> None:
    """Put other bytes in a blob's place."""
    await blobs.delete(digest)
    subject = WEIGHTS.subject(run=run, digest=digest)
    await publish_raw(bus, subject, content, **{"Tailrace-Offset": "0"})
    manifest = BlobManifest(digest=digest, size=len(content), chunk_bytes=len(content), chunks=1)
    await publish_raw(bus, subject, codec.encode(manifest), **codec.headers_of(manifest))


# --- publishing and reading -------------------------------------------------------------------------------------------


async def test_a_late_joiner_takes_keyframe_and_patches_and_a_follower_only_the_rest(bus: Bus, run: str) -> None:
    store = learner(bus, run)
    reader = PolicyStore(bus, run)
    follower, sleeper, joiner = reader.mirror(), reader.mirror(), reader.mirror()
    versions = [await publish(store, 0)]
    await sleeper.bring_to(versions[0])
    for number in range(1, 12):
        versions.append(await publish(store, number))
        got = await follower.bring_to(versions[-1])
        assert bytes(got.data) == weights(number)
        if number > 1:
            assert got.fetched == versions[-1].transfer < 0.02 * SIZE
    newest = versions[-1]
    assert [version.keyframe for version in versions] == [None] + 11 * [versions[0].policy]
    assert await reader.head() == newest
    patched = sum(version.transfer for version in versions[1:])
    for mirror, expected in ((joiner, SIZE + patched), (sleeper, patched), (follower, 0)):
        got = await mirror.bring_to(newest)
        assert bytes(got.data) == weights(11)
        assert got.fetched == expected
    assert bytes(await reader.fetch(versions[5])) == weights(5)


async def test_when_weights_are_stored_whole(bus: Bus, run: str) -> None:
    store = learner(bus, run, keyframe_every=3)
    versions = [await publish(store, number) for number in range(5)]
    assert [bool(version.patches) for version in versions] == [False, True, True, False, True]
    unlike = np.random.default_rng(9).bytes(SIZE)
    assert not (await publish(store, 5, unlike)).patches, "the patch would be no gain"
    assert (await publish(store, 6, unlike)).transfer < 100, "the same weights again"
    assert not (await publish(store, 7, generation=2)).patches
    assert not (await publish(learner(bus, run), 8, generation=2)).patches, "another process holds no weights"


async def test_a_mirror_may_go_back(bus: Bus, run: str) -> None:
    store = learner(bus, run)
    versions = [await publish(store, number) for number in range(4)]
    mirror = store.mirror()
    for number in (3, 1, 2, 2, 0):
        assert bytes((await mirror.bring_to(versions[number])).data) == weights(number)


async def test_announcements_out_of_order_and_twice_change_nothing(bus: Bus, run: str) -> None:
    store = learner(bus, run)
    versions = [await publish(store, number) for number in range(3)]
    async with aclosing(PolicyStore(bus, run).follow("follower")) as followed:
        assert await anext(followed) == versions[2]
        for count, number in enumerate((1, 0, 2, 1)):
            await bus.publish(POLICY_PUBLISHED, versions[number], id=f"again-{count}", run=run)
        newest = await publish(store, 3)
        assert await anext(followed) == newest


# --- loss and damage --------------------------------------------------------------------------------------------------


async def assert_repaired(store: PolicyStore, version: PolicyVersion, data: bytes) -> None:
    """Whoever cannot read a version asks for it, and the learner stores it whole and builds on that."""
    assert not await store.repair(), "nobody has asked yet"
    await PolicyStore(store._bus, store._run).ask_for_whole(version.policy)
    assert await store.repair()
    assert not await store.repair(), "once is enough"
    assert bytes(await store.fetch(version)) == data
    newer = await publish(store, version.policy.version + 1)
    assert newer.keyframe == version.policy
    assert bytes(await store.fetch(newer)) == weights(newer.policy.version)


@pytest.mark.parametrize("damage", ["lost", "corrupt"])
async def test_a_broken_patch_is_noticed_and_repaired(bus: Bus, run: str, blobs: BlobStore, damage: str) -> None:
    store = learner(bus, run)
    versions = [await publish(store, number) for number in range(4)]
    behind, ahead = store.mirror(), store.mirror()
    await behind.bring_to(versions[1])
    await ahead.bring_to(versions[2])
    broken = versions[2].patches[-1]
    if damage == "lost":
        await blobs.delete(broken.digest)
    else:
        await forge(bus, run, blobs, broken.digest, bytes(broken.size))
    with pytest.raises(BlobMissing, match=versions[3].policy.digest):
        await behind.bring_to(versions[3])  # the last resort, the whole weights, is not there
    assert bytes((await ahead.bring_to(versions[3])).data) == weights(3), "who is past it needs it no more"
    await assert_repaired(store, versions[3], weights(3))
    assert bytes((await behind.bring_to(versions[3])).data) == weights(3)


@pytest.mark.parametrize("damage", ["lost", "corrupt"])
async def test_a_broken_keyframe_is_noticed_and_repaired(bus: Bus, run: str, blobs: BlobStore, damage: str) -> None:
    store = learner(bus, run)
    version = await publish(store, 0)
    if damage == "lost":
        await blobs.delete(version.policy.digest)
    else:
        await forge(bus, run, blobs, version.policy.digest, bytes(1000))
    with pytest.raises((BlobError, InvalidMessage)):
        await store.fetch(version)
    await assert_repaired(store, version, weights(0))


async def test_a_request_for_a_version_that_is_no_longer_the_newest_is_answered(
    bus: Bus, run: str, blobs: BlobStore
) -> None:
    """Steps may be shorter than the time from one request to the next."""
    store = learner(bus, run)
    versions = [await publish(store, number) for number in range(2)]
    await blobs.delete(versions[1].patches[-1].digest)
    with pytest.raises(BlobMissing):
        await store.fetch(versions[1])
    await store.ask_for_whole(versions[1].policy)
    versions.append(await publish(store, 2))
    assert await store.repair()
    assert not await store.repair(), "once is enough"
    versions.append(await publish(store, 3))
    for version in versions[2:]:
        assert bytes(await store.fetch(version)) == weights(version.policy.version)


async def test_a_patch_that_leads_elsewhere_is_not_believed(bus: Bus, run: str, blobs: BlobStore) -> None:
    """A well-formed patch whose result is not what the version's digest says."""
    store = learner(bus, run)
    version = await publish(store, 0)
    change = patches.diff(weights(0), weights(2), SPECS)
    lie = WeightPatch(policy=msgspec.structs.replace(version.policy, version=1, digest="e" * 64),
                      digest=await blobs.put(change), size=len(change))  # fmt: skip
    announced = msgspec.structs.replace(version, policy=lie.policy, keyframe=version.policy, patches=[lie])
    mirror = store.mirror()
    await mirror.bring_to(version)
    with pytest.raises(BlobMissing):
        await mirror.bring_to(announced)
    assert bytes((await mirror.bring_to(version)).data) == weights(0)


async def test_a_copy_that_is_not_what_it_should_be_is_given_up(bus: Bus, run: str) -> None:
    store = learner(bus, run)
    versions = [await publish(store, number) for number in range(3)]
    mirror = store.mirror()
    held = (await mirror.bring_to(versions[1])).data
    held[1000] ^= 1
    got = await mirror.bring_to(versions[2])
    assert bytes(got.data) == weights(2)
    assert got.fetched == SIZE + sum(patch.size for patch in versions[2].patches), "keyframe and all patches"
    assert hashlib.sha256(got.data).hexdigest() == versions[2].policy.digest


# --- collecting -------------------------------------------------------------------------------------------------------


def stored(*versions: PolicyVersion) -> set[str]:
    """Blobs that lie in the store for these versions: their bundle, and what each was stored as."""
    own = {version.patches[-1].digest if version.patches else version.policy.digest for version in versions}
    return own | {versions[0].bundle}


async def test_what_kept_versions_build_on_is_kept(bus: Bus, run: str, blobs: BlobStore) -> None:
    store = learner(bus, run, keyframe_every=4)
    versions = [await publish(store, number) for number in range(7)]  # keyframes 0 and 4
    assert await store.collect(keep=2) == 4
    assert await blobs.list() == stored(*versions[4:])
    assert bytes(await store.fetch(versions[6])) == weights(6)
    assert await store.collect(keep=2) == 0
    with pytest.raises(BlobMissing):
        await store.fetch(versions[3])


async def test_a_slow_reader_of_a_chain_is_not_cut_off(bus: Bus, run: str, blobs: BlobStore) -> None:
    store = learner(bus, run, keyframe_every=4)
    versions = [await publish(store, number) for number in range(3)]
    async with PolicyStore(bus, run)._retention.reading(versions[2].policy.digest):
        versions += [await publish(store, number) for number in range(3, 6)]
        await store.collect(keep=1)
        assert await blobs.list() == stored(*versions[:3], *versions[4:]), "version 3 is not read"
        assert await store.collect(keep=1) == 0
        assert bytes(await store.fetch(versions[2])) == weights(2)
    for key in await bus.keys(f"{run}.policy.readers.>", bucket="tailrace-leases"):
        await bus.connection.client.jetstream().purge_stream("KV_tailrace-leases", subject=f"$KV.tailrace-leases.{key}")
    assert await store.collect(keep=1) == 3
    assert await blobs.list() == stored(*versions[4:])
