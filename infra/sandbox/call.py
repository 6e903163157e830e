"""One call: the two processes between the server and the function, from fork to exit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from infra.sandbox import linux
from infra.sandbox.isolation import NOBODY, Fences, fence_call
from infra.sandbox.wire import sentence


class Call:
    """A function, its payload as JSON bytes, and what fences it in. Each method runs in a process of its own.

    The report pipe carries `READY` once the fences stand, then `RESULT` and JSON, or `ERROR` and a sentence.
    """

    READY: ClassVar = b"r"
    RESULT: ClassVar = b"+"
    ERROR: ClassVar = b"-"

    def __init__(
        self,
        function: Callable[[Any], Any],
        payload: bytes,
        limits: dict[str, Any],
        fences: Fences,
        folder: str,
        loaded_bytes: int,
    ) -> None:
        self._function = function
        self._payload = payload
        self._limits = limits
        self._fences = fences
        self._folder = folder
        self._loaded_bytes = loaded_bytes
        self._server = os.getpid()
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):  # the fence that makes the call nobody's then fails, and is reported
                os.chown(folder, NOBODY, NOBODY)

    def in_warden(self, writer: int) -> NoReturn:
        """Start the call in its own process namespace, wait for it, exit as it did."""
        code = 70
        try:
            with contextlib.suppress(OSError):
                linux.die_with_parent()
            if os.getppid() != self._server:
                os._exit(code)
            self._fences.attempt("own processes", lambda: linux.unshare(linux.CLONE_NEWPID))
            call = os.fork()
            if call == 0:
                self.in_call(writer)
            os.close(writer)
            exit_code = os.waitstatus_to_exitcode(os.waitpid(call, 0)[1])
            code = exit_code if exit_code >= 0 else 128 - exit_code
        except OSError as error:
            _send(writer, self.READY + self.ERROR + sentence(error).encode())
        finally:
            os._exit(code)

    def in_call(self, writer: int) -> NoReturn:
        """Put the fences up and run the function."""
        try:
            with contextlib.suppress(OSError):
                linux.die_with_parent()
            os.setsid()
            os.closerange(3, writer)
            os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
            fence_call(self._limits, self._loaded_bytes, self._fences)
            os.chdir(self._folder)
            os.environ |= {"HOME": self._folder, "TMPDIR": self._folder}
            tempfile.tempdir = None
        except OSError as error:
            _send(writer, self.READY + self.ERROR + f"the sandbox could not be set up: {sentence(error)}".encode())
            os._exit(0)
        _send(writer, self.READY)
        try:
            report = self.RESULT + json.dumps(self._function(json.loads(self._payload)), allow_nan=False).encode()
        except BaseException as error:  # whatever hostile input provokes, SystemExit and MemoryError included
            report = self.ERROR + sentence(error).encode("utf-8", "replace")
        _send(writer, report)
        sys.stdout.flush()
        os._exit(0)


def _send(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def remove_folder(folder: str) -> None:
    """Remove what a call left behind, whatever rights it gave its folders."""
    try:
        Path(folder).rmdir()
        return
    except OSError:
        pass
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            Path(path).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
