"""The pool of worker processes as its users see it: one coroutine, three outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.errors import UserError
from infra.sandbox.folders import Folder, clear_abandoned
from infra.sandbox.wire import LENGTHS, MAX_PAYLOAD_BYTES, MAX_RESULT_BYTES, frame

START_SECONDS = 60.0  # for a worker process to fence itself in and answer
GRACE_SECONDS = 90.0  # above a call's wall time: imports, forking and killing on a busy machine
CLOSE_SECONDS = 5.0
MAX_WAITING = 4096  # calls that wait for a free worker

_BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from infra.sandbox.server import main
main(*sys.argv[2:])"""


@dataclass(frozen=True)
class Limits:
    """What one call may use."""

    wall_seconds: float = 5.0
    cpu_seconds: float = 5.0
    memory_bytes: int = 1024**3  # address space on top of what the worker's imports take
    file_bytes: int = 16 * 1024**2  # of each file written
    processes: int = 0  # that the function may start beside itself, at one time


class SandboxTimeout(Exception):
    """The call was killed at its wall or CPU limit. Says nothing about its input."""


class SandboxCrash(Exception):
    """The call raised, died, ran out of memory, or gave no usable result; the text is one sentence."""


class Sandbox:
    """A pool of worker processes; each runs one call at a time, in a fresh process that holds nothing of ours.

    `enforced` and `missing` say, after `start`, which fences hold on this host. A result is only as trustworthy as the
    function: one that executes hostile code can be made to return anything, for that one call.
    """

    def __init__(self, workers: int, limits: Limits, packages: tuple[str, ...] = ("infra.grading",)) -> None:
        """`workers`: processes; `limits`: of a call that sets none; `packages`: whose functions may be called."""
        self.enforced: list[str] = []
        self.missing: list[str] = []
        self._limits = limits
        self._workers = [_Worker(packages) for _ in range(workers)]
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue(workers)
        self._waiting = 0

    async def start(self) -> None:
        """Start the workers. Raises `UserError` if they do not start within `START_SECONDS`."""
        await asyncio.to_thread(clear_abandoned, time.time())
        try:
            await asyncio.gather(*(worker.start() for worker in self._workers))
        except SandboxCrash as error:
            await self.close()
            raise UserError(f"sandbox: {error}; check that {sys.executable} can start processes here") from None
        self.enforced, self.missing = self._workers[0].enforced, self._workers[0].missing
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """Kill the workers and what runs in them; returns within a few seconds."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def call(self, function: str, payload: Any, *, limits: Limits | None = None) -> Any:
        """Run "package.module:name" on a JSON-able payload and return its JSON-able result.

        Waits for a free worker. Raises `SandboxTimeout` or `SandboxCrash`; imports do not count against the limits.
        """
        try:
            body = json.dumps(payload).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise SandboxCrash(f"{function}: the payload is not JSON: {error}") from None
        if len(body) > MAX_PAYLOAD_BYTES:
            raise SandboxCrash(f"{function}: the payload has {len(body)} bytes, more than {MAX_PAYLOAD_BYTES}")
        if self._waiting >= MAX_WAITING:
            raise SandboxCrash(f"{function}: {MAX_WAITING} calls are waiting for the sandbox already")
        self._waiting += 1
        try:
            worker = await self._idle.get()
        finally:
            self._waiting -= 1
        try:
            return await worker.call(function, body, limits or self._limits)
        finally:
            self._idle.put_nowait(worker)


class _Worker:
    """One worker process and its folder; started again when it has died or had to be killed."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.enforced: list[str] = []
        self.missing: list[str] = []
        self._packages = packages
        self._process: asyncio.subprocess.Process | None = None
        self._folder: Folder | None = None

    async def start(self) -> None:
        self._folder = Folder()
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/", "OMP_NUM_THREADS": "1"}
        environment |= {"OPENBLAS_NUM_THREADS": "1"}  # no threads in a process that forks
        environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        arguments = ("-I", "-B", "-c", _BOOT, json.dumps(_import_path()), self._folder.path, *self._packages)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
            header, body = await asyncio.wait_for(self._receive(), START_SECONDS)
        except (OSError, EOFError, TimeoutError) as error:
            await self.stop()
            raise SandboxCrash(f"a worker process did not start ({type(error).__name__}: {error})") from None
        except asyncio.CancelledError:
            await self.stop()  # what it says at its start must not be taken for the answer to the next call
            raise
        if header["status"] != "ok":
            await self.stop()
            raise SandboxCrash(f"a worker process could not make its first call: {header['reason']}")
        call = json.loads(body)
        self.enforced, self.missing = header["enforced"] + call["enforced"], header["missing"] + call["missing"]

    async def call(self, function: str, body: bytes, limits: Limits) -> Any:
        if self._process is None:
            await self.start()
        process = self._process
        assert process is not None and process.stdin is not None
        unharmed = False
        try:
            process.stdin.write(frame({"function": function, "limits": asdict(limits)}, body))
            async with asyncio.timeout(limits.wall_seconds + GRACE_SECONDS):
                await process.stdin.drain()
                header, result = await self._receive()
            unharmed = True
        except TimeoutError:
            raise SandboxTimeout(f"{function}: the worker process did not answer and was killed") from None
        except (OSError, EOFError):
            raise SandboxCrash(f"{function}: the worker process died") from None
        finally:
            if not unharmed:  # cancellation included: an answer may still be under way
                await self.stop()
        if header["status"] == "timeout":
            raise SandboxTimeout(f"{function}: {header['reason']}")
        if header["status"] != "ok":
            raise SandboxCrash(f"{function}: {header['reason']}")
        try:
            return json.loads(result, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise SandboxCrash(f"{function}: the result is not JSON: {error}") from None

    async def stop(self) -> None:
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), CLOSE_SECONDS)
        if folder is not None:
            folder.remove()

    async def _receive(self) -> tuple[dict[str, Any], bytes]:
        assert self._process is not None and self._process.stdout is not None
        stream = self._process.stdout
        head, body = LENGTHS.unpack(await stream.readexactly(LENGTHS.size))
        if head > MAX_RESULT_BYTES or body > MAX_RESULT_BYTES:
            raise EOFError("a frame above the limit")
        header: dict[str, Any] = json.loads(await stream.readexactly(head))
        return header, await stream.readexactly(body)


def _import_path() -> list[str]:
    return [str(Path(entry).absolute()) for entry in sys.path if entry]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a finite number")
