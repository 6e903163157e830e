"""A real nats-server for all integration tests; every test has a run name of its own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from infra.bootstrap import bootstrap
from infra.bus import Bus
from infra.server import EmbeddedServer


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path_factory.mktemp("nats"))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def server(shared_server: EmbeddedServer) -> EmbeddedServer:
    """Running, with an empty catalogue or what earlier tests left; a test may kill and start it."""
    shared_server.start()
    return shared_server


@pytest.fixture
def run() -> str:
    return f"t-{secrets.token_hex(4)}"


@pytest.fixture
async def bus(server: EmbeddedServer, run: str) -> AsyncIterator[Bus]:
    """Connected, with all streams and this run's consumers of the pool `default`."""
    bus = await Bus.connect(server.settings, "test")
    try:
        await bootstrap(bus, run, ["default"], create=True)
        yield bus
    finally:
        await bus.close()
