"""The worker process: imports trusted code once, and runs every call in a fresh process that it can kill.

server -> warden -> call. The warden gives the call a process namespace, so that all its descendants end with it. The
server reads neither payload nor result: it hands bytes on, so hostile text never reaches a process that lives longer
than one call. A call can write to its own report pipe only; it cannot forge the result of another.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from infra.sandbox.call import Call, remove_folder
from infra.sandbox.isolation import Fences, fence_worker
from infra.sandbox.wire import MAX_RESULT_BYTES, read_frame, sentence, write_frame

SETUP_SECONDS = 20.0  # to fork and fence a call on a busy machine; not part of the call's time
DEATH_SECONDS = 10.0  # for the kernel to end a killed call
PROBE_LIMITS = {"wall_seconds": 10, "cpu_seconds": 10, "memory_bytes": 1 << 28, "file_bytes": 1 << 20, "processes": 0}

Reply = tuple[dict[str, Any], bytes]  # header {status: ok|timeout|crash, reason}, and the call's result as JSON


def main(folder: str, *packages: str) -> None:
    """Serve calls from standard input until it closes.

    `folder`: an empty folder of this worker's own; `packages`: whose functions it runs, and whose code it can read.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    statm = os.open("/proc/self/statm", os.O_RDONLY) if Path("/proc/self/statm").exists() else None
    fences = Fences()
    try:
        scratch = fence_worker(folder, packages, fences)
        os.environ |= {"HOME": scratch, "TMPDIR": scratch}  # some libraries want to write when they are imported
        tempfile.tempdir = None
        server = Server(scratch, statm, packages)
        header, report = server.probe()
    except Exception as error:  # nobody sees a traceback here: whoever started the worker gets the reason
        write_frame(replies, {"status": "crash", "reason": sentence(error)}, b"")
        return
    header |= {"enforced": fences.enforced, "missing": fences.missing}
    write_frame(replies, header, report)
    server.serve(requests, replies)


class Server:
    """Runs calls one after another.

    `scratch`: where each call gets its temporary folder; `statm`: this process's memory figures, open for reading.
    """

    def __init__(self, scratch: str, statm: int | None, packages: tuple[str, ...]) -> None:
        self._scratch = scratch
        self._packages = packages
        self._statm = statm
        self._required: set[str] = set()

    def probe(self) -> Reply:
        """Make one empty call to learn which of the call's fences hold here: from now on every call must have them."""
        fences = Fences()

        def report(_: Any) -> dict[str, list[str]]:
            return {"enforced": fences.enforced, "missing": fences.missing}

        header, body = self._run(report, b"null", PROBE_LIMITS, fences)
        if header["status"] == "ok":
            self._required = Fences.names(body)
        return header, body

    def serve(self, requests: BinaryIO, replies: BinaryIO) -> None:
        """Answer frames until the other side closes."""
        while (frame := read_frame(requests)) is not None:
            header, payload = frame
            try:
                function = self._load(header["function"])
            except Exception as error:  # an import may raise anything, and whoever asked for the function must see it
                write_frame(replies, {"status": "crash", "reason": sentence(error)}, b"")
                continue
            write_frame(replies, *self._run(function, payload, header["limits"], Fences(self._required)))

    def _load(self, name: str) -> Callable[[Any], Any]:
        module, _, attribute = name.partition(":")
        if not any(module == package or module.startswith(f"{package}.") for package in self._packages):
            raise ValueError(f"functions of {', '.join(self._packages)} only run here")
        function: Callable[[Any], Any] = getattr(importlib.import_module(module), attribute)
        return function

    def _run(self, function: Callable[[Any], Any], payload: bytes, limits: dict[str, Any], fences: Fences) -> Reply:
        folder = tempfile.mkdtemp(dir=self._scratch)
        call = Call(function, payload, limits, fences, folder, self._loaded_bytes())
        reader, writer = os.pipe()
        warden = os.fork()
        if warden == 0:
            call.in_warden(writer)
        os.close(writer)
        try:
            return self._collect(reader, warden, limits)
        finally:
            os.close(reader)
            remove_folder(folder)

    def _collect(self, reader: int, warden: int, limits: dict[str, Any]) -> Reply:
        """Read the call's report until no process holds the pipe any more; kill the call when it goes over a limit."""
        report = bytearray()
        stopped: dict[str, Any] | None = None
        deadline = time.monotonic() + SETUP_SECONDS
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                if stopped or not report:
                    os._exit(71)  # a call that neither starts nor dies: this worker is of no more use
                stopped = {"status": "timeout", "reason": f"no result within {limits['wall_seconds']:g} s"}
            else:
                chunk = os.read(reader, 1 << 16)
                if not chunk:
                    break
                if stopped:
                    continue
                if not report:  # the first byte says that the call is fenced and starts
                    deadline = time.monotonic() + limits["wall_seconds"]
                report += chunk
                if len(report) <= MAX_RESULT_BYTES:
                    continue
                stopped = {"status": "crash", "reason": f"a result of more than {MAX_RESULT_BYTES} bytes"}
            os.kill(warden, signal.SIGKILL)
            deadline = time.monotonic() + DEATH_SECONDS
        _, status, usage = os.wait4(warden, 0)
        if stopped:
            return stopped, b""
        return _verdict(bytes(report), os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, limits)

    def _loaded_bytes(self) -> int:
        if self._statm is None:
            return 0
        return int(os.pread(self._statm, 64, 0).split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _verdict(report: bytes, code: int, cpu_seconds: float, limits: dict[str, Any]) -> Reply:
    kind, body = report[1:2], report[2:]
    if kind == Call.RESULT:
        return {"status": "ok"}, body
    if kind == Call.ERROR:
        return {"status": "crash", "reason": body.decode("utf-8", "replace")}, b""
    if code == 128 + signal.SIGKILL and cpu_seconds >= 0.9 * limits["cpu_seconds"]:  # the kernel counts in ticks
        return {"status": "timeout", "reason": f"used more than {limits['cpu_seconds']:g} CPU seconds"}, b""
    return {"status": "crash", "reason": f"the process ended without a result (exit code {code})"}, b""
