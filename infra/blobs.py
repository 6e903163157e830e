"""Blobs of any size over JetStream: chunks on one subject named by the content's digest, the manifest last.

Every chunk carries its place, so that neither order nor repetition matters, and the digest proves the whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator

from nats.aio.client import Client
from nats.js.errors import NotFoundError

from contracts import codec
from contracts.errors import ContractError
from contracts.messages import BlobManifest
from contracts.subjects import Channel
from infra.connection import Connection, Unavailable
from infra.pull import Raw, tail

CHUNK_BYTES = 900 * 1024
HEADROOM_BYTES = 16 * 1024  # of the server's payload limit, for headers
WINDOW = 16  # publishes in flight: hides a long round trip without flooding the server's buffer
PUT_PATIENCE = 300.0  # seconds for one chunk
POLL_SECONDS = 0.2
MISSING_POLLS = 5  # incomplete for that long is lost
MAX_BYTES = 1 << 40  # of a blob whose size nobody announced
OFFSET_HEADER = "Tailrace-Offset"  # of a chunk: its first byte's place in the blob
MANIFEST = codec.schema_of(BlobManifest)


class BlobError(Exception):
    """A blob that cannot be read. `code` is stable and machine-readable."""

    code = "blob_error"


class BlobMissing(BlobError):
    """The server answers, and has no complete blob of this digest."""

    code = "blob_missing"


class BlobCorrupt(BlobError):
    """The chunks do not add up to the digest."""

    code = "blob_corrupt"


class BlobStore:
    """The blobs of one run on one channel (`WEIGHTS` or `BLOBS`)."""

    def __init__(self, connection: Connection, channel: Channel, run: str) -> None:
        self._connection = connection
        self._channel = channel
        self._run = run

    async def put(self, data: bytes | memoryview, *, known_digest: str = "") -> str:
        """Store a blob and return its sha256 in lowercase hex. One that is there already is not sent again.

        `known_digest` spares computing it. Raises `QueueFull` when the stream is full, `PublishFailed` when the server
        stays away.
        """
        view = memoryview(data).cast("B")
        digest = known_digest or await asyncio.to_thread(lambda: hashlib.sha256(view).hexdigest())
        manifest = await self._manifest(digest)
        if manifest is not None and await self._count(digest) > manifest.chunks:
            return digest
        size = min(CHUNK_BYTES, self._connection.max_payload - HEADROOM_BYTES)
        offsets = range(0, len(view), size)
        await self._send_chunks(digest, view, size, iter(offsets))
        manifest = BlobManifest(digest=digest, size=len(view), chunk_bytes=size, chunks=len(offsets))
        # Its id is new in every put: after another writer's chunks, the manifest has to be the last message again.
        await self._connection.send(
            self._subject(digest),
            codec.encode(manifest),
            id=f"{self._subject(digest)}.manifest.{secrets.token_hex(8)}",
            headers=codec.headers_of(manifest),
            patience=PUT_PATIENCE,
        )
        return digest

    async def get(self, digest: str, *, timeout: float, max_bytes: int = MAX_BYTES) -> bytearray:
        """Read a blob and verify it, within `timeout` seconds.

        Blobs are announced after they are stored, so one that is not complete is soon given up. Raises `BlobMissing`,
        `BlobCorrupt` (also above `max_bytes`), or `Unavailable` if the time was not enough.
        """
        try:
            async with asyncio.timeout(timeout):
                blob = await self._complete(digest, max_bytes)
        except TimeoutError:
            raise Unavailable(f"blob {digest} could not be read within {timeout:g} s") from None
        found = await asyncio.to_thread(lambda: hashlib.sha256(blob).hexdigest())
        if found != digest:
            raise BlobCorrupt(f"blob {digest} has the content of {found}")
        return blob

    async def _complete(self, digest: str, max_bytes: int) -> bytearray:
        # A replica that answers may lag behind the one that stored, and another writer may be at work.
        for _ in range(MISSING_POLLS):
            manifest = await self._manifest(digest)
            if manifest is not None:
                if manifest.size > max_bytes:
                    raise BlobCorrupt(f"blob {digest} has {manifest.size} bytes, at most {max_bytes} were announced")
                if await self._is_there(manifest) and (blob := await self._read(manifest)) is not None:
                    return blob
            await asyncio.sleep(POLL_SECONDS)
        raise BlobMissing(f"blob {digest} is not on {self._subject(digest)}, or not all of it")

    async def delete(self, digest: str) -> None:
        """Remove a blob; one that is not there is fine."""
        subject, stream = self._subject(digest), self._channel.stream

        async def purge(client: Client, limit: float) -> None:
            await client.jetstream(timeout=limit).purge_stream(stream, subject=subject)

        await self._connection.call(purge)

    async def list(self) -> set[str]:
        """Digests of the run's blobs, complete or not."""
        subjects = await self._connection.subjects(self._channel.stream, self._channel.filter(run=self._run))
        return {subject.rsplit(".", 1)[1] for subject in subjects}

    def _subject(self, digest: str) -> str:
        return self._channel.subject(run=self._run, digest=digest)

    async def _count(self, digest: str) -> int:
        subject = self._subject(digest)
        return (await self._connection.subjects(self._channel.stream, subject)).get(subject, 0)

    async def _manifest(self, digest: str) -> BlobManifest | None:
        """The manifest, if it is the subject's last message."""
        subject, stream = self._subject(digest), self._channel.stream
        try:
            last = await self._connection.call(
                lambda client, limit: client.jetstream(timeout=limit).get_msg(stream, subject=subject, direct=True)
            )
        except NotFoundError:
            return None
        if (last.headers or {}).get("Tailrace-Schema") != MANIFEST:
            return None
        try:
            manifest = codec.decode(last.data or b"", BlobManifest)
        except ContractError as error:
            raise BlobCorrupt(f"blob {digest}: {error}") from error
        if manifest.digest != digest:
            raise BlobCorrupt(f"blob {digest}: its manifest names {manifest.digest}")
        return manifest

    async def _is_there(self, manifest: BlobManifest) -> bool:
        """Whether there may be as many bytes as the manifest claims: memory is not taken by its word."""
        largest = max(CHUNK_BYTES, self._connection.max_payload)
        if manifest.chunk_bytes > largest:
            raise BlobCorrupt(
                f"blob {manifest.digest}: no message carries a chunk of {manifest.chunk_bytes} bytes, but {largest}"
            )
        return manifest.chunks <= 1 or await self._count(manifest.digest) > manifest.chunks

    async def _read(self, manifest: BlobManifest) -> bytearray | None:
        """All chunks in their places; None when some are missing."""
        blob = bytearray(manifest.size)
        missing = set(range(0, manifest.size, manifest.chunk_bytes))
        if not missing:
            return blob
        reader = tail(self._connection, self._channel.stream, self._subject(manifest.digest), name="blob", follow=False)
        try:
            async for raw in reader:
                offset = _offset(raw)
                if offset in missing and len(raw.data) == min(manifest.chunk_bytes, manifest.size - offset):
                    blob[offset : offset + len(raw.data)] = raw.data
                    missing.discard(offset)
                if not missing:
                    return blob
        finally:
            await reader.aclose()
        return None

    async def _send_chunks(self, digest: str, view: memoryview, size: int, offsets: Iterator[int]) -> None:
        """Publish all chunks, `WINDOW` at a time; the first failure ends the rest."""

        async def worker() -> None:
            for offset in offsets:
                await self._send_chunk(digest, offset, view[offset : offset + size], size)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(WINDOW):
                    group.create_task(worker())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _send_chunk(self, digest: str, offset: int, chunk: memoryview, size: int) -> None:
        subject = self._subject(digest)
        message_id, headers = f"{subject}.{size}.{offset}", {OFFSET_HEADER: str(offset)}
        send, payload = self._connection.send, bytes(chunk)
        stored = await send(subject, payload, id=message_id, headers=headers, patience=PUT_PATIENCE)
        if stored.duplicate and not await self._is_retained(digest, stored.sequence):
            # The server remembers the id of a chunk that has been purged since.
            renewed = f"{message_id}.{secrets.token_hex(8)}"
            await send(subject, payload, id=renewed, headers=headers, patience=PUT_PATIENCE)

    async def _is_retained(self, digest: str, sequence: int) -> bool:
        # Whatever removes messages removes the oldest of a subject first, or all of them.
        subject, stream = self._subject(digest), self._channel.stream
        try:
            first = await self._connection.call(
                lambda client, limit: client.jetstream(timeout=limit).get_msg(
                    stream, seq=1, subject=subject, next=True, direct=True
                )
            )
        except NotFoundError:
            return False
        return first.seq is not None and first.seq <= sequence


def _offset(raw: Raw) -> int:
    value = raw.headers.get(OFFSET_HEADER, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else -1
