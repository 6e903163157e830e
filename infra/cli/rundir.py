"""The folder of a local run: which one is taken, what lies in it, and that only one process works in it.

run.toml         the settings in force, without secrets
connection.toml  how to reach the run's server, readable by the owner only, while it runs
logs/            one file per process
nats/            the embedded server's store
summary.json     the figures of the finished run
"""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from infra.errors import UserError
from infra.runfile import to_toml
from infra.settings import CONFIG_VARIABLE, PREFIX, NatsSettings, RunSettings, Settings, load

RUNS = Path("runs")
NAME_LENGTH = 40  # longest run name


@dataclass(frozen=True)
class RunDirectory:
    """A folder and the names in it."""

    path: Path

    @property
    def run_file(self) -> Path:
        """The settings in force."""
        return self.path / "run.toml"

    @property
    def connection_file(self) -> Path:
        """How to reach the run's server while it runs."""
        return self.path / "connection.toml"

    @property
    def summary_file(self) -> Path:
        """The figures of the finished run."""
        return self.path / "summary.json"

    @property
    def logs(self) -> Path:
        """One file per process."""
        return self.path / "logs"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep others out of it. Raises `UserError` if somebody is in it, or it cannot be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("w")
        except OSError as error:
            raise UserError(f"run directory {self.path}: {error.strerror}; choose another with --run-dir") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"run directory {self.path} is in use by another process; stop that run or choose another --run-dir"
                ) from None
            yield

    def write_connection(self, run: str, nats: NatsSettings, *, secrets: bool) -> None:
        """Let `tailrace status` find the run; `secrets` only for a server that exists for this run alone."""
        values = {"run": run, "url": nats.url}
        if secrets:
            values |= {"user": nats.user, "password": nats.password.get_secret_value()}
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
        self.connection_file.unlink(missing_ok=True)
        descriptor = os.open(self.connection_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)

    def read_connection(self, nats: NatsSettings) -> tuple[str, NatsSettings]:
        """Run name and server of the run, with `nats` for what the file does not say."""
        try:
            values = tomllib.loads(self.connection_file.read_text())
            update: dict[str, Any] = {"url": values["url"]}
            if "password" in values:
                update |= {"user": values["user"], "password": SecretStr(values["password"])}
            return values["run"], nats.model_copy(update=update)
        except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
            raise UserError(f"{self.connection_file} cannot be read: {error}; is the run still going on?") from None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the figures, all or nothing."""
        partial = self.summary_file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(summary, indent=2) + "\n")
            partial.replace(self.summary_file)
        except OSError as error:
            raise UserError(f"{self.summary_file} cannot be written: {error.strerror}") from None


def shown(path: Path) -> str:
    """A path as people write it: relative where it lies below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def choose(settings: Settings, given: Path | None, *, seed: int | None = None) -> tuple[RunDirectory, Settings]:
    """The folder of a run that is about to start, and the settings in it.

    A folder that was asked for, by `given` or by `run.directory`, is continued if it holds a run; otherwise the run
    gets a new one, `runs/<name>` or `runs/<name>-2`, …, and its name with it. Raises `UserError` if the run in the
    folder cannot be continued with these settings.
    """
    run = settings.run
    asked = given or (run.directory if run.directory != RunSettings().directory else None)
    if seed is not None:
        run = run.model_copy(update={"seed": seed})
    if asked is None:
        run = run.model_copy(update={"name": _fresh_name(run.name)})
        directory = RunDirectory((RUNS / run.name).absolute())
    else:
        directory = RunDirectory(asked.absolute())
        if directory.run_file.exists():
            former = load(directory.run_file)
            run = run.model_copy(update={"name": former.run.name, "seed": former.run.seed if seed is None else seed})
            _check_same(directory, former, settings.model_copy(update={"run": run}))
    run = run.model_copy(update={"directory": directory.path})
    return directory, settings.model_copy(update={"run": run})


def _fresh_name(name: str) -> str:
    taken = {path.name for path in RUNS.iterdir()} if RUNS.is_dir() else set()
    candidate, number = name, 2
    while candidate in taken:
        suffix = f"-{number}"
        candidate, number = name[: NAME_LENGTH - len(suffix)] + suffix, number + 1
    return candidate


def _check_same(directory: RunDirectory, former: Settings, settings: Settings) -> None:
    for what, old, new in (
        ("run.environment", former.run.environment, settings.run.environment),
        ("run.seed", former.run.seed, settings.run.seed),
        ("learner.model", former.section("learner").model, settings.section("learner").model),
    ):
        if old != new:
            raise UserError(
                f"run directory {directory.path} holds a run with {what} = {old!r}, not {new!r}; "
                "choose another --run-dir, or none for a new one"
            )


def write_run_file(directory: RunDirectory, settings: Settings) -> None:
    """Keep the settings in force beside the run. The server's address and secrets are not part of it."""
    directory.run_file.write_text(to_toml(settings.model_copy(update={"nats": NatsSettings()})))


def child_environment(directory: RunDirectory, nats: NatsSettings) -> dict[str, str]:
    """What processes of the run need to know: the run file, and the server with its secrets.

    Other variables of ours are left out: they are in the run file already, and must not override it.
    """
    values = {name: value for name, value in nats if value is not None}
    values["password"] = nats.password.get_secret_value()
    variables = {f"{PREFIX}NATS__{name.upper()}": str(value) for name, value in values.items()}
    foreign = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return {**foreign, **variables, CONFIG_VARIABLE: str(directory.run_file)}


def newest(name: str) -> RunDirectory | None:
    """The local run whose file or folder of that name is the newest; None if no run has one."""
    found = sorted(RUNS.glob(f"*/{name}"), key=lambda path: path.stat().st_mtime)
    return RunDirectory(found[-1].parent.absolute()) if found else None


def going_on() -> RunDirectory | None:
    """The newest local run that is going on; None if there is none, or if a server is named instead."""
    config = os.environ.get(CONFIG_VARIABLE)
    return None if names_server(Path(config) if config else None) else newest("connection.toml")


def names_server(config: Path | None = None) -> bool:
    """Whether the environment, or the run file, says which NATS server to use."""
    if any(name in os.environ for name in (f"{PREFIX}NATS__URL", f"{PREFIX}NATS")):
        return True
    return config is not None and "url" in tomllib.loads(config.read_text()).get("nats", {})
