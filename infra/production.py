"""Which policy serves production: a key that is changed by compare-and-set, announced on a subject."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from contracts import codec
from contracts.errors import ContractError, InvalidMessage
from contracts.messages import PolicyRef, PolicyVersion, Promotion
from contracts.subjects import POLICY_PROMOTED
from infra.blobs import BlobStore
from infra.bus import Bus
from infra.chains import is_stored
from infra.retention import Retention


class PromotionRefused(Exception):
    """The policy cannot serve, or another one must not give way to it; the message says why."""


class Production:
    """The production head of one run; `PolicyStore.production`."""

    def __init__(self, bus: Bus, blobs: BlobStore, retention: Retention, run: str) -> None:
        self._bus = bus
        self._blobs = blobs
        self._retention = retention
        self._run = run
        self._key = f"{run}.policy.production"

    async def current(self) -> Promotion | None:
        """What serves production now."""
        return (await self._entry())[0]

    async def promote(
        self, version: PolicyVersion, *, decided_by: str, reason: str, override: bool = False
    ) -> Promotion:
        """Let a published policy serve from now on, and announce it. Doing it again only announces it again.

        Only an `override` goes back to an older policy. Raises `PromotionRefused` where that is asked without one, or
        where the store does not hold the policy any more; `Unavailable`.
        """
        async with self._retention.reading(version.policy.digest):
            if not is_stored(version, await self._blobs.list()):
                raise PromotionRefused(f"{_name(version.policy)} is no longer in the store: its weights were collected")
            promotion = await self._move(version, decided_by, reason, override)
        id = f"{self._run}.promotion.{promotion.at_ns}"
        await self._bus.publish(POLICY_PROMOTED, promotion, id=id, run=self._run)
        return promotion

    async def _move(self, version: PolicyVersion, decided_by: str, reason: str, override: bool) -> Promotion:
        while True:
            now, revision = await self._entry()
            if now is not None and now.policy == version.policy:
                return now
            check_promotion(version.policy, now.policy if now else None, override=override)
            promotion = Promotion(
                run=self._run,
                version=version,
                previous=now.policy if now else None,
                decided_by=decided_by,
                reason=reason,
                override=override,
                at_ns=time.time_ns(),
            )
            value = codec.encode(promotion)
            if now is None:
                moved = await self._bus.create(self._key, value)
            else:
                moved = await self._bus.update(self._key, value, revision)
            if moved is not None:
                return promotion

    async def follow(self, consumer: str) -> AsyncGenerator[PolicyVersion, None]:
        """The policy that serves now, then each that takes its place; those that were overtaken meanwhile are skipped.

        The key alone says what serves, announcements only wake. A server that is away is waited for, however long it
        takes. Close it (`contextlib.aclosing`) when you stop early.
        """
        serving: PolicyRef | None = None
        read = self._bus.read(POLICY_PROMOTED, kind=Promotion, last=True, consumer=consumer, run=self._run)
        async with aclosing(read) as announcements:
            while True:
                promotion = await self._bus.at_last(self.current)
                if promotion is not None and promotion.policy != serving:
                    serving = promotion.policy
                    yield promotion.version
                await anext(announcements)

    async def _entry(self) -> tuple[Promotion | None, int]:
        entry = await self._bus.get(self._key)
        if entry is None:
            return None, 0
        try:
            return codec.decode(memoryview(entry[0]), Promotion), entry[1]
        except ContractError as error:
            raise InvalidMessage(f"key {self._key}: {error}") from error


def check_promotion(policy: PolicyRef, serving: PolicyRef | None, *, override: bool) -> None:
    """Raise `PromotionRefused` unless `policy` may take the place of `serving`. Pure."""
    if serving is None or serving == policy:
        return
    order, serves = (policy.generation, policy.version), (serving.generation, serving.version)
    if order == serves:
        raise PromotionRefused(f"{_name(policy)} serves already, with other weights")
    if order < serves and not override:
        raise PromotionRefused(
            f"{_name(policy)} is older than what serves, {_name(serving)}: going back takes a person"
        )


def _name(policy: PolicyRef) -> str:
    return f"version {policy.version} of generation {policy.generation}"
