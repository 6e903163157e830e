"""The policy store: weights in the blob store, versions on a subject, the newest in a key that only moves forward."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgpack
import msgspec

from contracts import codec
from contracts.errors import ContractError, InvalidMessage
from contracts.messages import PolicyRef, PolicyVersion
from contracts.policies import TensorSpec, WeightPatch
from contracts.subjects import KV_LEASES, POLICY_PUBLISHED, WEIGHTS
from infra import chains, patches
from infra.blobs import BlobError, BlobStore
from infra.bus import Bus
from infra.mirror import FETCH_SECONDS, Mirror, fetch_seconds
from infra.production import Production
from infra.retention import Retention


class StalePolicy(Exception):
    """The store holds a newer policy, or one of the same generation and version with other weights."""


class PolicyStore:
    """The policies of one run."""

    def __init__(self, bus: Bus, run: str, *, keyframe_every: int = 1) -> None:
        """`keyframe_every` is for who publishes: weights are stored whole at least that often, and at first."""
        self._bus = bus
        self._run = run
        self._keyframe_every = keyframe_every
        self._blobs = BlobStore(bus.connection, WEIGHTS, run)
        self._retention = Retention(bus, self._blobs, run)
        self.production = Production(bus, self._blobs, self._retention, run)
        self._last: tuple[PolicyVersion, memoryview] | None = None  # published last, with the weights
        self._bundle: tuple[str, bytes] | None = None  # digest and content of the one put last
        self._answered: set[str] = set()  # keys of requests for whole weights
        self._storing = asyncio.Lock()  # publication, repair and collection exclude each other

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

        Stored is a patch on top of the weights published last, or all of them: at first, every `keyframe_every`
        versions, and when a patch would be no gain. `data` is kept, and must not be changed any more. The bundle that
        was put last goes with it again where the store has lost it: it expires, the run may not.
        Raises `StalePolicy` if the head is newer, or if it has the same generation and version with other weights;
        `QueueFull` if the store is full.
        """
        async with self._storing:
            digest, patch = await asyncio.gather(
                asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest()),
                asyncio.to_thread(self._patch, generation, version, data, tensors),
            )
            policy = PolicyRef(generation, version, digest)
            message = await self.head()
            _check_order(policy, message)
            if message is None or message.policy != policy:
                keyframe, chain = await self._store(policy, data, patch)
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
                    keyframe=keyframe,
                    patches=chain,
                )
                await self._move_head(message)
                self._last = message, data
            id = f"{self._run}.policy.{generation}.{version}.{digest}"
            await self._bus.publish(POLICY_PUBLISHED, message, id=id, run=self._run)
            return message

    def _patch(self, generation: int, version: int, data: memoryview, tensors: list[TensorSpec]) -> bytes | None:
        """What makes `data` of the weights published last; None where they are to be stored whole."""
        if self._last is None or not chains.may_extend(
            self._last[0], generation, version, tensors, self._keyframe_every
        ):
            return None
        patch = patches.diff(self._last[1], data, tensors)
        return patch if chains.worth_a_patch(self._last[0], len(patch)) else None

    async def _store(
        self, policy: PolicyRef, data: memoryview, patch: bytes | None
    ) -> tuple[PolicyRef | None, list[WeightPatch]]:
        if patch is None or self._last is None:
            await self._blobs.put(data, known_digest=policy.digest)
            return None, []
        digest = await self._blobs.put(patch)
        return chains.extended(self._last[0], WeightPatch(policy=policy, digest=digest, size=len(patch)))

    async def put_bundle(self, files: dict[str, bytes]) -> str:
        """Store what a generator needs besides weights (configuration, tokenizer) and return its digest."""
        data = msgpack.packb(dict(sorted(files.items())), use_bin_type=True)
        digest = await self._blobs.put(data)
        self._bundle = digest, data
        return digest

    async def get_bundle(self, digest: str) -> dict[str, bytes]:
        """The files of a bundle by name. Raises as `BlobStore.get`, or `InvalidMessage`."""
        async with self._retention.reading(digest):
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
                head = await self._bus.at_last(self.head)
                if head is not None and (newest is None or _order(head) > _order(newest)):
                    newest = head
                    yield head
                await anext(announcements)

    async def find(self, number: int | None) -> PolicyVersion | None:
        """The newest published policy, or the newest of that version number; None when there is none."""
        found: PolicyVersion | None = None
        published = self._bus.read(
            POLICY_PUBLISHED, kind=PolicyVersion, follow=False, consumer="promotion", run=self._run
        )
        async with aclosing(published):
            async for received in published:
                version = received.message
                if number in (None, version.policy.version) and (found is None or version.policy > found.policy):
                    found = version
        return found

    def mirror(self) -> Mirror:
        """A copy of the weights, still empty, that follows versions."""
        return Mirror(self._blobs, self._retention)

    async def fetch(self, policy: PolicyVersion) -> bytearray:
        """The weight bytes, verified, by someone who holds no other. Raises as `Mirror.bring_to`."""
        return (await self.mirror().bring_to(policy)).data

    async def keep(self, version: PolicyVersion, data: memoryview, files: dict[str, bytes]) -> None:
        """Store a policy that serves, whole and with its bundle, where the store has lost either: both expire there.

        For who serves it, which may go on long after the learner. `data` must not change meanwhile. Raises `QueueFull`
        or `PublishFailed`.
        """
        await self.put_bundle(files)
        await self._blobs.put(data, known_digest=version.policy.digest)

    async def collect(self, keep: int) -> int:
        """Delete every blob but those of the newest `keep` versions, of what serves, and what is being read.

        Returns how many.

        So what a learner stored and did not live to announce goes as well. For the learner, who alone publishes.
        """
        async with self._storing:
            promotion = await self.production.current()
            serving = [promotion.version] if promotion is not None else []
            head = await self.head()
            return await self._retention.collect(keep, [*serving, head] if head is not None else serving)

    async def ask_for_whole(self, policy: PolicyRef) -> None:
        """Tell the publisher that a policy can be read by no way. The request expires by itself within seconds."""
        await self._bus.put(f"{self._requests}.{policy.digest}.{secrets.token_hex(8)}", b"", bucket=KV_LEASES)

    async def repair(self) -> bool:
        """Store the newest weights whole if somebody has asked for them or for some they build on; True when done.

        Blobs can be lost or damaged in the store, and a chain of patches breaks with any of them; whoever waits for
        its policy would wait until the next keyframe, and the learner, perhaps, for what it makes. The next patch
        builds on what is stored here. For the learner that published last. Raises as `publish`.
        """
        asked = await self._bus.keys(f"{self._requests}.>", bucket=KV_LEASES)
        wanted = {key.split(".")[-2] for key in asked - self._answered}
        async with self._storing:
            # Who cannot read a version cannot read what builds on it, and steps may be shorter than its next request.
            if self._last is None or wanted.isdisjoint(policy.digest for policy in chains.policies_of(self._last[0])):
                return False
            message, data = self._last
            try:
                limit = fetch_seconds(message.size)
                await self._blobs.get(message.policy.digest, timeout=limit, max_bytes=message.size)
            except BlobError:
                await self._blobs.delete(message.policy.digest)
                await self._blobs.put(data, known_digest=message.policy.digest)
            self._last = msgspec.structs.replace(message, keyframe=None, patches=[]), data
        self._answered = asked
        return True

    async def _head(self) -> tuple[PolicyVersion | None, int]:
        entry = await self._bus.get(self._head_key)
        if entry is None:
            return None, 0
        try:
            return codec.decode(entry[0], PolicyVersion), entry[1]
        except ContractError as error:
            raise InvalidMessage(f"key {self._head_key}: {error}") from error

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

    @property
    def _requests(self) -> str:
        return f"{self._run}.policy.wanted"


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
