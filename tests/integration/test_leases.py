"""Leases between racing, releasing and frozen holders, with a bucket whose leases expire quickly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from infra.bootstrap import bucket_config, ensure_stream
from infra.bus import Bus
from infra.errors import UserError
from infra.leases import Lease, acquire, current_generation
from infra.server import EmbeddedServer
from tests.integration.helpers import until

BUCKET, TTL = "test-leases", 1.5


@pytest.fixture
def key(run: str) -> str:
    return f"{run}.learner"


async def take(bus: Bus, key: str, holder: str, *, wait: float = 0.0) -> Lease:
    return await acquire(bus, key, holder, wait=wait, bucket=BUCKET, ttl=TTL)


@pytest.fixture(autouse=True)
async def bucket(bus: Bus) -> None:
    await ensure_stream(bus, bucket_config(BUCKET, ttl=TTL), create=True)


async def test_every_acquisition_is_a_new_generation(bus: Bus, key: str) -> None:
    assert await current_generation(bus, key) == 0
    for generation in (1, 2, 3):
        lease = await take(bus, key, "one")
        assert lease.generation == generation == await current_generation(bus, key)
        await lease.release()


@pytest.mark.parametrize("holder", ["two", "one"], ids=["another", "the same name"])
async def test_a_held_lease_is_refused_with_the_holders_name(bus: Bus, key: str, holder: str) -> None:
    lease = await take(bus, key, "one")
    with pytest.raises(UserError, match=r"is held by one, and was for 0.2 s"):
        await take(bus, key, holder, wait=0.2)
    assert not lease.lost.is_set() and await current_generation(bus, key) == 1
    await lease.release()


async def test_it_is_kept_beyond_its_expiry_by_renewing(bus: Bus, key: str) -> None:
    lease = await take(bus, key, "one")
    with pytest.raises(UserError):
        await take(bus, key, "two", wait=1.5 * TTL)
    assert not lease.lost.is_set()
    await lease.release()


async def test_of_two_racing_holders_one_wins_and_the_other_waits(bus: Bus, key: str) -> None:
    async def life(name: str) -> int:
        lease = await take(bus, key, name, wait=20)
        held.append(name)
        assert len(held) == 1
        await asyncio.sleep(0.1)
        assert not lease.lost.is_set()
        held.remove(name)
        await lease.release()
        return lease.generation

    held: list[str] = []
    assert sorted(await asyncio.gather(*(life(f"holder-{i}") for i in range(4)))) == [1, 2, 3, 4]


async def test_a_server_away_for_longer_than_the_lease_costs_the_holder_nothing(
    bus: Bus, server: EmbeddedServer, key: str
) -> None:
    lease = await take(bus, key, "one")
    server.kill()
    await asyncio.sleep(1.3 * TTL)
    server.start()
    assert await until(lambda: bus.connected)
    await asyncio.sleep(TTL)
    assert not lease.lost.is_set()
    with pytest.raises(UserError, match="held by one"):
        await take(bus, key, "two")
    await lease.release()
    second = await take(bus, key, "two")
    assert second.generation == 2
    await second.release()


FROZEN = """
import asyncio, sys
import structlog
from infra.bus import Bus
from infra.settings import NatsSettings
from tests.integration.test_leases import take

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

async def main(url, user, password, key):
    bus = await Bus.connect(NatsSettings(url=url, user=user, password=password), "frozen")
    lease = await take(bus, key, "frozen")
    print("held", lease.generation, flush=True)
    await lease.lost.wait()
    print("lost", flush=True)
    await lease.release()
    await bus.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_frozen_holder_loses_to_the_next_and_notices(bus: Bus, server: EmbeddedServer, key: str) -> None:
    settings = server.settings
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FROZEN, settings.url, settings.user, settings.password.get_secret_value(), key,
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2], env={"PYTHONPATH": "."},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"held 1\n"
        os.kill(process.pid, signal.SIGSTOP)
        lease = await take(bus, key, "next", wait=10)
        assert lease.generation == 2
        os.kill(process.pid, signal.SIGCONT)
        async with asyncio.timeout(10):
            assert await process.stdout.readline() == b"lost\n"
            assert await process.wait() == 0
        assert not lease.lost.is_set() and await current_generation(bus, key) == 2
        await lease.release()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
