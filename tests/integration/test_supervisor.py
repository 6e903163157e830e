"""The supervisor with real processes: restarts, ends, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.supervisor import Backoff, Child, Supervisor

LIMIT = 30.0  # seconds after which a test has failed


def child(instance: str, code: str) -> Child:
    return Child(instance.split("-")[0], instance, (sys.executable, "-c", code))


def supervisor(logs: Path, *kids: Child, stop_seconds: float = 10.0) -> tuple[Supervisor, list[str]]:
    said: list[str] = []
    made = Supervisor(
        kids, completes="learner", environment=dict(os.environ), logs=logs, stop_seconds=stop_seconds, say=said.append
    )
    return made, said


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - the condition is the state of another process
            await asyncio.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


FOREVER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


async def test_the_run_ends_when_the_learner_is_done(tmp_path: Path) -> None:
    made, _ = supervisor(tmp_path, child("learner-1", "import time; time.sleep(0.3)"), child("generator-1", FOREVER))
    running = asyncio.create_task(made.run())
    await until(lambda: len(made.pids) == 2)
    generator = made.pids["generator-1"]
    await asyncio.wait_for(running, LIMIT)
    assert gone(generator)
    assert made.pids == {}


async def test_a_process_that_dies_is_started_again_and_its_log_continues(tmp_path: Path) -> None:
    made, said = supervisor(tmp_path, child("learner-1", FOREVER), child("generator-1", FOREVER))
    running = asyncio.create_task(made.run())
    log = tmp_path / "generator-1.log"
    await until(lambda: log.exists() and log.read_text() == "up\n")
    first = made.pids["generator-1"]
    os.kill(first, signal.SIGKILL)
    await until(lambda: log.read_text() == "up\nup\n")
    assert made.pids["generator-1"] != first
    assert len(said) == 1
    assert "generator-1 was killed by SIGKILL; restarting in 0.5 s" in said[0]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_one_that_is_done_is_left_alone(tmp_path: Path) -> None:
    made, said = supervisor(
        tmp_path, child("generator-1", "print('done')"), child("learner-1", "import time; time.sleep(1)")
    )
    await asyncio.wait_for(made.run(), LIMIT)
    assert (tmp_path / "generator-1.log").read_text() == "done\n"
    assert said == []


async def test_a_user_error_ends_the_run_with_its_sentence(tmp_path: Path) -> None:
    (tmp_path / "learner-1.log").write_text("tailrace learner: an older error\n")
    wrong = "import sys; print('noise'); print('tailrace learner: no such model', file=sys.stderr); sys.exit(2)"
    made, _ = supervisor(tmp_path, child("learner-1", wrong), child("generator-1", FOREVER))
    running = asyncio.create_task(made.run())
    with pytest.raises(UserError, match=r"^no such model$"):
        await asyncio.wait_for(running, LIMIT)
    assert made.pids == {}


async def test_a_user_error_of_one_that_was_healthy_may_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works for a while, dies, finds no server when it comes back, and then does."""
    monkeypatch.setattr(Backoff, "HEALTHY", 0.0)
    lives = tmp_path / "lives"
    code = (
        f"import pathlib, sys; lives = pathlib.Path({str(lives)!r})\n"
        "before = len(lives.read_text()) if lives.exists() else 0\n"
        "lives.write_text('x' * (before + 1))\n"
        "if before == 1: print('tailrace learner: no server', file=sys.stderr)\n"
        "sys.exit([1, 2, 0][before])"
    )
    made, said = supervisor(tmp_path, child("learner-1", code), child("generator-1", FOREVER))
    await asyncio.wait_for(made.run(), LIMIT)
    assert lives.read_text() == "xxx"
    assert "exited with code 2 (no server); restarting" in said[1]


async def test_cancellation_stops_all_and_kills_the_stubborn(tmp_path: Path) -> None:
    made, said = supervisor(tmp_path, child("learner-1", FOREVER), child("generator-1", STUBBORN), stop_seconds=0.3)
    running = asyncio.create_task(made.run())
    await until(lambda: all((tmp_path / f"{name}.log").exists() for name in ("learner-1", "generator-1")))
    await until(lambda: all((tmp_path / f"{name}.log").read_text() for name in ("learner-1", "generator-1")))
    pids = list(made.pids.values())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, LIMIT)
    assert all(gone(pid) for pid in pids)
    assert any("killed" in sentence for sentence in said)


async def test_helpers_of_a_process_that_dies_do_not_survive_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(helper.pid, flush=True); time.sleep(600)"
    )
    made, _ = supervisor(tmp_path, child("learner-1", FOREVER), child("generator-1", code))
    running = asyncio.create_task(made.run())
    log = tmp_path / "generator-1.log"
    await until(lambda: log.exists() and log.read_text().endswith("\n"))
    helper = int(log.read_text())
    os.kill(made.pids["generator-1"], signal.SIGKILL)
    await until(lambda: gone(helper))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux kills orphans")
def test_processes_do_not_survive_the_supervisor(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, pathlib, sys
from infra.supervisor import Child, Supervisor
kids = [Child("learner", "learner-1", (sys.executable, "-c", "import time; time.sleep(600)"))]
made = Supervisor(kids, completes="learner", environment=dict(os.environ), logs=pathlib.Path({str(tmp_path)!r}),
                  stop_seconds=1.0, say=print)
async def main():
    running = asyncio.create_task(made.run())
    while not made.pids:
        await asyncio.sleep(0.02)
    print(made.pids["learner-1"], flush=True)
    await running
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + LIMIT
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
