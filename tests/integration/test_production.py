"""Which policy serves: who may decide, what follows from it, and what is kept for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import aclosing
from typing import Any

import pytest

from contracts.messages import PolicyVersion, Promotion
from contracts.policies import TensorSpec
from contracts.subjects import POLICY_PROMOTED
from infra.bus import Bus
from infra.policies import PolicyStore
from infra.production import PromotionRefused
from infra.server import EmbeddedServer

WHO: dict[str, Any] = {"decided_by": "test", "reason": "because"}


async def publish(store: PolicyStore, version: int, *, generation: int = 1) -> PolicyVersion:
    data = memoryview(bytes(f"weights {generation} {version}", "ascii"))
    bundle = await store.put_bundle({"config.json": b"{}"})
    tensors = [TensorSpec(name="w", dtype="uint8", shape=[data.nbytes], offset=0)]
    return await store.publish(
        generation=generation, version=version, data=data, tensors=tensors, bundle=bundle, parent=None
    )


async def announced(bus: Bus, run: str) -> list[Promotion]:
    read = bus.read(POLICY_PROMOTED, kind=Promotion, follow=False, consumer="test", run=run)
    return [received.message async for received in read]


async def test_a_promotion_moves_the_head_and_is_announced_once(bus: Bus, run: str) -> None:
    store = PolicyStore(bus, run)
    assert await store.production.current() is None
    first, second = [await publish(store, version) for version in (0, 1)]
    made = await store.production.promote(first, **WHO)
    assert (made.policy, made.previous, made.override) == (first.policy, None, False)
    assert await store.production.promote(first, **WHO) == made, "said again, it is the same promotion"
    later = await PolicyStore(bus, run).production.promote(second, **WHO)
    assert later.previous == first.policy
    assert await store.production.current() == later
    assert await announced(bus, run) == [made, later]


async def test_only_a_person_goes_back(bus: Bus, run: str) -> None:
    store = PolicyStore(bus, run)
    old, new = await publish(store, 4), await publish(store, 5)
    restarted = await publish(store, 4, generation=2)
    await store.production.promote(new, **WHO)
    with pytest.raises(PromotionRefused, match="version 4 of generation 1 is older"):
        await store.production.promote(old, **WHO)
    back = await store.production.promote(old, override=True, **WHO)
    assert back.override and back.previous == new.policy
    await store.production.promote(restarted, **WHO)
    with pytest.raises(PromotionRefused, match="older"):
        await store.production.promote(new, **WHO)


async def test_of_two_that_decide_at_once_the_newer_policy_serves(bus: Bus, run: str) -> None:
    store, other = PolicyStore(bus, run), PolicyStore(bus, run)
    versions = [await publish(store, version) for version in range(6)]
    stores = [store, other] * 3
    decisions = [each.production.promote(version, **WHO) for each, version in zip(stores, versions, strict=True)]
    results = await asyncio.gather(*decisions, return_exceptions=True)
    refused = [result for result in results if isinstance(result, BaseException)]
    assert all(isinstance(error, PromotionRefused) for error in refused)
    current = await store.production.current()
    assert current is not None and current.policy == versions[-1].policy
    told = sorted(await announced(bus, run), key=lambda promotion: promotion.at_ns)
    assert [p.previous for p in told] == [None, *(p.policy for p in told[:-1])], "each took the place of the one before"


async def test_what_serves_is_kept_and_what_is_gone_cannot_serve(bus: Bus, run: str) -> None:
    store = PolicyStore(bus, run)
    first = await publish(store, 0)
    await store.production.promote(first, **WHO)
    for version in range(1, 5):
        await publish(store, version)
    await store.collect(keep=1)
    assert bytes(await store.fetch(first)) == b"weights 1 0"
    assert await store.get_bundle(first.bundle)
    gone = await store.find(2)
    assert gone is not None
    with pytest.raises(PromotionRefused, match="no longer in the store"):
        await store.production.promote(gone, **WHO)
    newest = await store.find(None)
    assert newest is not None and newest.policy.version == 4
    assert await store.find(9) is None


async def test_followers_take_over_each_promotion_and_those_back(bus: Bus, run: str) -> None:
    store, seen = PolicyStore(bus, run), asyncio.Queue[int]()
    old, new = await publish(store, 0), await publish(store, 1)

    async def follow() -> None:
        async with aclosing(PolicyStore(bus, run).production.follow("test")) as versions:
            async for version in versions:
                await seen.put(version.policy.version)

    following = asyncio.create_task(follow())
    await asyncio.sleep(0.2)
    assert seen.empty(), "what is published only does not serve"
    async with asyncio.timeout(20):
        for version in (old, new, old):
            await store.production.promote(version, override=True, **WHO)
            assert await seen.get() == version.policy.version
    following.cancel()
    await asyncio.wait({following})


def command(server: EmbeddedServer, run: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = server.settings
    environment = {
        **os.environ,
        "TAILRACE_NATS__URL": settings.url,
        "TAILRACE_NATS__USER": settings.user,
        "TAILRACE_NATS__PASSWORD": settings.password.get_secret_value(),
        "TAILRACE_RUN__NAME": run,
    }
    call = [sys.executable, "-c", "from infra.cli.main import main; main()", "promote", *arguments]
    return subprocess.run(call, env=environment, capture_output=True, text=True, timeout=60, check=False)


async def test_a_person_promotes_on_the_command_line(bus: Bus, run: str, server: EmbeddedServer) -> None:
    nothing = await asyncio.to_thread(command, server, run)
    assert nothing.returncode == 2 and f"run {run}: no policy is published there" in nothing.stderr
    store = PolicyStore(bus, run)
    for version in (0, 1):
        await store.production.promote(await publish(store, version), **WHO)
    back = await asyncio.to_thread(command, server, run, "--version", "0", "--reason", "it rambles")
    assert "version 0 serves production" in back.stdout and "in place of version 1" in back.stdout
    current = await store.production.current()
    assert current is not None and current.policy.version == 0
    assert current.override and current.reason == "it rambles" and current.decided_by
