"""The outbox before a real server that goes away and comes back, and the process being killed meanwhile."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgpack
import msgspec

from contracts.examples import EXAMPLES
from contracts.messages import Feedback, RouteDecision, RouteOutcome
from contracts.subjects import FEEDBACK, ROUTE_DECISION, ROUTE_OUTCOME, Channel
from infra.bus import Bus
from infra.server import EmbeddedServer
from router.outbox import Outbox
from router.spool import Spool
from tests.integration.helpers import until

DECISION: RouteDecision = EXAMPLES["route_decision"]  # type: ignore[assignment]
OUTCOME: RouteOutcome = EXAMPLES["route_outcome"]  # type: ignore[assignment]
OPINION: Feedback = EXAMPLES["feedback"]  # type: ignore[assignment]


def decision(number: int, run: str) -> RouteDecision:
    return msgspec.structs.replace(DECISION, id=f"d{number}", run=run)


def outcome(number: int, run: str) -> RouteOutcome:
    return msgspec.structs.replace(OUTCOME, request_id=f"r{number}", run=run)


@asynccontextmanager
async def outbox(bus: Bus, directory: Path, run: str, **settings: int) -> AsyncIterator[Outbox]:
    made = Outbox(bus, directory, run, **settings)
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        await made.close()
        await running


async def stored(bus: Bus, channel: Channel, run: str) -> list:
    async with asyncio.timeout(15):
        return [got.message async for got in bus.read(channel, consumer="test", follow=False, run=run)]


async def test_nothing_is_lost_and_nothing_comes_twice_while_the_server_is_away(
    bus: Bus, server: EmbeddedServer, run: str, tmp_path: Path
) -> None:
    async with outbox(bus, tmp_path, run) as box:
        for number in range(300):
            if number == 100:
                server.kill()
            if number == 200:
                await asyncio.sleep(0.5)
                assert box.backlog > 0
            started = time.perf_counter()
            box.put(ROUTE_DECISION, decision(number, run), id=f"d{number}")
            box.put(ROUTE_OUTCOME, outcome(number, run), id=f"r{number}")
            assert time.perf_counter() - started < 0.1  # whoever asks does not notice
            await asyncio.sleep(0.001)
        server.start()
        assert await until(lambda: box.backlog == 0, seconds=20)
        box.put(FEEDBACK, msgspec.structs.replace(OPINION, run=run), id=OPINION.id)
    assert box.lost == 0
    assert [each.id for each in await stored(bus, ROUTE_DECISION, run)] == [f"d{number}" for number in range(300)]
    assert [each.request_id for each in await stored(bus, ROUTE_OUTCOME, run)] == [f"r{n}" for n in range(300)]
    assert [each.id for each in await stored(bus, FEEDBACK, run)] == [OPINION.id]


async def test_what_is_spooled_when_the_service_ends_is_published_by_the_next_one(
    bus: Bus, server: EmbeddedServer, run: str, tmp_path: Path
) -> None:
    server.kill()
    assert await until(lambda: not bus.connected)
    async with outbox(bus, tmp_path, run) as box:
        for number in range(50):
            box.put(ROUTE_OUTCOME, outcome(number, run), id=f"r{number}")
    server.start()
    async with outbox(bus, tmp_path, run) as box:
        assert box.backlog > 0
        assert await until(lambda: box.backlog == 0, seconds=20)
    assert [each.request_id for each in await stored(bus, ROUTE_OUTCOME, run)] == [f"r{n}" for n in range(50)]


async def test_more_than_the_spool_holds_is_counted_and_the_oldest_stay(
    bus: Bus, server: EmbeddedServer, run: str, tmp_path: Path
) -> None:
    server.kill()
    assert await until(lambda: not bus.connected)
    async with outbox(bus, tmp_path, run, spool_bytes=9000) as box:
        for number in range(20):
            box.put(ROUTE_OUTCOME, outcome(number, run), id=f"r{number}")
        assert await until(lambda: box.lost > 0)
        kept = 20 - box.lost
        assert 0 < kept < 20
        server.start()
        assert await until(lambda: box.backlog == 0, seconds=20)
    assert [each.request_id for each in await stored(bus, ROUTE_OUTCOME, run)] == [f"r{n}" for n in range(kept)]


async def test_a_message_that_breaks_its_contract_costs_itself_only(bus: Bus, run: str, tmp_path: Path) -> None:
    async with outbox(bus, tmp_path, run) as box:
        box.put(ROUTE_OUTCOME, msgspec.structs.replace(outcome(0, run), cost=1), id="bad")
        box.put(ROUTE_OUTCOME, outcome(1, run), id="good")
    assert box.lost == 1
    assert [each.request_id for each in await stored(bus, ROUTE_OUTCOME, run)] == ["r1"]


async def test_records_of_another_version_cost_themselves_only(bus: Bus, run: str, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "outbox", 10_000)
    foreign = [5, None, [1, [2], b""], ["route_outcome", ["x"], b""], ["unheard_of", "x", b""], {"a": 1}]
    assert spool.append([msgpack.packb(each) for each in foreign] + [b"\xc1"]) == 7
    spool.close()
    async with outbox(bus, tmp_path, run) as box:
        box.put(ROUTE_OUTCOME, outcome(1, run), id="good")
        assert await until(lambda: box.backlog == 0 and box.lost == 7)
    assert [each.request_id for each in await stored(bus, ROUTE_OUTCOME, run)] == ["r1"]


KILLED = """
import asyncio, sys, structlog
from pathlib import Path
from infra.bus import Bus
from infra.settings import NatsSettings
from contracts.subjects import ROUTE_OUTCOME
from router.outbox import Outbox
from router.spool import Spool
from tests.integration.router.test_outbox import outcome

async def main(url, user, password, run, directory):
    bus = await Bus.connect(NatsSettings(url=url, user=user, password=password), "killed")
    box = Outbox(bus, Path(directory), run)
    running = asyncio.create_task(box.run())
    number = 0
    while True:
        box.put(ROUTE_OUTCOME, outcome(number, run), id=f"r{number}")
        print(number, flush=True)
        number += 1
        await asyncio.sleep(0.002)

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_kill_loses_the_last_moment_at_most(bus: Bus, server: EmbeddedServer, run: str, tmp_path: Path) -> None:
    """Also when the server is away at that time."""
    nats = server.settings
    command = [sys.executable, "-c", KILLED, nats.url, nats.user, nats.password.get_secret_value(), run, str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    said: list[tuple[float, int]] = []

    async def read_to(number: int) -> None:
        assert process.stdout is not None
        while not said or said[-1][1] < number:
            said.append((time.monotonic(), int(await process.stdout.readline())))

    try:
        async with asyncio.timeout(30):
            await read_to(150)
            server.kill()
            await read_to(600)
    finally:
        process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        await process.wait()
        server.start()
    async with outbox(bus, tmp_path, run) as box:
        assert await until(lambda: box.backlog == 0, seconds=20)
    numbers = [int(each.request_id[1:]) for each in await stored(bus, ROUTE_OUTCOME, run)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > max(number for at, number in said if at < killed - 0.5) > 150
