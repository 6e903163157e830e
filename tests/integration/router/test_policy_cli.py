"""`tailrace route policy`, as a person uses it: without a server, and beside a router that runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infra.bus import Bus
from infra.cli.rundir import RunDirectory, write_run_file
from infra.server import EmbeddedServer
from infra.settings import NatsSettings, load
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


def policy(directory: Path, *arguments: str, nats: NatsSettings | None = NOWHERE, run: str = "t") -> tuple[int, str]:
    """Exit code and output of `tailrace route policy …`; without `nats` nothing says which server, run or folder."""
    command = [sys.executable, "-c", "from infra.cli.main import main; main()", "route", "policy", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    environment["COLUMNS"] = "250"
    if nats is not None:
        environment |= {
            "TAILRACE_RUN__NAME": run, "TAILRACE_ROUTER__DIRECTORY": str(directory),
            "TAILRACE_NATS__URL": nats.url, "TAILRACE_NATS__CONNECT_TIMEOUT": str(nats.connect_timeout),
            "TAILRACE_NATS__USER": nats.user, "TAILRACE_NATS__PASSWORD": nats.password.get_secret_value(),
        }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=directory)
    return done.returncode, done.stdout + done.stderr


def test_versions_are_listed_promoted_and_rolled_back_without_a_server(tmp_path: Path, model: RoutingModel) -> None:
    store = opened(tmp_path, model)
    version = store.try_out(document(model, 1.0), "fitted to 200 judged answers")
    code, said = policy(tmp_path, "promote", version)
    assert (code, said.split(";")[0]) == (0, f"{version} is in force here")
    assert NOWHERE.url in said  # who named a server is told what is wrong with it
    store.refresh()
    assert store.policy.version == version
    (tmp_path / "policies" / f"{version}.json").write_bytes(b"{}")
    code, said = policy(tmp_path, "list")
    assert code == 0 and f"{version} damaged" in " ".join(said.split())
    assert "promoted by hand" in said and f"{store.shipped.version} active" in " ".join(said.split())
    code, said = policy(tmp_path, "promote", "0123456789abcdef")
    assert code == 2 and "0123456789abcdef" in said and "policy list" in said and "Traceback" not in said
    assert "No such file" not in said


def test_the_folder_of_a_trained_model_is_added_and_its_version_promoted(tmp_path: Path, model: RoutingModel) -> None:
    trained = RoutingModel(model.arrays, model.outcomes, {"name": "another"})
    (tmp_path / "trained").mkdir()
    trained.save(tmp_path / "trained" / "model.safetensors")
    code, said = policy(tmp_path, "add", "trained")
    assert code == 0, said
    version = said.split()[0]
    code, said = policy(tmp_path, "promote", trained.version)
    assert (code, said.split(";")[0]) == (0, f"{version} is in force here")
    assert opened(tmp_path, model).policy.model.version == trained.version


def test_without_a_server_nothing_is_said_of_one_that_nobody_named(tmp_path: Path, model: RoutingModel) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 4222)) == 0:
            pytest.skip("a server answers at the default address")
    version = opened(tmp_path / "runs" / "router", model).try_out(document(model, 1.0), "a test")
    code, said = policy(tmp_path, "promote", version, nats=None)
    assert code == 0
    assert said == f"{version} is in force here; other routers take it over when one of this folder is next connected\n"
    code, said = policy(tmp_path, "promote", "0123456789abcdef", nats=None)
    assert code == 2 and "4222" not in said and said.count("\n") == 1


async def test_the_local_run_that_is_going_on_is_found(
    bus: Bus, server: EmbeddedServer, run: str, tmp_path: Path, model: RoutingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "given.toml").write_text(f'[run]\nname = "{run}"\n[router]\ndirectory = "books"\n')
    local = RunDirectory(tmp_path / "runs" / "local")
    local.path.mkdir(parents=True)
    write_run_file(local, load(tmp_path / "given.toml"))
    local.write_connection(run, server.settings, secrets=True)
    router = opened(tmp_path / "books", model)
    version = router.try_out(document(model, 1.0), "a test")
    code, said = policy(tmp_path, "promote", version, nats=None)
    assert (code, said) == (0, f"{version} is in force\n")
    elsewhere = opened(tmp_path / "elsewhere", model)
    await share(bus, run, elsewhere)
    assert elsewhere.policy.version == version


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
