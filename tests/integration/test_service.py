"""The life cycle of a service process against a real NATS server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from contracts import subjects
from contracts.messages import Heartbeat
from infra.bus import Bus
from infra.server import EmbeddedServer

LIMIT = 30.0  # seconds after which a test has failed

SERVICE = """
import asyncio, json, sys
from pathlib import Path
from infra.errors import UserError
from infra.service import Service, serve

async def main(service: Service) -> None:
{body}

serve("generator", main)
"""

POLITE = """
    service.ready("sampling")
    await service.stopping.wait()
    await asyncio.sleep(0.2)
    Path("drained").touch()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


class Process:
    """A service process with a `main` of the test's choice."""

    def __init__(self, folder: Path, server: EmbeddedServer | None, body: str, **settings: str) -> None:
        nats = server.settings if server else None
        self.log = folder / "log"
        self.run = f"t{time.time_ns()}"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")},
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "TAILRACE_RUN__NAME": self.run,
            "TAILRACE_SERVICE__INSTANCE": "generator-7",
            "TAILRACE_SERVICE__HEARTBEAT_SECONDS": "0.2",
            "TAILRACE_SERVICE__DRAIN_SECONDS": "5",
            **({"TAILRACE_NATS__URL": nats.url, "TAILRACE_NATS__USER": nats.user} if nats else {}),
            **({"TAILRACE_NATS__PASSWORD": nats.password.get_secret_value()} if nats else {}),
            **settings,
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVICE.format(body=body)], cwd=folder, env=environment, stderr=log, stdout=log
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(LIMIT)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def until(self, part: str) -> None:
        deadline = time.monotonic() + LIMIT
        while part not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def get(self, path: str) -> tuple[int, str]:
        self.until('"health_port"')
        port = self.text.split('"health_port": ')[1].split(",")[0].split("}")[0]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LIMIT) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT)


def test_sigterm_drains_and_exits_with_0(tmp_path: Path, server: EmbeddedServer) -> None:
    with Process(tmp_path, server, POLITE) as service:
        service.until('"ready"')
        assert service.stop() == 0
        assert (tmp_path / "drained").exists()
        assert "Traceback" not in service.text


def test_draining_has_a_limit(tmp_path: Path, server: EmbeddedServer) -> None:
    body = "    service.ready('busy')\n    await asyncio.sleep(600)"
    with Process(tmp_path, server, body, TAILRACE_SERVICE__DRAIN_SECONDS="0.3") as service:
        service.until('"ready"')
        assert service.stop() == 0
        assert "drain took too long" in service.text


def test_a_second_sigterm_ends_it_at_once(tmp_path: Path, server: EmbeddedServer) -> None:
    body = "    service.ready('busy')\n    await asyncio.sleep(600)"
    with Process(tmp_path, server, body, TAILRACE_SERVICE__DRAIN_SECONDS="600") as service:
        service.until('"ready"')
        service.process.send_signal(signal.SIGTERM)
        service.until('"draining"')
        assert service.stop() == 128 + signal.SIGTERM


def test_it_is_done_when_main_returns(tmp_path: Path, server: EmbeddedServer) -> None:
    with Process(tmp_path, server, "    service.ready()") as service:
        assert service.process.wait(LIMIT) == 0


def test_readiness_and_liveness(tmp_path: Path, server: EmbeddedServer) -> None:
    body = """
    service.not_ready("loading the model")
    while not Path("go").exists():
        await asyncio.sleep(0.02)
    service.ready("sampling")
    await service.stopping.wait()
"""
    with Process(tmp_path, server, body, TAILRACE_SERVICE__LIVENESS_SECONDS="1") as service:
        assert service.get("/readyz") == (503, "loading the model\n")
        assert service.get("/healthz")[0] == 200
        (tmp_path / "go").touch()
        service.until('"sampling"')
        assert service.get("/readyz") == (200, "sampling\n")
        assert service.get("/nowhere")[0] == 404
        deadline = time.monotonic() + LIMIT
        while service.get("/healthz")[0] == 200:  # this main never beats
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert service.get("/healthz")[0] == 503
        assert service.stop() == 0


async def test_heartbeats_are_on_the_bus(tmp_path: Path, server: EmbeddedServer) -> None:
    with Process(tmp_path, server, POLITE) as service:
        service.until('"ready"')
        bus = await Bus.connect(server.settings, "test")
        beats: list[Heartbeat] = []
        records = bus.read(subjects.HEARTBEAT, kind=Heartbeat, consumer="test", run=service.run)
        async with aclosing(records):
            async for received in records:
                beats.append(received.message)
                if beats[-1].state == "ready" and service.process.poll() is None:
                    service.process.send_signal(signal.SIGTERM)
                if beats[-1].state == "stopped":
                    break
        await bus.close()
        assert service.process.wait(LIMIT) == 0
    assert {beat.instance for beat in beats} == {"generator-7"}
    assert beats[-1].service == "generator"
    assert {"ready", "draining", "stopped"} <= {beat.state for beat in beats}


FAILURES = {
    "a user error": (
        "    raise UserError('no such thing; get one')",
        2,
        "tailrace generator: no such thing; get one\n",
    ),
    "a user error in a task group": (
        "    async with asyncio.TaskGroup() as group:\n        group.create_task(wrong())\n"
        "async def wrong():\n    raise UserError('no such thing')",
        2,
        "tailrace generator: no such thing\n",
    ),
    "a bug": ("    raise KeyError('x')", 1, "KeyError"),
    "a bug in the background": (
        "    service.spawn(wrong(), 'watch')\n    await asyncio.sleep(600)\n"
        "async def wrong():\n    raise KeyError('x')",
        1,
        "in the background task watch",
    ),
}


@pytest.mark.parametrize(("body", "code", "text"), FAILURES.values(), ids=FAILURES)
def test_failures(tmp_path: Path, server: EmbeddedServer, body: str, code: int, text: str) -> None:
    with Process(tmp_path, server, body) as service:
        assert service.process.wait(LIMIT) == code
        assert text in service.text
        assert ("Traceback" in service.text) is (code == 1)


USER_ERRORS = {
    "no server": ({"TAILRACE_NATS__URL": "nats://127.0.0.1:9", "TAILRACE_NATS__CONNECT_TIMEOUT": "0.5"}, "127.0.0.1:9"),
    "wrong password": ({"TAILRACE_NATS__PASSWORD": "x"}, "nats.password"),
    "wrong setting": ({"TAILRACE_GENERATOR__DEVISE": "cpu"}, "TAILRACE_GENERATOR__DEVISE"),
    "port taken": ({"TAILRACE_SERVICE__HTTP_HOST": "192.0.2.1"}, "service.http_port"),
    "no such file": ({"TAILRACE_CONFIG": "nowhere.toml"}, "nowhere.toml"),
}


@pytest.mark.parametrize(("settings", "part"), USER_ERRORS.values(), ids=USER_ERRORS)
def test_what_a_person_got_wrong_is_one_sentence(
    tmp_path: Path, server: EmbeddedServer, settings: dict[str, str], part: str
) -> None:
    with Process(tmp_path, server, POLITE, **settings) as service:
        assert service.process.wait(LIMIT) == 2
        last = service.text.splitlines()[-1]
        assert last.startswith("tailrace generator: ")
        assert part in last
        assert "Traceback" not in service.text


def test_sigterm_while_connecting(tmp_path: Path) -> None:
    settings = {"TAILRACE_NATS__URL": "nats://127.0.0.1:9", "TAILRACE_NATS__CONNECT_TIMEOUT": "600"}
    with Process(tmp_path, None, POLITE, **settings) as service:
        service.until("connection trouble")
        assert service.stop() == 0


@pytest.mark.parametrize("service", ["generator", "learner"])
def test_every_service_prints_its_settings(service: str) -> None:
    environment = {**os.environ, f"TAILRACE_{service.upper()}__POOL": "special"}
    command = [sys.executable, "-m", service, "--print-config"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    assert 'pool = "special"' in shown.split(f"[{service}]")[1]
