"""What fences hostile work in, in two layers: once per worker process, and once per call in the process that runs it.

Every fence is tried on its own, so that a host that refuses one still gives the others. A `Fences` records what holds;
what held at the start must hold for every call, or the call fails.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import resource
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from infra.sandbox import linux

NOBODY = 65534
SCRATCH_BYTES = 64 * 1024 * 1024  # of the temporary file system, where the host lets us mount one
OPEN_FILES = 64
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/nix/store", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")
_WRITABLE_DEVICES = ("/dev/null",)
_OWN_PACKAGES = ("contracts", "infra")


class Fences:
    """Which fences hold, and which do not and why. `required` ones raise instead of being recorded as missing."""

    def __init__(self, required: set[str] | None = None) -> None:
        self.enforced: list[str] = []
        self.missing: list[str] = []
        self._required = required

    @staticmethod
    def names(report: bytes) -> set[str]:
        """The fences that hold according to a probe's report."""
        return set(json.loads(report)["enforced"])

    def attempt(self, name: str, action: Callable[[], Any]) -> bool:
        """Try one fence; True if it holds. Raises `OSError` if it held before and no longer does."""
        try:
            action()
        except (OSError, ValueError) as error:
            if self._required is not None and name in self._required:
                raise
            self.missing.append(f"{name} ({getattr(error, 'strerror', None) or error})")
            return False
        self.enforced.append(name)
        return True


def readable_paths(packages: Iterable[str]) -> list[str]:
    """What a worker may read: the interpreter, its libraries, the system's, and the code of `packages`; existing paths,
    none inside another."""
    candidates = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *site.getsitepackages()]
    candidates += [*_SYSTEM, *_WRITABLE_DEVICES]
    for package in {name.partition(".")[0] for name in (*_OWN_PACKAGES, *packages)}:
        with contextlib.suppress(ImportError):  # the first call to it will say so
            # imported now, because the folder that holds it will not be readable: it may hold more than code
            module = importlib.import_module(package)
            candidates += getattr(module, "__path__", None) or [str(module.__file__)]
    kept: list[str] = []
    for path in sorted({str(Path(path).absolute()) for path in candidates if Path(path).exists()}):
        if path != "/" and not any(path.startswith(f"{parent}/") for parent in kept):
            kept.append(path)
    return kept


def fence_worker(folder: str, packages: Iterable[str], fences: Fences) -> str:
    """Fences that one worker process keeps for its whole life. Returns the parent of its calls' temporary folders.

    Blocks for some milliseconds. Must run before the process has a second thread.
    """
    paths = readable_paths(packages)
    fences.attempt("ends with its parent", linux.die_with_parent)
    if os.geteuid() != 0:
        fences.attempt("user namespace", _own_user_namespace)
    fences.attempt("no tracing", linux.forbid_tracing)  # not earlier: it takes the right to map users away
    fences.attempt("own network", lambda: linux.unshare(linux.CLONE_NEWNET))
    fences.attempt("own IPC", lambda: linux.unshare(linux.CLONE_NEWIPC | linux.CLONE_NEWUTS))
    fences.attempt("no new privileges", linux.forbid_new_privileges)
    scratch = folder
    if fences.attempt("own mounts", lambda: linux.unshare(linux.CLONE_NEWNS)) and fences.attempt(
        "read-only root of code alone", lambda: linux.enter_root(folder, paths, SCRATCH_BYTES)
    ):
        scratch = "/tmp"
    else:
        Path(folder).chmod(0o711)
    present = [path for path in paths if Path(path).exists()]
    writable = [scratch, *(device for device in _WRITABLE_DEVICES if Path(device).exists())]
    fences.attempt("Landlock file access", lambda: linux.restrict_files(present, writable))
    return scratch


def _own_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def fence_call(limits: dict[str, Any], loaded_bytes: int, fences: Fences) -> None:
    """Fences of one call, in the process that makes it: user, capabilities, resource limits, system calls.

    `loaded_bytes`: address space the worker's imports take, which the memory limit comes on top of.
    """
    if os.geteuid() == 0:
        fences.attempt("unprivileged user", _become_nobody)
        linux.die_with_parent()  # the change of user cleared it
    processes = int(limits["processes"])
    counted = fences.attempt("process count", lambda: _limit_processes(processes))
    if processes and not (counted and "own processes" in fences.enforced):
        raise OSError(errno.EPERM, "this host cannot bound the processes that a call starts")
    fences.attempt("no capabilities", linux.drop_capabilities)
    for name, kind, value in (
        ("memory limit", resource.RLIMIT_AS, loaded_bytes + int(limits["memory_bytes"])),
        ("CPU limit", resource.RLIMIT_CPU, max(1, round(limits["cpu_seconds"] + 0.499))),
        ("file size limit", resource.RLIMIT_FSIZE, int(limits["file_bytes"])),
        ("open file limit", resource.RLIMIT_NOFILE, OPEN_FILES),
        ("no core dumps", resource.RLIMIT_CORE, 0),
    ):
        fences.attempt(name, lambda kind=kind, value=value: resource.setrlimit(kind, (value, value)))  # type: ignore[misc]
    fences.attempt("system call filter", lambda: linux.filter_calls(processes > 0))


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _limit_processes(processes: int) -> None:
    # in a user namespace of its own the kernel counts this call's processes and threads alone
    linux.unshare(linux.CLONE_NEWUSER)
    allowed = 1 + processes if processes else 16
    resource.setrlimit(resource.RLIMIT_NPROC, (allowed, allowed))
