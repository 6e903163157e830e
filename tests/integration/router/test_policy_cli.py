"""`tailrace route policy`, as a person uses it: without a server, and beside a router that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.bus import Bus
from infra.server import EmbeddedServer
from infra.settings import NatsSettings
from router.policy.calibration import Calibration
from router.policy.model import RoutingModel, cold_start
from router.policy.sharing import share
from router.policy.store import PolicyStore
from router.policy.versions import Document


@pytest.fixture(scope="module")
def model() -> RoutingModel:
    return cold_start()


def opened(directory: Path, model: RoutingModel) -> PolicyStore:
    return PolicyStore(directory / "policies", model, RoutingModel.load)


def document(model: RoutingModel, weight: float) -> Document:
    return Document(model.version, Calibration({"compact": {"bias": weight}}))


NOWHERE = NatsSettings(url="nats://127.0.0.1:1", connect_timeout=0.2)


def policy(directory: Path, *arguments: str, nats: NatsSettings = NOWHERE, run: str = "t") -> tuple[int, str]:
    """Exit code and output of `tailrace route policy …`."""
    command = [sys.executable, "-c", "from infra.cli.main import main; main()", "route", "policy", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    environment |= {
        "COLUMNS": "250", "TAILRACE_RUN__NAME": run, "TAILRACE_ROUTER__DIRECTORY": str(directory),
        "TAILRACE_NATS__URL": nats.url, "TAILRACE_NATS__CONNECT_TIMEOUT": str(nats.connect_timeout),
        "TAILRACE_NATS__USER": nats.user, "TAILRACE_NATS__PASSWORD": nats.password.get_secret_value(),
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=directory)
    return done.returncode, done.stdout + done.stderr


def test_versions_are_listed_promoted_and_rolled_back_without_a_server(tmp_path: Path, model: RoutingModel) -> None:
    store = opened(tmp_path, model)
    version = store.try_out(document(model, 1.0), "fitted to 200 judged answers")
    code, said = policy(tmp_path, "promote", version)
    assert (code, said.split(",")[0]) == (0, f"{version} is in force here")
    store.refresh()
    assert store.policy.version == version
    (tmp_path / "policies" / f"{version}.json").write_bytes(b"{}")
    code, said = policy(tmp_path, "list")
    assert code == 0 and f"{version} damaged" in " ".join(said.split())
    assert "promoted by hand" in said and f"{store.shipped.version} active" in " ".join(said.split())
    code, said = policy(tmp_path, "promote", "0123456789abcdef")
    assert code == 2 and "0123456789abcdef" in said and "policy list" in said and "Traceback" not in said


async def test_a_rollback_by_hand_reaches_the_routers_of_the_run(
    bus: Bus, server: EmbeddedServer, run: str, tmp_path: Path, model: RoutingModel
) -> None:
    router = opened(tmp_path / "router", model)
    first = router.try_out(document(model, 1.0), "a test")
    router.promote(first, "a test")
    router.promote(router.try_out(document(model, 2.0), "a test"), "a test")
    await share(bus, run, router)
    elsewhere = tmp_path / "elsewhere"  # the folder of another machine
    elsewhere.mkdir()
    code, said = policy(elsewhere, "rollback", nats=server.settings, run=run)
    assert (code, said) == (0, f"{first} is in force\n")
    await share(bus, run, router)
    assert router.policy.version == first
