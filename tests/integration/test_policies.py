"""The policy store on a real server: order, fencing, following, collecting, and what a reader may rely on."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from contextlib import aclosing

import pytest

from contracts.errors import InvalidMessage
from contracts.messages import PolicyRef, PolicyVersion
from contracts.policies import TensorSpec
from contracts.subjects import POLICY_PUBLISHED, WEIGHTS
from infra.blobs import BlobCorrupt, BlobMissing, BlobStore
from infra.bus import Bus
from infra.connection import Connection
from infra.policies import PolicyStore, StalePolicy
from infra.server import EmbeddedServer
from tests.integration.helpers import first, publish_raw

SIZE = 2_000_000
BUNDLE = {"config.json": b"{}", "tokenizer.json": bytes(100)}


def weights(seed: int) -> bytes:
    return hashlib.shake_128(str(seed).encode()).digest(SIZE)


async def publish(
    store: PolicyStore, version: int, generation: int = 1, *, seed: int | None = None, files: dict[str, bytes] = BUNDLE
) -> PolicyVersion:
    data = weights(1000 * generation + version if seed is None else seed)
    return await store.publish(
        generation=generation,
        version=version,
        data=memoryview(data),
        tensors=[TensorSpec("weight", "uint8", [SIZE], 0)],
        bundle=await store.put_bundle(files),
        parent=None,
    )


@pytest.fixture
def store(bus: Bus, run: str) -> PolicyStore:
    return PolicyStore(bus, run)


@pytest.fixture
def blobs(bus: Bus, run: str) -> BlobStore:
    return BlobStore(bus.connection, WEIGHTS, run)


async def test_a_published_policy_can_be_loaded_by_others(server: EmbeddedServer, store: PolicyStore, run: str) -> None:
    assert await store.head() is None
    published = await publish(store, 0)
    assert published.policy == PolicyRef(1, 0, hashlib.sha256(weights(1000)).hexdigest())
    bus = await Bus.connect(server.settings, "reader")
    reader = PolicyStore(bus, run)
    head = await reader.head()
    assert head == published
    assert bytes(await reader.fetch(published)) == weights(1000)
    assert await reader.get_bundle(published.bundle) == BUNDLE
    await bus.close()


async def test_one_id_one_content(store: PolicyStore) -> None:
    first_one = await publish(store, 3)
    assert await publish(store, 3) == first_one
    with pytest.raises(StalePolicy, match="other weights"):
        await publish(store, 3, seed=99)
    assert await store.head() == first_one


@pytest.mark.parametrize(("generation", "version"), [(1, 9), (2, 4)], ids=["older generation", "older version"])
async def test_the_head_never_moves_back(store: PolicyStore, generation: int, version: int) -> None:
    newest = await publish(store, 5, generation=2)
    with pytest.raises(StalePolicy, match="older than the published generation 2 version 5"):
        await publish(store, version, generation)
    assert await store.head() == newest


async def test_a_new_generation_may_start_at_a_lower_version(store: PolicyStore) -> None:
    await publish(store, 7, generation=1)
    resumed = await publish(store, 5, generation=2)
    assert await store.head() == resumed


async def test_of_two_learners_publishing_at_once_the_newer_generation_stays(bus: Bus, run: str) -> None:
    stores = [PolicyStore(bus, run), PolicyStore(bus, run)]
    await asyncio.gather(*(publish(stores[g - 1], 4, generation=g) for g in (1, 2)), return_exceptions=True)
    head = await stores[0].head()
    assert head is not None and head.policy.generation == 2


async def test_followers_get_the_newest_then_each_newer_one(bus: Bus, run: str, store: PolicyStore) -> None:
    await publish(store, 0)
    await publish(store, 1)
    async with aclosing(store.follow("follower")) as versions:
        async with asyncio.timeout(10):
            assert (await anext(versions)).policy.version == 1
        for version in (2, 3, 4):  # while the follower is busy with version 1
            await publish(store, version)
        async with asyncio.timeout(10):
            assert (await anext(versions)).policy.version == 4
        waiting = asyncio.ensure_future(anext(versions))
        await publish(store, 2, generation=2)
        async with asyncio.timeout(10):
            newest = (await waiting).policy
        assert (newest.generation, newest.version) == (2, 2)


async def test_a_follower_never_goes_back_to_an_older_generation(bus: Bus, run: str, store: PolicyStore) -> None:
    newest = await publish(store, 2, generation=2)
    stale = PolicyVersion(
        run=run, policy=PolicyRef(1, 9, "c" * 64), tensors=[], size=0, bundle="d" * 64, parent=None, published_ns=1
    )
    async with aclosing(store.follow("follower")) as versions:
        assert await anext(versions) == newest
        waiting = asyncio.ensure_future(anext(versions))
        await bus.publish(POLICY_PUBLISHED, stale, id="stale", run=run)  # by a learner that lost its lease
        newer = await publish(store, 3, generation=2)
        async with asyncio.timeout(10):
            assert await waiting == newer


async def test_a_follower_waits_out_a_server_that_is_away(
    server: EmbeddedServer, store: PolicyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection.call, "__kwdefaults__", {"patience": 0.2})  # instead of a minute
    await publish(store, 0)
    server.kill()
    try:
        async with aclosing(store.follow("follower")) as versions:
            waiting = asyncio.ensure_future(anext(versions))
            await asyncio.sleep(1.0)
            assert not waiting.done()
            server.start()
            async with asyncio.timeout(20):
                assert (await waiting).policy.version == 0
    finally:
        server.start()


async def test_a_poisoned_announcement_stops_nobody(bus: Bus, run: str, store: PolicyStore) -> None:
    await publish_raw(bus, POLICY_PUBLISHED.subject(run=run), b"junk")
    published = await publish(store, 0)
    assert await first(store.follow("follower"), 1) == [published]
    assert await store.collect(keep=2) == 0


async def test_weights_with_a_wrong_digest_are_refused(
    bus: Bus, run: str, store: PolicyStore, blobs: BlobStore
) -> None:
    published = await publish(store, 0)
    subject = WEIGHTS.subject(run=run, digest=published.policy.digest)
    jetstream = bus.connection.client.jetstream()
    manifest = await jetstream.get_last_msg(WEIGHTS.stream, subject, direct=True)
    chunks = [message async for message in _chunks(bus, subject)]
    await blobs.delete(published.policy.digest)
    for headers, data in chunks:
        await publish_raw(bus, subject, secrets.token_bytes(len(data)), **headers)
    await publish_raw(bus, subject, manifest.data or b"", **{"Tailrace-Schema": "blob_manifest/1"})
    with pytest.raises(BlobCorrupt):
        await store.fetch(published)


async def _chunks(bus: Bus, subject: str):  # type: ignore[no-untyped-def]
    from infra.pull import tail

    async for raw in tail(bus.connection, WEIGHTS.stream, subject, name="test", follow=False):
        if "Tailrace-Offset" in raw.headers:
            yield {"Tailrace-Offset": raw.headers["Tailrace-Offset"]}, raw.data


async def test_a_size_that_was_not_announced_is_refused(store: PolicyStore) -> None:
    published = await publish(store, 0)
    larger = PolicyVersion(
        run=published.run, policy=published.policy, tensors=[TensorSpec("weight", "uint8", [SIZE + 1], 0)],
        size=SIZE + 1, bundle=published.bundle, parent=None, published_ns=1,
    )  # fmt: skip
    with pytest.raises(InvalidMessage, match=f"{SIZE} weight bytes, announced {SIZE + 1}"):
        await store.fetch(larger)


async def test_a_bundle_that_is_none_is_refused(store: PolicyStore, blobs: BlobStore) -> None:
    digest = await blobs.put(b"\x81\xa1a\xa1b")  # {"a": "b"}
    with pytest.raises(InvalidMessage, match="not a map of file names to bytes"):
        await store.get_bundle(digest)


# --- collecting -------------------------------------------------------------------------------------------------------


async def test_old_weights_go_and_new_ones_stay(store: PolicyStore, blobs: BlobStore) -> None:
    versions = [await publish(store, number) for number in range(5)]
    assert await store.collect(keep=2) == 3
    assert await blobs.list() == {item.policy.digest for item in versions[3:]} | {versions[0].bundle}
    for version in versions[3:]:
        assert len(await store.fetch(version)) == SIZE
    with pytest.raises(BlobMissing):
        await store.fetch(versions[0])
    assert await store.collect(keep=2) == 0


async def test_a_restarted_learner_collects_what_the_former_one_left(bus: Bus, run: str, blobs: BlobStore) -> None:
    former = PolicyStore(bus, run)
    for number in range(4):
        await publish(former, number)
    restarted = PolicyStore(bus, run)
    await publish(restarted, 2, generation=2)
    assert await restarted.collect(keep=1) == 4
    assert len(await blobs.list()) == 2


async def test_weights_that_were_never_announced_go_as_well(store: PolicyStore, blobs: BlobStore) -> None:
    orphan = await blobs.put(weights(77))  # by a learner that was killed before it moved the head
    published = await publish(store, 0)
    assert await store.collect(keep=2) == 1
    assert await blobs.list() == {published.policy.digest, published.bundle}
    assert orphan not in await blobs.list()


async def test_a_bundle_that_the_store_has_lost_is_put_again(store: PolicyStore, blobs: BlobStore) -> None:
    published = await publish(store, 0)
    await blobs.delete(published.bundle)  # as its expiry does
    newer = await store.publish(
        generation=1,
        version=1,
        data=memoryview(weights(1001)),
        tensors=published.tensors,
        bundle=published.bundle,
        parent=None,
    )
    assert await store.get_bundle(newer.bundle) == BUNDLE


async def test_shared_blobs_stay_while_one_user_is_kept(store: PolicyStore, blobs: BlobStore) -> None:
    """Version 2 has the weights of version 0, and version 1 a bundle of its own."""
    shared = await publish(store, 0, seed=5)
    other = await publish(store, 1, files={"config.json": b"other"})
    await publish(store, 2, seed=5)
    assert await store.collect(keep=1) == 2
    assert await blobs.list() == {shared.policy.digest, shared.bundle}
    assert other.bundle not in await blobs.list()


async def test_a_reader_is_not_cut_off(store: PolicyStore, blobs: BlobStore) -> None:
    old = await publish(store, 0)
    async with store._retention.reading(old.policy.digest):
        await publish(store, 1)
        assert await store.collect(keep=1) == 0
        assert bytes(await store.fetch(old)) == weights(1000)
    assert old.policy.digest in await blobs.list()
