"""Whose CPU seconds they are: the kernel's count of a process, divided by what its threads are seen to do."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import UserError

RATE = 100  # samples a second
SPY_SECONDS = 20.0  # for the sampler to attach, and to write its file

OVERHEAD = ("codec", "NATS client", "nats-server", "weights")
OTHERS = ("verifiers", "other Python", "model")
# Where code is at home: the first prefix of its path that matches. What is in none of them counts for its caller.
HOMES = (
    ("contracts/", "codec"),
    ("infra/weights", "weights"),
    ("infra/patches", "weights"),
    ("infra/policies", "weights"),
    ("infra/blobs", "weights"),
    ("infra/bus", "NATS client"),
    ("infra/connection", "NATS client"),
    ("infra/pull", "NATS client"),
    ("infra/work", "NATS client"),
    ("infra/deadletters", "NATS client"),
    ("infra/leases", "NATS client"),
    ("nats/", "NATS client"),
    ("asyncio/", "NATS client"),
    ("infra/sampling", "model"),
    ("infra/models", "model"),
    ("generator/engines/", "model"),
    ("learner/trainer", "model"),
    ("learner/forward", "model"),
    ("learner/packing", "model"),
    ("learner/metrics", "model"),
    ("learner/objectives/", "model"),
    ("torch/", "model"),
    ("transformers/", "model"),
    ("infra/", "other Python"),
    ("generator/", "other Python"),
    ("learner/", "other Python"),
)
WAITING = (
    "select (selectors.py)",
    "wait (threading.py)",
    "_worker (concurrent/futures/thread.py)",
    "get (queue.py)",
    "_do_waitpid (asyncio/unix_events.py)",
)
FRAME = re.compile(r" \((.+)\)$")
THREAD = re.compile(r"thread \((\d+)\)")

Place = tuple[str, str]  # a home, and the frame that says so


def home(stack: Sequence[str]) -> Place | None:
    """Where a sample belongs; None for a thread that waits.

    `stack` has the outermost frame first, as in `Bus.read (infra/bus.py)`. torch counts as weights where weights call
    it.
    """
    if stack[-1].endswith(WAITING):
        return None
    known = [(name, frame) for frame in reversed(stack) if (name := _home(frame)) is not None]
    if not known:
        return "other Python", stack[-1]
    if known[0][0] == "model":
        return next((found for found in known if found[0] == "weights"), known[0])
    return known[0]


def _home(frame: str) -> str | None:
    path = FRAME.search(frame)
    return next((name for prefix, name in HOMES if path and path[1].startswith(prefix)), None)


def count(lines: Iterable[str]) -> dict[int, Counter[Place]]:
    """Samples of each thread by place, from py-spy's raw format: `thread (id): name;frame;frame;… count` a line."""
    threads: defaultdict[int, Counter[Place]] = defaultdict(Counter)
    for line in lines:
        stack, _, number = line.rpartition(" ")
        thread, *frames = stack.split(";")
        if (named := THREAD.match(thread)) and frames and (place := home(frames)) is not None:
            threads[int(named[1])][place] += int(number)
    return dict(threads)


@dataclass(frozen=True)
class Usage:
    """CPU seconds of a process: its own, those of its threads by id, and those of the processes that it started."""

    own: float
    threads: Mapping[int, float]
    below: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        """What the kernel says now; children that have ended count once they were waited for."""
        import psutil

        process = psutil.Process(pid)
        times = process.cpu_times()
        below = _ended(times)
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                of_child = child.cpu_times()
                below += of_child.user + of_child.system + _ended(of_child)
        threads = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
        return cls(times.user + times.system, threads, below)

    def since(self, before: Usage) -> Usage:
        """What was added."""
        threads = {thread: seconds - before.threads.get(thread, 0.0) for thread, seconds in self.threads.items()}
        return Usage(self.own - before.own, threads, max(self.below - before.below, 0.0))


def divide(usage: Usage, samples: Mapping[int, Counter[Place]]) -> dict[Place, float]:
    """The process's own CPU seconds by place: each thread's as its samples are.

    Threads without a sample are no Python threads: those of torch. What ended threads have used is other Python.
    """
    seconds: defaultdict[Place, float] = defaultdict(float)
    for thread, used in usage.threads.items():
        seen = samples.get(thread, Counter({("model", "native threads"): 1}))
        for place, number in seen.items():
            seconds[place] += used * number / seen.total()
    seconds["other Python", "ended threads"] = max(usage.own - sum(usage.threads.values()), 0.0)
    return dict(seconds)


def _ended(times: Any) -> float:
    return float(getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0))


class Spy:
    """py-spy at work on one process."""

    def __init__(self, process: asyncio.subprocess.Process, file: Path) -> None:
        self._process = process
        self._file = file

    @classmethod
    async def on(cls, pid: int, file: Path) -> Spy:
        """Begin to sample. Raises `UserError` where that is not allowed."""
        binary = spy_binary()
        process = await asyncio.create_subprocess_exec(
            *(binary, "record", "--pid", str(pid), "--rate", str(RATE), "--format", "raw", "--nolineno", "--threads"),
            *("--output", str(file)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        said = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(SPY_SECONDS):
                while line := await process.stdout.readline():
                    said += line
                    if b"Sampling" in line:
                        return cls(process, file)
        if process.returncode is None:
            process.kill()
        await process.wait()
        raise UserError(
            f"py-spy cannot look at process {pid}: {said.decode(errors='replace').strip()[-300:]}; "
            "run as root, or allow it with `sysctl kernel.yama.ptrace_scope=0`"
        )

    async def stop(self) -> list[str]:
        """End sampling; the lines of the raw format."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(self._process.communicate(), SPY_SECONDS)
        except TimeoutError:
            self._process.kill()
            raise
        return self._file.read_text().splitlines()


def spy_binary() -> str:
    """Path of py-spy. Raises `UserError` where it is not installed."""
    binary = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if binary is None:
        raise UserError("the benchmark needs py-spy and psutil; run `pip install -e '.[bench]'`")
    return binary
