"""`tailrace run` and `tailrace status` as people use them: a whole, very small run with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.server import EmbeddedServer

LIMIT = 120.0  # seconds after which a test has failed

RUN = """
[run]
name = "small"
environment = "reverse-text"
[processes]
learner = 1
generator = 1
[learner]
model = "tiny"
steps = {steps}
groups_per_step = 2
group_size = 2
precision = "fp32"
threads = 1
[learner.evaluation]
prompts = 4
[generator]
precision = "fp32"
threads = 1
"""


def environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    return ours | {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from infra.cli.main import main; main()", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=LIMIT)[0]
    finally:
        process.kill()


def until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + LIMIT
    while not (found := condition()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_run_from_start_to_summary_and_on(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RUN.format(steps=2))
    process = start(tmp_path, "run", "small.toml")
    text = finish(process)
    assert process.returncode == 0, text
    folder = tmp_path / "runs" / "small"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["eval_items"], summary["duplicates_trained"]) == (2, 4, 0)
    assert summary["rollouts_trained"] == 8
    assert summary["staleness_max"] <= summary["staleness_bound"] == 4
    assert 0 <= summary["learner_idle_ratio"] <= 1
    assert summary["mismatches"] == []
    assert "held-out accuracy" in text
    assert not (folder / "connection.toml").exists()
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [
        "generator-1.log", "learner-1.log", "supervisor.log",
    ]  # fmt: skip

    status = start(tmp_path, "status")
    assert "run small is finished" in finish(status)
    assert status.returncode == 0

    export = start(tmp_path, "export", "exported")
    assert "version 2 written to exported" in finish(export)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
        path.name for path in (tmp_path / "exported").iterdir()
    }

    (tmp_path / "small.toml").write_text(RUN.format(steps=3))
    again = start(tmp_path, "run", "small.toml", "--run-dir", "runs/small")
    assert finish(again) and again.returncode == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["learner_generations"], summary["duplicates_trained"]) == (3, 2, 0)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_status_shows_a_run_and_an_interrupt_stops_all_of_it(tmp_path: Path, signum: int) -> None:
    (tmp_path / "small.toml").write_text(RUN.format(steps=100_000))
    process = start(tmp_path, "run", "small.toml")
    folder = tmp_path / "runs" / "small"
    logs = [folder / "logs" / f"{name}.log" for name in ("learner-1", "generator-1")]
    pids = until(lambda: all(log.exists() for log in logs) and _pids(logs), process)
    server = int(next(iter((folder / "nats").glob("*.ports"))).stem.rpartition("_")[2])
    if signum == signal.SIGINT:
        until(lambda: '"policy loaded"' in logs[1].read_text(), process)
        status = start(tmp_path, "status", "--once")
        text = finish(status)
        assert status.returncode == 0, text
        for part in ("run small", "generation 1", "generator-1", "learner-1", "tasks train default"):
            assert part in text
        export = start(tmp_path, "export", "exported", "--published")
        assert "written to exported" in finish(export)
        assert export.returncode == 0
    process.send_signal(signum)
    text = finish(process)
    assert process.returncode == 128 + signum, text
    assert "--run-dir runs/small" in text
    assert "Traceback" not in text
    for pid in (*pids, server):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_run_without_a_learner_has_no_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RUN.format(steps=1).replace("learner = 1\n", ""))
    process = start(tmp_path, "run", "small.toml")
    log = tmp_path / "runs" / "small" / "logs" / "generator-1.log"
    until(lambda: log.exists() and _pids([log]), process)
    process.send_signal(signal.SIGINT)
    text = finish(process)
    assert process.returncode == 130, text
    assert text.splitlines()[-1] == "stopped"
    assert "checkpoint" not in text


def _pids(logs: list[Path]) -> list[int]:
    """Process ids from the logs, once both services have started."""
    found = [re.search(r'"pid": (\d+)', log.read_text()) for log in logs]
    return [int(match[1]) for match in found if match] if all(found) else []


def test_a_service_that_cannot_start_ends_the_run_with_its_sentence(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RUN.format(steps=1).replace('"tiny"', '"no/such/folder"'))
    process = start(tmp_path, "run", "small.toml")
    text = finish(process)
    assert process.returncode == 2, text
    assert "no/such/folder" in text.splitlines()[-1]
    assert "Traceback" not in text


def test_with_a_server_of_its_own_choice_a_run_starts_none(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text("[nats]\nurl = 'nats://127.0.0.1:9'\nconnect_timeout = 0.5\n")
    process = start(tmp_path, "run", "small.toml")
    text = finish(process)
    assert process.returncode == 2
    assert "nats://127.0.0.1:9" in text
    assert not (tmp_path / "runs" / "default" / "nats").exists()


def test_bootstrap_makes_what_services_then_need_not(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    server.start()
    try:
        nats = server.settings
        (tmp_path / "run.toml").write_text(
            f"[nats]\nurl = '{nats.url}'\nuser = '{nats.user}'\npassword = '{nats.password.get_secret_value()}'\n"
            "manage_streams = false\n"
        )
        status = start(tmp_path, "run", "run.toml")
        assert "does not exist on the NATS server" in finish(status)
        assert status.returncode == 2
        for _ in range(2):
            bootstrap = start(tmp_path, "bootstrap", "run.toml")
            assert "streams and consumers of run default are ready" in finish(bootstrap)
            assert bootstrap.returncode == 0
    finally:
        server.stop()
