"""The policy store: weights in the blob store, versions on a subject, the newest in a key that only moves forward."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgpack
import structlog

from contracts import codec
from contracts.errors import ContractError, InvalidMessage
from contracts.messages import PolicyRef, PolicyVersion, TensorSpec
from contracts.subjects import KV_LEASES, LEASE_TTL, POLICY_PUBLISHED, WEIGHTS
from infra.blobs import BlobStore
from infra.bus import Bus
from infra.connection import Unavailable

log = structlog.get_logger(__name__)

FETCH_SECONDS = 120.0
SLOWEST_BYTES_PER_SECOND = 5_000_000


class StalePolicy(Exception):
    """The store holds a newer policy, or one of the same generation and version with other weights."""


class PolicyStore:
    """The policies of one run."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus = bus
        self._run = run
        self._blobs = BlobStore(bus.connection, WEIGHTS, run)
        self._versions: dict[PolicyRef, str] = {}  # the newest known versions -> their bundle
        self._seen: int | None = None  # stream sequence up to which `_versions` is complete
        self._bundle: tuple[str, bytes] | None = None  # digest and content of the one put last

    async def publish(
        self,
        *,
        generation: int,
        version: int,
        data: memoryview,
        tensors: list[TensorSpec],
        bundle: str,
        parent: PolicyRef | None,
    ) -> PolicyVersion:
        """Store weights, move the head to them, and announce them. Doing it again with the same weights is harmless.

        The bundle that was put last goes with it again where the store has lost it: it expires, the run may not.
        Raises `StalePolicy` if the head is newer, or if it has the same generation and version with other weights;
        `QueueFull` if the store is full.
        """
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        policy = PolicyRef(generation, version, digest)
        head = await self.head()
        _check_order(policy, head)
        if head is not None and head.policy == policy:
            message = head
        else:
            await self._blobs.put(data, known_digest=digest)
            if self._bundle is not None and self._bundle[0] == bundle:
                await self._blobs.put(self._bundle[1], known_digest=bundle)
            message = PolicyVersion(
                run=self._run,
                policy=policy,
                tensors=tensors,
                size=data.nbytes,
                bundle=bundle,
                parent=parent,
                published_ns=time.time_ns(),
            )
            await self._move_head(message)
        id = f"{self._run}.policy.{generation}.{version}.{digest}"
        await self._bus.publish(POLICY_PUBLISHED, message, id=id, run=self._run)
        return message

    async def put_bundle(self, files: dict[str, bytes]) -> str:
        """Store what a generator needs besides weights (configuration, tokenizer) and return its digest."""
        data = msgpack.packb(dict(sorted(files.items())), use_bin_type=True)
        digest = await self._blobs.put(data)
        self._bundle = digest, data
        return digest

    async def get_bundle(self, digest: str) -> dict[str, bytes]:
        """The files of a bundle by name. Raises as `BlobStore.get`, or `InvalidMessage`."""
        async with self._reading(digest):
            data = await self._blobs.get(digest, timeout=FETCH_SECONDS)
        files = codec.unpack(memoryview(data))
        if not all(isinstance(name, str) and isinstance(content, bytes) for name, content in files.items()):
            raise InvalidMessage(f"bundle {digest}: not a map of file names to bytes")
        return files

    async def head(self) -> PolicyVersion | None:
        """The newest policy."""
        return (await self._head())[0]

    async def follow(self, consumer: str) -> AsyncGenerator[PolicyVersion, None]:
        """The newest policy now, then each newer one; those that were overtaken meanwhile are skipped.

        What is newest is said by the head alone, announcements only wake: whatever is announced, this never goes back
        to an older generation and never to a version that no learner made the head. A server that is away is waited
        for, however long it takes. Close it (`contextlib.aclosing`) when you stop early.
        """
        newest: PolicyVersion | None = None
        read = self._bus.read(POLICY_PUBLISHED, kind=PolicyVersion, last=True, consumer=consumer, run=self._run)
        async with aclosing(read) as announcements:
            while True:
                head = await self._head_at_last()
                if head is not None and (newest is None or _order(head) > _order(newest)):
                    newest = head
                    yield head
                await anext(announcements)

    async def fetch(self, policy: PolicyVersion) -> bytearray:
        """The weight bytes, verified. Raises as `BlobStore.get`, or `InvalidMessage` if their size is not as announced.

        While it reads, `collect` leaves them alone.
        """
        limit = FETCH_SECONDS + policy.size / SLOWEST_BYTES_PER_SECOND
        async with self._reading(policy.policy.digest):
            data = await self._blobs.get(policy.policy.digest, timeout=limit, max_bytes=policy.size)
        if len(data) != policy.size:
            raise InvalidMessage(f"policy {policy.policy.version}: {len(data)} weight bytes, announced {policy.size}")
        return data

    async def collect(self, keep: int) -> int:
        """Delete every blob but those of the newest `keep` versions and what is being read; return how many.

        So what a learner stored and did not live to announce goes as well. For a learner that is not publishing.
        """
        surplus = await self._blobs.list()  # looked at first: what is announced after it is not among them
        await self._learn_versions()
        newest = sorted(self._versions, reverse=True)[:keep]
        self._versions = {policy: self._versions[policy] for policy in newest}
        surplus -= {policy.digest for policy in newest} | set(self._versions.values())
        if (head := await self.head()) is not None:
            surplus -= {head.policy.digest, head.bundle}
        deleted = 0
        for digest in surplus:
            if digest not in await self._being_read():  # or else next time
                await self._blobs.delete(digest)
                deleted += 1
        return deleted

    async def _head(self) -> tuple[PolicyVersion | None, int]:
        entry = await self._bus.get(self._head_key)
        if entry is None:
            return None, 0
        try:
            return codec.decode(entry[0], PolicyVersion), entry[1]
        except ContractError as error:
            raise InvalidMessage(f"key {self._head_key}: {error}") from error

    async def _head_at_last(self) -> PolicyVersion | None:
        told = False
        while True:
            try:
                return await self.head()
            except Unavailable as error:
                if self._bus.connection.closed:
                    raise
                if not told:
                    log.warning("following waits for the server", error=str(error))
                    told = True

    @property
    def _head_key(self) -> str:
        return f"{self._run}.policy.head"

    async def _move_head(self, message: PolicyVersion) -> None:
        value = codec.encode(message)
        while True:
            head, revision = await self._head()
            _check_order(message.policy, head)
            if head is None:
                moved = await self._bus.create(self._head_key, value)
            else:
                moved = await self._bus.update(self._head_key, value, revision)
            if moved is not None:
                return

    async def _learn_versions(self) -> None:
        start = None if self._seen is None else self._seen + 1
        reader = self._bus.read(
            POLICY_PUBLISHED, kind=PolicyVersion, start=start, follow=False, consumer="collect", run=self._run
        )
        async with aclosing(reader):
            async for received in reader:
                self._versions[received.message.policy] = received.message.bundle
                self._seen = received.sequence

    @asynccontextmanager
    async def _reading(self, digest: str) -> AsyncIterator[None]:
        """Hold a key that says so and expires by itself, renewed for as long as the reading takes."""
        key = f"{self._readers}.{digest}.{secrets.token_hex(8)}"

        async def renew() -> None:
            while True:
                await asyncio.sleep(LEASE_TTL / 3)
                with contextlib.suppress(Unavailable):
                    await self._bus.put(key, b"", bucket=KV_LEASES)

        await self._bus.put(key, b"", bucket=KV_LEASES)
        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()

    async def _being_read(self) -> set[str]:
        keys = await self._bus.keys(f"{self._readers}.>", bucket=KV_LEASES)
        return {key.split(".")[-2] for key in keys}

    @property
    def _readers(self) -> str:
        return f"{self._run}.policy.readers"


def _order(version: PolicyVersion) -> tuple[int, int]:
    return version.policy.generation, version.policy.version


def _check_order(policy: PolicyRef, head: PolicyVersion | None) -> None:
    if head is None:
        return
    if _order(head) > (policy.generation, policy.version):
        raise StalePolicy(
            f"generation {policy.generation} version {policy.version} is older than the published "
            f"generation {head.policy.generation} version {head.policy.version}"
        )
    if _order(head) == (policy.generation, policy.version) and head.policy.digest != policy.digest:
        raise StalePolicy(
            f"generation {policy.generation} version {policy.version} is published already, with other weights"
        )
