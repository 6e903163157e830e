"""The command line: help, run directories, the board and its pictures, exit codes."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from contracts.messages import Heartbeat, Outcome, Purpose, Split
from infra.cli import view
from infra.cli.board import Board, Queue
from infra.cli.main import make_app
from infra.cli.rundir import RunDirectory, child_environment, choose, names_server, newest, write_run_file
from infra.cli.session import learns
from infra.errors import UserError
from infra.settings import NatsSettings, load
from tests.unit.builders import policy, rollout
from tests.unit.test_summary import discard, generator, of, published, step

PRESETS = Path(__file__).parents[2] / "infra" / "presets"
S = 10**9


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("TAILRACE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def tailrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from infra.cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "200"})


# --- help and exit codes ----------------------------------------------------------------------------------------------

HELP = {
    "": ["demo", "run", "status", "bootstrap", "export", "contracts"],
    "demo": ["--preset", "smollm2", "tiny", "--run-dir", "--seed", "--print-config", "continued from its last"],
    "run": ["FILE", "--run-dir", "nats.url"],
    "status": ["--run", "--run-dir", "--once"],
    "bootstrap": ["FILE"],
    "export": ["FOLDER", "--run-dir", "--published", "--version"],
}


@pytest.mark.parametrize("command", HELP)
def test_help(command: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(make_app(), [*command.split(), "--help"])
    assert result.exit_code == 0
    for part in HELP[command]:
        assert part in result.output


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['tailrace', '--help']\nfrom infra.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'nats', 'opentelemetry') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


WRONG = {
    "missing file": (["run", "nowhere.toml"], "tailrace: run file nowhere.toml: No such file or directory"),
    "wrong key": (["run", "wrong.toml"], "learner.stepz"),
    "export into a folder with files": (["export", "full"], "full exists already"),
    "export without a run": (["export", "new"], "there is no run with checkpoints"),
    "a version of a checkpoint": (["export", "new", "--version", "3"], "--published"),
    "status of an empty folder": (["status", "--run-dir", "full"], "no run is going on there"),
    "unknown option": (["demo", "--presett", "tiny"], "--presett"),
    "unknown preset": (["demo", "--preset", "huge"], "huge"),
    "unknown service": (["run", "service.toml"], "processes.generatr"),
    "unknown role": (["run", "role.toml"], "processes.generator.eat: generator has no such role; its roles are: train"),
}


@pytest.mark.parametrize(("arguments", "sentence"), WRONG.values(), ids=WRONG)
def test_what_a_person_got_wrong_is_one_sentence_and_exit_code_2(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "wrong.toml").write_text("[learner]\nstepz = 3\n")
    (tmp_path / "service.toml").write_text("[processes]\ngeneratr = 3\n")
    (tmp_path / "role.toml").write_text('[processes]\n"generator.eat" = 1\n')
    done = tailrace(*arguments)
    assert done.returncode == 2, done
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("preset", ["smollm2", "tiny"])
def test_print_config_shows_what_would_be_run_and_starts_nothing(tmp_path: Path, preset: str) -> None:
    done = tailrace("demo", "--preset", preset, "--seed", "7", "--print-config")
    assert done.returncode == 0
    (tmp_path / "printed.toml").write_text(done.stdout)
    settings = load(tmp_path / "printed.toml")
    assert settings.run.seed == 7
    assert settings.section("learner").model == preset
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("processes", "expected"),
    [({}, True), ({"learner": 1, "generator": 2}, True), ({"learner": 0, "router": 1}, False), ({"router": 1}, False)],
)
def test_only_a_run_that_learns_has_checkpoints_to_go_on_from(processes: dict[str, int], expected: bool) -> None:
    assert learns(load().model_copy(update={"processes": processes})) is expected


# --- run directories --------------------------------------------------------------------------------------------------


def started(directory: RunDirectory, settings: Any) -> None:
    directory.path.mkdir(parents=True)
    write_run_file(directory, settings)


def test_every_run_gets_a_directory_and_a_name_of_its_own(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        directory, settings = choose(load(PRESETS / "tiny.toml"), None)
        started(directory, settings)
        names.append((settings.run.name, directory.path))
        assert settings.run.directory == directory.path
    assert names == [(name, tmp_path / "runs" / name) for name in ("tiny", "tiny-2", "tiny-3")]


def test_a_directory_that_was_asked_for_is_continued(tmp_path: Path) -> None:
    directory, settings = choose(load(PRESETS / "tiny.toml"), Path("here"), seed=7)
    started(directory, settings)
    again, resumed = choose(load(PRESETS / "tiny.toml"), Path("here"))
    assert again == directory == RunDirectory(tmp_path / "here")
    assert (resumed.run.name, resumed.run.seed) == ("tiny", 7)


def test_a_directory_named_in_the_run_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[run]\ndirectory = "mine"\n')
    assert choose(load(tmp_path / "run.toml"), None)[0].path == tmp_path / "mine"


@pytest.mark.parametrize(
    ("other", "seed", "key"),
    [("smollm2", None, "run.environment"), ("tiny", 8, "run.seed")],
)
def test_another_run_is_not_continued(other: str, seed: int | None, key: str) -> None:
    directory, settings = choose(load(PRESETS / "tiny.toml"), Path("here"), seed=7)
    started(directory, settings)
    with pytest.raises(UserError, match=rf"{key}.*--run-dir"):
        choose(load(PRESETS / f"{other}.toml"), Path("here"), seed=seed)


def test_only_one_process_works_in_a_directory(tmp_path: Path) -> None:
    with (
        RunDirectory(tmp_path / "x").locked(),
        pytest.raises(UserError, match="in use by another process"),
        RunDirectory(tmp_path / "x").locked(),
    ):
        pass


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Not a directory"), RunDirectory(tmp_path / "file" / "x").locked():
        pass


def test_the_connection_is_readable_by_the_owner_only_and_leads_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "runs" / "x")
    directory.path.mkdir(parents=True)
    nats = NatsSettings(url="nats://127.0.0.1:1", user="u", password="p")
    directory.write_connection("x", nats, secrets=True)
    assert stat.S_IMODE(directory.connection_file.stat().st_mode) == 0o600
    assert directory.read_connection(NatsSettings()) == ("x", nats)
    assert newest("connection.toml") == directory


def test_secrets_of_a_server_of_somebody_else_are_not_written_down(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    nats = NatsSettings(url="nats://somewhere:1", user="u", password="p")
    directory.write_connection("x", nats, secrets=False)
    assert '"p"' not in directory.connection_file.read_text()
    assert directory.read_connection(NatsSettings(user="me", password="mine"))[1] == NatsSettings(
        url="nats://somewhere:1", user="me", password="mine"
    )
    _, settings = choose(load(PRESETS / "tiny.toml"), tmp_path)
    write_run_file(directory, settings.model_copy(update={"nats": nats}))
    assert "somewhere" not in directory.run_file.read_text()


def test_processes_see_the_run_file_and_nothing_that_overrides_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TAILRACE_RUN__NAME", "other")
    nats = NatsSettings(url="nats://127.0.0.1:1", user="u", password="p", connect_timeout=3)
    seen = child_environment(RunDirectory(tmp_path), nats)
    assert "TAILRACE_RUN__NAME" not in seen
    assert seen["TAILRACE_CONFIG"] == str(tmp_path / "run.toml")
    for name in list(os.environ):
        if name.startswith("TAILRACE_"):
            monkeypatch.delenv(name)
    for name, value in seen.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run.toml").write_text("")
    assert load().nats == nats


@pytest.mark.parametrize(
    ("text", "variable", "expected"),
    [
        ("", "", False),
        ('[nats]\nurl = "nats://127.0.0.1:4222"\n', "", True),
        ("[nats]\nconnect_timeout = 3\n", "", False),
        ("", "nats://somewhere:4222", True),
    ],
)
def test_names_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, variable: str, expected: bool
) -> None:
    (tmp_path / "run.toml").write_text(text)
    if variable:
        monkeypatch.setenv("TAILRACE_NATS__URL", variable)
    assert names_server(tmp_path / "run.toml") is expected


# --- the board --------------------------------------------------------------------------------------------------------


def shown(renderable: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def heartbeat(instance: str, state: str, at: float, detail: str = "") -> Heartbeat:
    return Heartbeat(
        run="test", service="s", instance=instance, state=state, detail=detail, started_ns=0, at_ns=int(at * S)
    )


def report(name: str, tokens: int, at: float, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(generator(name, 10, 1, tokens), at_ns=int(at * S), **changes)


def test_before_the_first_step_the_line_says_what_is_going_on() -> None:
    board = Board("test")
    assert view.line(board, 0) == "starting the processes"
    board.add(heartbeat("learner-1", "starting", 1, "loading the model"))
    assert view.line(board, 2) == "learner-1: loading the model"
    board.add(published(0))
    for item, outcome in (("a", Outcome.OK), ("b", Outcome.WRONG), ("b", Outcome.WRONG)):
        board.add(rollout(f"eval-0-{item}", purpose=Purpose.EVAL, split=Split.HELDOUT, outcome=outcome))
    assert view.line(board, 2) == "held-out accuracy: version 0 0.500 (of 2)"


def test_the_line_shows_progress() -> None:
    board = Board("test")
    board.add(published(2))
    board.add(step(1, ["a"], rewards=[0.25], at_ns=10 * S))
    board.add(step(2, ["b", "c"], rewards=[0.5, 1.0], staleness=[1, 2], wall_seconds=20, idle_seconds=5, at_ns=14 * S))
    board.add(report("g-1", 100, 10))
    board.add(report("g-1", 300, 20))
    board.add(report("g-2", 50, 20))
    line = view.line(board, 21)
    assert line == (
        "step 2 · reward 0.50 · staleness mean 1.5, max 2 of 4 · idle learner 25 % generators 10 % · 20 tokens/s · "
        "4.0 s/step"
    )


def test_a_restarted_learner_takes_back_what_it_lost() -> None:
    board = Board("test")
    for version in range(1, 4):
        board.add(published(version))
        board.add(step(version, ["a"], rewards=[version / 10]))
    board.add(published(1, 2))
    assert (board.version, list(board.rewards)) == (1, [0.1])
    board.add(published(3, 1))  # an older generation is not heard any more
    assert board.policy is not None
    assert board.policy.policy == policy(1, 2)


def test_a_restarted_generator_counts_from_zero() -> None:
    board = Board("test")
    for tokens, at in ((1000, 1), (0, 2), (10, 3)):
        board.add(report("g-1", tokens, at))
    assert board.tokens_per_second(4) == 10.0
    assert board.tokens_per_second(100) == 0.0


def test_processes_that_are_gone_are_not_shown() -> None:
    board = Board("test")
    board.add(heartbeat("a", "ready", 100))
    board.add(heartbeat("b", "stopped", 100))
    board.add(heartbeat("c", "ready", 1))
    board.add(heartbeat("d", "ready", 60, "silent for a while"))
    assert set(board.alive(101)) == {"a", "d"}
    text = shown(view.picture(board, 101))
    assert "silent" in next(line for line in text.splitlines() if "d " in line)


def test_the_picture_shows_everything() -> None:
    board = Board("test")
    board.add(published(2))
    board.add(step(2, ["b", "c"], rewards=[0.5, 1.0], staleness=[1, 2], outstanding=12))
    board.add(report("g-1", 300, 20, version=2, inflight=64))
    board.add(heartbeat("g-1", "ready", 20, "sampling"))
    board.add(discard("stale", "x", "y"))
    board.queues = [Queue("tasks train default", 7, 3, 12.0)]
    text = shown(view.picture(board, 21, ["learner-1 exited with code 1"]))
    for part in ("run test", "version 2, generation 1", "0.75", "12 tasks", "mean 1.5, max 2", "bound 4", "stale 2",
                 "g-1", "64", "tasks train default", "12 s", "sampling", "learner-1 exited with code 1"):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([0.5], "▁"), ([0.0, 1.0], "▁█"), ([0.3, 0.3, 0.3], "▁▁▁"), ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█")],
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert view.sparkline(values) == bars


def test_the_final_table_of_any_summary(tmp_path: Path) -> None:
    empty = shown(view.final_table(of()))
    assert "–" in empty
    full = of(
        published(0), published(1), *[rollout("train-0", index, reward=0.0) for index in range(2)],
        step(1, ["train-0.0", "train-0.1", "train-1.0"], rewards=[0.0, 0.0, 0.0], staleness=[0, 0, 0]),
    )  # fmt: skip
    text = shown(view.final_table(full))
    assert "3, twice: 0" in text
    assert "are not on the bus" in text
    RunDirectory(tmp_path).write_summary(full)
    assert json.loads((tmp_path / "summary.json").read_text()) == full
