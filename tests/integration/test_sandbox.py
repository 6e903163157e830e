"""The sandbox against what hostile text might do, with real processes on this host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from reasoning_gym.factory import create_dataset

from contracts.messages import Finish, Outcome
from infra.grading import Grader, entries
from infra.sandbox import Limits, Sandbox, SandboxCrash, SandboxTimeout
from infra.sandbox.folders import clear_abandoned
from tests.integration.hostile import HERE

SHORT = Limits(wall_seconds=0.5)
ROOT = Path(__file__).parents[2]


@pytest.fixture
async def sandbox(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sandbox]:
    monkeypatch.setenv("TAILRACE_NATS__PASSWORD", "hunter2")
    sandbox = Sandbox(1, Limits(wall_seconds=10, memory_bytes=1 << 28), packages=(HERE,))
    await sandbox.start()
    yield sandbox
    await sandbox.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gym_grader() -> AsyncIterator[Grader]:
    sandbox = Sandbox(1, Limits())
    await sandbox.start()
    yield Grader(sandbox, 2.0)
    await sandbox.close()


async def call(sandbox: Sandbox, name: str, payload: Any = None, limits: Limits | None = None) -> Any:
    return await sandbox.call(f"{HERE}:{name}", payload, limits=limits)


@pytest.mark.parametrize("payload", [None, 0, "text", ["\ud800", {"a": [1.5, True]}], "x" * 500_000, "\x00\n"])
async def test_payload_and_result_survive_the_way(sandbox: Sandbox, payload: Any) -> None:
    assert await call(sandbox, "echo", payload) == payload


async def test_every_fence_is_accounted_for(sandbox: Sandbox) -> None:
    fences = [*sandbox.enforced, *sandbox.missing]
    for name in ("own network", "Landlock file access", "memory limit", "CPU limit", "system call filter"):
        assert any(fence.startswith(name) for fence in fences)
    assert {"memory limit", "CPU limit", "file size limit"} <= set(sandbox.enforced)


async def test_no_secret_reaches_a_call(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "credentials"
    secret.write_text("hunter2")
    assert "hunter2" not in str(await call(sandbox, "environment"))
    for path in (secret, "/proc/self/environ", f"/proc/{os.getpid()}/environ", "/etc/shadow", "/etc/passwd"):
        with pytest.raises(SandboxCrash, match=r"FileNotFoundError|PermissionError"):
            await call(sandbox, "read", str(path))


async def test_a_call_is_not_root(sandbox: Sandbox) -> None:
    assert (await call(sandbox, "identity"))["user"] != 0


async def test_writing_is_possible_in_the_temporary_folder_alone(sandbox: Sandbox, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)  # noqa: PTH101
    assert await call(sandbox, "write", "inside") == "written"
    for path in (tmp_path / "outside", Path(__file__).with_suffix(".txt"), "/usr/outside", "/dev/shm/outside"):
        with pytest.raises(SandboxCrash):
            await call(sandbox, "write", str(path))
        assert not os.path.exists(path)  # noqa: ASYNC240, PTH110


async def test_a_call_finds_nothing_of_the_one_before(sandbox: Sandbox) -> None:
    assert await call(sandbox, "litter") == []
    assert await call(sandbox, "litter") == []


async def test_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(SandboxCrash):
        await call(sandbox, "connect", server.getsockname()[1])


@pytest.mark.parametrize(
    ("function", "payload", "limits", "error", "reason"),
    [
        ("sleep", 100, SHORT, SandboxTimeout, "no result within 0.5 s"),
        ("spin", None, Limits(wall_seconds=30, cpu_seconds=1), SandboxTimeout, "CPU seconds"),
        ("allocate", 1 << 29, None, SandboxCrash, "MemoryError"),
        ("leave", 3, None, SandboxCrash, "without a result"),
        ("leave", 0, None, SandboxCrash, "without a result"),
        ("fail", "bad \ud800 text", None, SandboxCrash, "ValueError: bad"),
        ("recurse", None, None, SandboxCrash, "RecursionError"),
        ("large", 2 << 20, None, SandboxCrash, "more than"),
        ("not_finite", None, None, SandboxCrash, "ValueError"),
        ("fork", None, None, SandboxCrash, "PermissionError|BlockingIOError"),
        ("absent", None, None, SandboxCrash, "AttributeError"),
        ("write_to_every_descriptor", None, None, SandboxCrash, "without a result"),
        ("signal_process", os.getpid(), None, SandboxCrash, "PermissionError|ProcessLookupError"),
    ],
)
async def test_a_call_that_goes_wrong_is_reported_and_the_next_is_untouched(
    sandbox: Sandbox, function: str, payload: Any, limits: Limits | None, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        await call(sandbox, function, payload, limits)
    assert await call(sandbox, "echo", [function]) == [function]


@pytest.mark.parametrize("function", ["os:system", "infra.settings:load", "subprocess:run", "tests.integrationx:f"])
async def test_only_functions_of_the_named_packages_run(sandbox: Sandbox, function: str) -> None:
    with pytest.raises(SandboxCrash, match="only run here"):
        await sandbox.call(function, "id")


@pytest.mark.parametrize("payload", [object(), {1: object()}, {"a": {1, 2}}])
async def test_a_payload_that_is_not_json_is_refused(sandbox: Sandbox, payload: Any) -> None:
    with pytest.raises(SandboxCrash, match="payload is not JSON"):
        await call(sandbox, "echo", payload)


async def test_processes_that_a_call_may_start_are_counted_and_end_with_it(sandbox: Sandbox) -> None:
    if "own processes" not in sandbox.enforced or "process count" not in sandbox.enforced:
        with pytest.raises(SandboxCrash, match="cannot bound the processes"):
            await call(sandbox, "shell", "echo hello", Limits(processes=4))
        return
    assert await call(sandbox, "shell", "echo hello", Limits(processes=4)) == "hello\n"
    await call(sandbox, "shell", "setsid sleep 98765.4321 >/dev/null 2>&1 &", Limits(processes=4))
    assert not any("98765.4321" in command for command in _commands())
    assert await call(sandbox, "bomb", None, Limits(processes=4)) <= 4


def _commands() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes().decode(errors="replace")


async def test_a_worker_that_died_is_replaced(sandbox: Sandbox) -> None:
    process = sandbox._workers[0]._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    with pytest.raises(SandboxCrash, match="died"):
        await call(sandbox, "echo", 1)
    assert await call(sandbox, "echo", 2) == 2


async def test_a_cancelled_call_leaves_no_answer_for_the_next(sandbox: Sandbox) -> None:
    waiting = asyncio.create_task(call(sandbox, "sleep", 0.2))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert await call(sandbox, "echo", "mine") == "mine"


async def test_a_call_cancelled_while_its_worker_starts_leaves_no_answer_for_the_next(sandbox: Sandbox) -> None:
    worker = sandbox._workers[0]
    await worker.stop()
    waiting = asyncio.create_task(call(sandbox, "echo", "theirs"))
    while worker._process is None:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.001)
    waiting.cancel()
    await asyncio.wait([waiting])
    for mine in range(2):
        assert await call(sandbox, "echo", mine) == mine


async def test_more_calls_than_workers_wait_their_turn() -> None:
    sandbox = Sandbox(2, Limits(), packages=(HERE,))
    await sandbox.start()
    try:
        assert await asyncio.gather(*(call(sandbox, "echo", n) for n in range(20))) == list(range(20))
    finally:
        await sandbox.close()


async def test_a_host_without_namespaces_still_gives_the_other_fences(tmp_path: Path) -> None:
    """As in a container with default rights: the process may not unshare, mount or open sockets."""
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", HERE, str(secret)), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    results = json.loads(output)
    assert any(fence.startswith("own processes") for fence in results.pop("missing"))
    assert {"Landlock file access", "system call filter", "memory limit"} <= set(results.pop("enforced"))
    assert results == {
        f"read {secret}": "SandboxCrash",
        f"write {secret}": "SandboxCrash",
        "write inside": "written",
        "connect 9": "SandboxCrash",
        "fork None": "SandboxCrash",
        f"signal_process {process.pid}": "SandboxCrash",
        f"allocate {4 << 30}": "SandboxCrash",
        "sleep 100": "SandboxTimeout",
        "echo 7": 7,
    }
    assert secret.read_text() == "hunter2"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("task", "answer", "outcome"),
    [
        ("basic_arithmetic", None, Outcome.OK),
        ("basic_arithmetic", "no idea", Outcome.WRONG),
        ("basic_arithmetic", "", Outcome.NO_ANSWER),
        ("countdown", None, Outcome.OK),
        ("countdown", "9**9**9", Outcome.VERIFIER_TIMEOUT),
        ("countdown", '__import__("os").system("touch owned")', Outcome.WRONG),
        ("spiral_matrix", '__import__("os").abort()', Outcome.VERIFIER_ERROR),
        ("spiral_matrix", "[1] * 10 ** 12", Outcome.WRONG),
    ],
)
async def test_scorers_that_evaluate_the_models_text(
    gym_grader: Grader, task: str, answer: str | None, outcome: Outcome
) -> None:
    entry = create_dataset(task, seed=1, size=1)[0]
    completion = f"<answer>{entry['answer'] if answer is None else answer}</answer>"
    (grade,) = await gym_grader.grade(f"gym:{task}", [completion], entries.pack(entry), [Finish.STOP])
    assert grade.outcome is outcome
    assert (grade.reward is None) == (outcome in (Outcome.VERIFIER_TIMEOUT, Outcome.VERIFIER_ERROR))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("task", "texts", "outcomes"),
    [
        (  # evaluates: each in a process of its own
            "countdown",
            ["9**9**9", "{}", "\ud800", '__import__("os").abort()', "1", None],
            ["verifier_timeout", "wrong", "wrong", "verifier_error", "wrong", "ok"],
        ),
        (
            "spiral_matrix",
            [None, '__import__("os").abort()', "1"],
            ["ok", "verifier_error", "wrong"],
        ),
        ("basic_arithmetic", ["9**9**9", "\ud800", "", None, None], ["wrong", "wrong", "no_answer", "ok", "ok"]),
    ],
)
async def test_a_member_that_hangs_or_kills_its_process_costs_the_group_nothing(
    gym_grader: Grader, task: str, texts: list[str | None], outcomes: list[str]
) -> None:
    entry = create_dataset(task, seed=1, size=1)[0]
    completions = [f"<answer>{entry['answer'] if text is None else text}</answer>" for text in texts]
    finishes = [Finish.STOP] * len(texts)
    grades = await gym_grader.grade(f"gym:{task}", completions, entries.pack(entry), finishes)
    assert [grade.outcome for grade in grades] == outcomes
    assert [grade.reward is None for grade in grades] == [outcome.startswith("verifier") for outcome in outcomes]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("verifier", ["exact", "letters", "number"])
async def test_hostile_text_is_graded_and_nothing_more(gym_grader: Grader, verifier: str) -> None:
    hostile = [
        "9**9**9",
        '__import__("os").system("id")',
        "\ud800",
        "{" * 300_000,
        "9" * 300_000,
        "\x00",
        "\\boxed{" * 99,
    ]
    grades = await gym_grader.grade(verifier, [*hostile, "7"], "7", [Finish.STOP] * (len(hostile) + 1))
    assert [grade.outcome is Outcome.OK for grade in grades] == [False] * len(hostile) + [True]
    assert all(grade.reward is not None for grade in grades)


RELOCATED = """
import asyncio, json
from infra.grading import Grader
from infra.sandbox import Limits, Sandbox
from generator.environments import environment
from contracts.messages import Split

async def main():
    sandbox = Sandbox(1, Limits())
    await sandbox.start()
    item = environment("gym:basic_arithmetic").item(1, Split.TRAIN)
    (grade,) = await Grader(sandbox, 20).grade(item.verifier, ["Answer: 12345"], item.expected, ["stop"])
    print(json.dumps([sandbox.missing, grade.outcome, grade.reason]))
    await sandbox.close()

asyncio.run(main())
"""


def test_code_below_tmp_is_fenced_as_elsewhere_and_needs_no_home(tmp_path: Path, sandbox: Sandbox) -> None:
    """A checkout may lie below /tmp, where calls have their own folder, and libraries may want to write on import."""
    for package in ("contracts", "infra", "generator"):
        shutil.copytree(ROOT / package, tmp_path / "code" / package, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", RELOCATED],
        cwd=tmp_path / "code",
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path / "nowhere"), "PYTHONPATH": str(tmp_path / "code")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    missing, outcome, reason = json.loads(done.stdout)
    assert missing == sandbox.missing, "whatever this host allows"
    assert outcome == "wrong", reason


OWNER = """
import asyncio, sys, time
from infra.sandbox import Limits, Sandbox

async def main():
    sandbox = Sandbox(1, Limits())
    await sandbox.start()
    print("started", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_what_a_killed_owner_left_is_cleared_and_what_a_living_one_uses_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    other = tmp_path / "tailrace-sandboxed-link"
    (tmp_path / "elsewhere").mkdir()
    other.symlink_to(tmp_path / "elsewhere")
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert owner.stdout is not None
    try:
        assert await owner.stdout.readline() == b"started\n"
        (folder,) = set(tmp_path.glob("tailrace-sandboxed-*")) - {other}  # noqa: ASYNC240
        (folder / "left").write_text("behind")
        long_after = time.time() + 3600
        clear_abandoned(long_after)
        assert folder.is_dir(), "its owner lives"
    finally:
        owner.kill()
        await owner.wait()
    clear_abandoned(time.time())
    assert folder.is_dir(), "too young to tell"
    clear_abandoned(long_after)
    assert not folder.exists()
    assert other.is_symlink() and (tmp_path / "elsewhere").is_dir()
