"""Starts services as processes on this machine, restarts the ones that die, and stops all of them.

`decide` and `Backoff` hold what is to be done, `Supervisor` does it. No child outlives its supervisor: on Linux the
kernel kills the children when the supervisor dies, however it dies.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from infra.errors import UserError

EXIT_USER_ERROR = 2
KILL_SECONDS = 5.0  # from SIGKILL until the kernel has reaped the process
TAIL_BYTES = 64 * 1024

PR_SET_PDEATHSIG = 1


class Action(Enum):
    """What follows from a process's exit."""

    RESTART = "restart"
    LEAVE = "leave"  # it is done; the others go on
    COMPLETE = "complete"  # the run is done
    ABORT = "abort"  # a person has to act; the run ends


def decide(code: int, *, completes: bool, proven: bool) -> Action:
    """What to do when a process exits by itself with `code` (negative: killed by that signal).

    `completes`: the run is done when this process is. `proven`: an earlier life of it was healthy, so its settings are
    fine and what it complains about, such as a server that is away, may pass.
    """
    if code == 0:
        return Action.COMPLETE if completes else Action.LEAVE
    return Action.ABORT if code == EXIT_USER_ERROR and not proven else Action.RESTART


class Backoff:
    """How long to wait before a process is started again: twice as long each time, until it was healthy once."""

    FIRST = 0.5  # seconds
    LONGEST = 30.0  # seconds
    HEALTHY = 60.0  # seconds of life that end a series of failures
    LIMIT = 10  # failures in a series until it is given up

    def __init__(self) -> None:
        self.failures = 0

    def failed(self, lived: float) -> float | None:
        """Seconds until the next start after a life of `lived` seconds; None when it is time to give up."""
        self.failures = 1 if lived >= self.HEALTHY else self.failures + 1
        if self.failures >= self.LIMIT:
            return None
        return min(self.FIRST * 2 ** (self.failures - 1), self.LONGEST)


@dataclass(frozen=True)
class Child:
    """One process to keep running."""

    service: str  # the package: started as `python -m <service>`
    instance: str  # e.g. generator-2
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # beside that of all children


def children(processes: Mapping[str, int]) -> list[Child]:
    """The processes of a run file's `processes` table: service, or service.role -> how many."""
    found = []
    for name, count in processes.items():
        service, _, role = name.partition(".")
        environment = {f"TAILRACE_{service.upper()}__ROLE": role} if role else {}
        for number in range(1, count + 1):
            instance = f"{name.replace('.', '-')}-{number}"
            found.append(Child(service, instance, (sys.executable, "-m", service), environment))
    return found


class Supervisor:
    """Keeps a set of processes running until the run is complete."""

    def __init__(
        self,
        children: Sequence[Child],
        *,
        completes: str,
        environment: Mapping[str, str],
        logs: Path,
        stop_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """`completes` is the service whose exit 0 ends the run; `environment` is all that children see of it;
        `stop_seconds` is the time between SIGTERM and SIGKILL; `say` gets one sentence per event.
        """
        self._children = children
        self._completes = completes
        self._environment = environment
        self._logs = logs
        self._stop_seconds = stop_seconds
        self._say = say
        self._running: dict[str, asyncio.subprocess.Process] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by instance, of those that run now."""
        return {instance: process.pid for instance, process in self._running.items()}

    async def run(self) -> None:
        """Start every process and return when the run is complete. All of them are stopped then, also on cancellation.

        Raises `UserError` when a process exits with code 2 before it was ever healthy, or fails too often in a row.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        watchers = {asyncio.create_task(self._keep(child)) for child in self._children}
        waiting = set(watchers)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if Action.COMPLETE in [watcher.result() for watcher in done]:
                    return
            raise UserError(f"every process has ended, but no {self._completes} completed the run; see {self._logs}")
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await self._stop()

    async def _keep(self, child: Child) -> Action:
        """Run one process, again and again, until its exit means something else."""
        backoff, proven = Backoff(), False
        log = self._logs / f"{child.instance}.log"
        while True:
            started = time.monotonic()
            size = log.stat().st_size if log.exists() else 0
            code = await self._live(child, log)
            lived = time.monotonic() - started
            sentence = _sentence(log, size, child.service) if code == EXIT_USER_ERROR else ""
            proven = proven or lived >= Backoff.HEALTHY
            action = decide(code, completes=child.service == self._completes, proven=proven)
            if action is Action.ABORT:
                raise UserError(sentence or f"{child.instance} exited with 2; see {log}")
            if action is not Action.RESTART:
                return action
            delay = backoff.failed(lived)
            how = f"was killed by {_signal(-code)}" if code < 0 else f"exited with code {code}"
            how += f" ({sentence})" if sentence else ""
            if delay is None:
                raise UserError(f"{child.instance} failed {backoff.failures} times in a row and {how}; see {log}")
            self._say(f"{child.instance} {how}; restarting in {delay:g} s; see {log.name}")
            await asyncio.sleep(delay)

    async def _live(self, child: Child, log: Path) -> int:
        """One life of a process, from start to exit code. Nothing of its process group survives it."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *child.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self._environment, **child.environment, "TAILRACE_SERVICE__INSTANCE": child.instance},
                process_group=0,
                preexec_fn=die_with_parent(os.getpid()),
            )
        self._running[child.instance] = process
        code = await process.wait()
        _kill_group(process.pid)
        del self._running[child.instance]
        return code

    async def _stop(self) -> None:
        """SIGTERM to all, SIGKILL to those that do not leave in time."""
        processes = list(self._running.values())
        for process in processes:
            with suppress(ProcessLookupError):
                process.terminate()  # the process alone: it needs its helpers to finish what it does
        if processes:
            waits = [asyncio.create_task(process.wait()) for process in processes]
            _, late = await asyncio.wait(waits, timeout=self._stop_seconds)
            if late:
                self._say(f"{len(late)} of {len(processes)} processes did not stop in {self._stop_seconds:g} s: killed")
            for process in processes:
                _kill_group(process.pid)
            await asyncio.wait(waits, timeout=KILL_SECONDS)
        self._running.clear()


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """What a new process runs between fork and exec so that it does not outlive `parent`; only Linux offers it.

    To the kernel, the parent is the thread that forks: it must live as long as the process.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: the child may do next to nothing

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)

    return prepare


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # empty, or only zombies are left
        os.killpg(pid, signal.SIGKILL)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _sentence(log: Path, start: int, service: str) -> str:
    """The error a service printed for a person, from its log after byte `start`."""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    prefix = f"tailrace {service}: "
    return next((line.removeprefix(prefix) for line in reversed(lines) if line.startswith(prefix)), "")
