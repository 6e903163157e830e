"""Chunked blobs on a real server: content, repetition, repair, corruption, and a server that dies meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import secrets

import pytest

from contracts import codec
from contracts.messages import BlobManifest
from contracts.subjects import WEIGHTS
from infra.blobs import CHUNK_BYTES, OFFSET_HEADER, BlobCorrupt, BlobError, BlobMissing, BlobStore
from infra.bus import Bus, QueueFull
from infra.connection import Unavailable
from infra.server import EmbeddedServer
from tests.integration.helpers import publish_raw, until

SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 77)


@pytest.fixture
def blobs(bus: Bus, run: str) -> BlobStore:
    return BlobStore(bus.connection, WEIGHTS, run)


def subject(run: str, digest: str) -> str:
    return WEIGHTS.subject(run=run, digest=digest)


async def stored(bus: Bus, run: str, digest: str) -> int:
    return (await bus.subjects(WEIGHTS.stream, subject(run, digest))).get(subject(run, digest), 0)


async def put_manifest(bus: Bus, run: str, digest: str, size: int, chunk_bytes: int = CHUNK_BYTES) -> None:
    manifest = BlobManifest(digest=digest, size=size, chunk_bytes=chunk_bytes, chunks=-(-size // chunk_bytes))
    await publish_raw(bus, subject(run, digest), codec.encode(manifest), **codec.headers_of(manifest))


@pytest.mark.parametrize("size", SIZES)
async def test_what_is_put_is_got(blobs: BlobStore, size: int) -> None:
    data = secrets.token_bytes(size)
    digest = await blobs.put(data)
    assert digest == hashlib.sha256(data).hexdigest()
    assert bytes(await blobs.get(digest, timeout=10)) == data
    assert await blobs.list() == {digest}


async def test_a_complete_blob_is_not_sent_again(bus: Bus, run: str, blobs: BlobStore) -> None:
    data = secrets.token_bytes(3 * CHUNK_BYTES)
    digest = await blobs.put(data)
    before = await stored(bus, run, digest)
    await blobs.put(memoryview(data))
    assert await stored(bus, run, digest) == before == 4


async def test_a_deleted_blob_can_be_put_again(blobs: BlobStore) -> None:
    # The server still remembers the ids of the purged chunks.
    data = secrets.token_bytes(2 * CHUNK_BYTES)
    digest = await blobs.put(data)
    await blobs.delete(digest)
    await blobs.delete(digest)
    assert await blobs.list() == set()
    with pytest.raises(BlobMissing):
        await blobs.get(digest, timeout=10)
    await blobs.put(data)
    assert bytes(await blobs.get(digest, timeout=10)) == data


async def test_a_torn_put_is_repaired(bus: Bus, run: str, blobs: BlobStore) -> None:
    data = secrets.token_bytes(4 * CHUNK_BYTES)
    digest = await blobs.put(data)
    jetstream = bus.connection.client.jetstream()
    await jetstream.purge_stream(WEIGHTS.stream, subject=subject(run, digest), keep=2)  # the oldest chunks are gone
    with pytest.raises(BlobMissing):
        await blobs.get(digest, timeout=10)
    await blobs.put(data)
    assert bytes(await blobs.get(digest, timeout=10)) == data


async def test_order_repetition_and_other_writers_do_not_matter(bus: Bus, run: str, blobs: BlobStore) -> None:
    data = secrets.token_bytes(3 * CHUNK_BYTES + 5)
    digest = hashlib.sha256(data).hexdigest()
    for offset in (2 * CHUNK_BYTES, 0, 3 * CHUNK_BYTES, 0, CHUNK_BYTES, 2 * CHUNK_BYTES):
        await publish_raw(
            bus, subject(run, digest), data[offset : offset + CHUNK_BYTES], **{OFFSET_HEADER: str(offset)}
        )
    for header in ("-1", "7", "x", "9" * 30, str(4 * CHUNK_BYTES)):  # not chunks of this blob
        await publish_raw(bus, subject(run, digest), b"junk", **{OFFSET_HEADER: header})
    await put_manifest(bus, run, digest, len(data))
    assert bytes(await blobs.get(digest, timeout=10)) == data


async def test_concurrent_writers_of_one_blob(bus: Bus, server: EmbeddedServer, run: str, blobs: BlobStore) -> None:
    data = secrets.token_bytes(6 * CHUNK_BYTES)
    others = [await Bus.connect(server.settings, f"writer-{number}") for number in range(2)]
    digests = await asyncio.gather(*(BlobStore(other.connection, WEIGHTS, run).put(data) for other in others))
    assert bytes(await blobs.get(digests[0], timeout=10)) == data
    for other in others:
        await other.close()


async def test_a_blob_without_its_manifest_is_missing(bus: Bus, run: str, blobs: BlobStore) -> None:
    digest = "a" * 64
    await publish_raw(bus, subject(run, digest), b"half of it", **{OFFSET_HEADER: "0"})
    with pytest.raises(BlobMissing, match=digest):
        await blobs.get(digest, timeout=10)


@pytest.mark.parametrize("case", ["other content", "other manifest", "broken manifest", "larger than announced"])
async def test_a_wrong_blob_is_refused(bus: Bus, run: str, blobs: BlobStore, case: str) -> None:
    digest, limit = hashlib.sha256(b"expected").hexdigest(), 1000
    await publish_raw(bus, subject(run, digest), b"surprise", **{OFFSET_HEADER: "0"})
    if case == "other content":
        await put_manifest(bus, run, digest, len(b"surprise"))
    elif case == "other manifest":
        manifest = BlobManifest(digest="b" * 64, size=8, chunk_bytes=8, chunks=1)
        await publish_raw(bus, subject(run, digest), codec.encode(manifest), **codec.headers_of(manifest))
    elif case == "broken manifest":
        await publish_raw(bus, subject(run, digest), b"junk", **{"Tailrace-Schema": "blob_manifest/1"})
    else:
        await put_manifest(bus, run, digest, 1 << 39)
    with pytest.raises(BlobCorrupt, match=digest):
        await blobs.get(digest, timeout=10, max_bytes=limit)


@pytest.mark.parametrize("chunk_bytes, error", [(1, BlobMissing), (CHUNK_BYTES, BlobMissing), (1 << 45, BlobCorrupt)])
async def test_no_memory_is_taken_by_a_manifest_s_word(
    bus: Bus, run: str, blobs: BlobStore, chunk_bytes: int, error: type[BlobError]
) -> None:
    digest = "a" * 64
    await publish_raw(bus, subject(run, digest), b"x", **{OFFSET_HEADER: "0"})
    await put_manifest(bus, run, digest, 1 << 45, chunk_bytes)
    with pytest.raises(error, match=digest):
        await blobs.get(digest, timeout=20, max_bytes=1 << 50)


async def test_a_killed_server_interrupts_neither_put_nor_get(
    bus: Bus, server: EmbeddedServer, run: str, blobs: BlobStore
) -> None:
    data = secrets.token_bytes(60 * 1024 * 1024)

    async def kill_during(work: asyncio.Task[object]) -> None:
        await asyncio.sleep(0.12)
        was_running = not work.done()
        server.kill()
        server.start()
        await asyncio.wait_for(work, 40)
        assert await until(lambda: bus.connected)
        interrupted.append(was_running)

    interrupted: list[bool] = []
    await kill_during(asyncio.create_task(blobs.put(data)))
    digest = hashlib.sha256(data).hexdigest()
    reading = asyncio.create_task(blobs.get(digest, timeout=40))
    await kill_during(reading)
    assert bytes(reading.result()) == data
    assert interrupted[0]
    await blobs.delete(digest)


async def test_a_server_that_stays_away_says_nothing_about_the_blob(server: EmbeddedServer, blobs: BlobStore) -> None:
    digest = await blobs.put(b"here")
    server.kill()
    try:
        with pytest.raises(Unavailable):
            await blobs.get(digest, timeout=0.3)
    finally:
        server.start()
    assert await blobs.get(digest, timeout=10) == b"here"


async def test_a_full_store_pushes_back(bus: Bus, blobs: BlobStore) -> None:
    jetstream = bus.connection.client.jetstream()
    config = (await jetstream.stream_info(WEIGHTS.stream)).config
    full = (await jetstream.stream_info(WEIGHTS.stream)).state.bytes + 3 * CHUNK_BYTES
    await jetstream.update_stream(config, max_bytes=full)
    try:
        with pytest.raises(QueueFull, match="maximum bytes exceeded"):
            await blobs.put(secrets.token_bytes(8 * CHUNK_BYTES))
    finally:
        await jetstream.update_stream(config)
