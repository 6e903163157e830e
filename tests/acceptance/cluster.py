"""A run of real processes against a real server, for tests that kill things."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infra.bootstrap import bootstrap
from infra.bus import Bus
from infra.cli.feed import collect
from infra.server import EmbeddedServer

# A model of 59k parameters and small batches: a step takes a fraction of a second.
SETTINGS = {
    "RUN__ENVIRONMENT": "reverse-text",
    "SERVICE__HEARTBEAT_SECONDS": "0.5",
    "LEARNER__MODEL": "tiny",
    "LEARNER__STEPS": "6",
    "LEARNER__GROUPS_PER_STEP": "4",
    "LEARNER__GROUP_SIZE": "4",
    "LEARNER__MAX_STALENESS": "2",
    "LEARNER__PRECISION": "fp32",
    "LEARNER__THREADS": "1",
    "LEARNER__OPTIMIZER__LEARNING_RATE": "2e-3",
    "LEARNER__SAMPLING__MAX_TOKENS": "8",
    "LEARNER__CHECKPOINT_EVERY": "2",
    "GENERATOR__PRECISION": "fp32",
    "GENERATOR__THREADS": "1",
}


class Cluster:
    """Server, services and an onlooker's connection; everything lives below one directory."""

    def __init__(self, directory: Path, run: str, **settings: object) -> None:
        self.directory = directory
        self.run = run
        self.settings = SETTINGS | {name: str(value) for name, value in settings.items()}
        self.server = EmbeddedServer(directory / "nats")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.bus: Bus

    async def __aenter__(self) -> Cluster:
        self.server.start()
        self.bus = await Bus.connect(self.server.settings, "onlooker")
        await bootstrap(self.bus, self.run, ["default"], create=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)
        await self.bus.close()
        self.server.stop()

    def environment(self, instance: str, **settings: object) -> dict[str, str]:
        """What a service process is configured by."""
        nats = self.server.settings
        own = {
            "RUN__NAME": self.run,
            "RUN__DIRECTORY": str(self.directory / "run"),
            "NATS__URL": nats.url,
            "NATS__USER": nats.user,
            "NATS__PASSWORD": nats.password.get_secret_value(),
            "SERVICE__INSTANCE": instance,
        }
        chosen = self.settings | own | {name: str(value) for name, value in settings.items()}
        return os.environ | {f"TAILRACE_{name}": value for name, value in chosen.items()}

    def start(self, instance: str, arguments: Sequence[str] = (), **settings: object) -> None:
        """Start `learner` or `generator-N`, or `python -m` with other arguments, as a process; its log goes on."""
        module = arguments or [instance.split("-")[0]]
        with self._log(instance).open("ab") as log:
            self.processes[instance] = subprocess.Popen(
                [sys.executable, "-m", *module],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(instance, **settings),
                start_new_session=True,
            )

    def _log(self, instance: str) -> Path:
        return self.directory / f"{instance}.log"

    def kill(self, instance: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal; SIGKILL takes the whole process group and is waited for."""
        process = self.processes[instance]
        if number is not signal.SIGKILL:
            process.send_signal(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        del self.processes[instance]

    def events(self, instance: str) -> list[dict[str, Any]]:
        """The JSON lines that an instance has logged, over all its lives."""
        path = self._log(instance)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def logged(self, instance: str, event: str, **fields: object) -> list[dict[str, Any]]:
        """Its log lines of one event whose fields have these values."""
        wanted = {"event": event, **fields}
        return [line for line in self.events(instance) if wanted.items() <= line.items()]

    async def until(
        self, condition: Callable[[], object], what: str, seconds: float = 60.0, every: float = 0.05
    ) -> None:
        """Wait for a condition; fails with what was waited for and the end of every log."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                ends = {name: self._log(name).read_text(errors="replace")[-1500:] for name in self.processes}
                raise AssertionError(
                    f"{what}: not within {seconds:g} s\n" + "\n".join(f"{k}: {v}" for k, v in ends.items())
                )
            await asyncio.sleep(every)

    async def until_logged(self, instance: str, event: str, *, seconds: float = 60.0, **fields: object) -> None:
        """Wait until an instance has logged an event."""
        await self.until(lambda: self.logged(instance, event, **fields), f"{instance} logs {event} {fields}", seconds)

    async def finish(self, instance: str = "learner", *, seconds: float = 90.0) -> int:
        """Wait until a process exits by itself; its exit code."""
        process = self.processes[instance]
        await self.until(lambda: process.poll() is not None, f"{instance} exits", seconds)
        return process.returncode

    async def summary(self) -> dict[str, Any]:
        """The figures of the run so far, from the records on the bus."""
        return await collect(self.bus, self.run)
