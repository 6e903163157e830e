"""A service that starts without the server: what it asks of the bus fails at once, until the server is there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from contracts.examples import EXAMPLES
from contracts.messages import Heartbeat
from contracts.subjects import HEARTBEAT
from infra.bus import Bus, Unavailable
from infra.errors import UserError
from infra.server import EmbeddedServer
from infra.settings import NatsSettings
from tests.integration import test_service
from tests.integration.helpers import first, until

BEAT: Heartbeat = EXAMPLES["heartbeat"]  # type: ignore[assignment]

LATE = """
    service.ready("serving")
    await service.bus_ready()
    await service.bus.stream_info("ROUTES")
    Path("reached").touch()
    await service.stopping.wait()
"""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services of these tests do not wait for the bus."""
    script = test_service.SERVICE.replace('serve("generator", main)', 'serve("generator", main, bus_later=True)')
    monkeypatch.setattr(test_service, "SERVICE", script)


def test_a_service_is_ready_without_the_server_and_finds_it_later(tmp_path: Path, late: None) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    server.start()
    server.stop()
    try:
        with test_service.Process(tmp_path, server, LATE) as service:
            service.until('"ready"')
            assert service.get("/readyz") == (200, "serving; not connected to NATS\n")
            time.sleep(0.5)  # some heartbeats
            assert "heartbeat not published" not in service.text
            server.start()
            deadline = time.monotonic() + test_service.LIMIT
            while not (tmp_path / "reached").exists():
                assert service.process.poll() is None and time.monotonic() < deadline, service.text
                time.sleep(0.05)
            assert service.get("/readyz") == (200, "serving\n")
            server.stop()
            service.until("connection lost")
            assert service.get("/readyz") == (200, "serving; not connected to NATS\n")
            assert service.stop() == 0
            assert "Traceback" not in service.text
    finally:
        server.stop()


def test_a_service_that_never_finds_the_server_stops_when_told(tmp_path: Path, late: None) -> None:
    settings = {"TAILRACE_NATS__URL": "nats://127.0.0.1:9"}
    with test_service.Process(tmp_path, None, test_service.POLITE, **settings) as service:
        service.until('"ready"')
        assert service.stop() == 0
        assert "Traceback" not in service.text


async def test_before_the_first_connection_everything_fails_at_once_and_afterwards_works(
    tmp_path: Path, run: str
) -> None:
    server = EmbeddedServer(tmp_path)
    server.start()
    server.kill()
    bus = Bus.later(server.settings, "late")
    try:
        started = time.monotonic()
        with pytest.raises(Unavailable, match="has not been reached yet"):
            await bus.publish(HEARTBEAT, BEAT, id="1", run=run)
        for asked in (bus.stream_info("EVENTS"), bus.get("run"), bus.put("run", b"x"), bus.keys("*")):
            with pytest.raises(Unavailable, match="has not been reached yet"):
                await asked
        assert time.monotonic() - started < 1.0
        assert not bus.connected
        server.start()
        await asyncio.wait_for(bus.connection.reached(), 20)
        from infra.bootstrap import bootstrap

        await bootstrap(bus, run, [], create=True)
        await bus.publish(HEARTBEAT, BEAT, id="1", run=run)
        (got,) = await first(bus.read(HEARTBEAT, kind=Heartbeat, consumer="test", run=run), 1)
        assert got.message == BEAT
        server.kill()
        server.start()
        assert await until(lambda: bus.connected, seconds=20)
    finally:
        await bus.close()
        server.stop()


async def test_closing_before_the_server_was_reached_takes_no_time() -> None:
    bus = Bus.later(NatsSettings(url="nats://127.0.0.1:9"), "late")
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await bus.close()
    assert time.monotonic() - started < 3.0
    with pytest.raises(Unavailable):
        await bus.stream_info("EVENTS")


async def test_a_missing_credentials_file_is_said_at_once() -> None:
    with pytest.raises(UserError, match="no file nowhere"):
        Bus.later(NatsSettings(credentials=Path("nowhere.creds")), "late")
