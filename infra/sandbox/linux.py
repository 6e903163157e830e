"""The Linux calls the sandbox stands on that Python's standard library does not offer; each raises `OSError`.

References: namespaces(7), landlock(7), seccomp(2), capabilities(7), pivot_root(2), mount_setattr(2), prctl(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CLONE_THREAD = 0x00010000
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_CLONE_NAMESPACES = 0x7E020000 | 0x02000000  # every CLONE_NEW* flag that clone(2) takes

_libc = ctypes.CDLL(None, use_errno=True)
_ARCHITECTURE = {"x86_64": 0, "aarch64": 1}.get(platform.machine())

# System call numbers on x86_64 and aarch64; None where the architecture has no such call.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220), "clone3": (435, 435), "fork": (57, None), "vfork": (58, None),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "prlimit64": (302, 261),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "socket": (41, 198), "io_uring_setup": (425, 425),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
}  # fmt: skip


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _function(name: str) -> Any:
    function = getattr(_libc, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"{name}: this system has no such call")
    return function


def _syscall(name: str, *arguments: Any) -> int:
    number = _number(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name}: not known on {platform.machine()}")
    return _checked(_function("syscall")(ctypes.c_long(number), *arguments), name)


def _number(name: str) -> int | None:
    return None if _ARCHITECTURE is None else _CALLS[name][_ARCHITECTURE]


def _prctl(what: str, option: int, *arguments: Any) -> None:
    padded = [*arguments, *[0] * (4 - len(arguments))]
    _checked(_function("prctl")(option, *[ctypes.c_ulong(value) for value in padded]), what)


def die_with_parent() -> None:
    """SIGKILL this process when the thread that created it ends. A change of user clears it: call it again then."""
    _prctl("parent-death signal", 1, signal.SIGKILL)


def forbid_new_privileges() -> None:
    """No exec may gain privileges, for this process and all its descendants."""
    _prctl("no_new_privs", 38, 1)


def forbid_tracing() -> None:
    """No core dumps, and no process of the same user may trace this one or read its memory."""
    _prctl("dumpable", 4, 0)


def unshare(flags: int) -> None:
    """Leave the parent's namespaces named by the `CLONE_NEW*` flags."""
    _checked(_function("unshare")(ctypes.c_int(flags)), "unshare")


def drop_capabilities() -> None:
    """Empty the effective, permitted and inheritable capability sets."""
    header = struct.pack("=Ii", 0x20080522, 0)
    _checked(_function("capset")(header, bytes(24)), "capset")


def enter_root(folder: str, readable: Iterable[str], scratch_bytes: int) -> None:
    """Make `folder` the root of this mount namespace: a small tmpfs that shows `readable` read-only, and a free /tmp.

    Everything else of the host's file system is out of reach. Needs a mount namespace of one's own.
    """
    private, recursive, bind, read_only, detach = 1 << 18, 1 << 14, 1 << 12, 1, 2
    mount, no_data = _function("mount"), ctypes.c_void_p()
    _checked(mount(b"none", b"/", None, ctypes.c_ulong(recursive | private), no_data), "private mounts")
    options = f"size={scratch_bytes},mode=755".encode()
    _checked(mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(0), options), "mount tmpfs")
    for path in map(Path, readable):
        target = Path(folder + str(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            target.symlink_to(path.readlink())
            continue
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        flags = ctypes.c_ulong(bind | recursive)
        _checked(mount(bytes(path), bytes(target), None, flags, no_data), f"bind {path}")
        attributes = struct.pack("=QQQQ", read_only, 0, 0, 0)
        at_current_folder, at_recursive = ctypes.c_int(-100), ctypes.c_uint(0x8000)
        size = ctypes.c_size_t(len(attributes))
        _syscall("mount_setattr", at_current_folder, bytes(target), at_recursive, attributes, size)
    scratch = Path(folder, "tmp")
    scratch.mkdir(exist_ok=True)  # it is there already where code lies below /tmp
    scratch.chmod(0o711)
    os.chdir(folder)
    _syscall("pivot_root", b".", b".")
    _checked(_function("umount2")(b".", ctypes.c_int(detach)), "umount the old root")
    os.chdir("/")


# Landlock access rights (linux/landlock.h).
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | 1 << 15


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> int:
    """Landlock: from now on only `readable` paths can be read and executed, only `writable` ones changed.

    Where the kernel can, TCP is refused too, and signals to processes outside. Returns the kernel's Landlock version.
    """
    version = _syscall("landlock_create_ruleset", None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    handled = (1 << 13) - 1
    for since, right in ((2, 1 << 13), (3, _TRUNCATE), (5, 1 << 15)):
        handled |= right if version >= since else 0
    network = 0b11 if version >= 4 else 0
    scoped = 0b11 if version >= 6 else 0
    attributes = struct.pack("=QQQ", handled, network, scoped)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall("landlock_create_ruleset", attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        rules = [(path, _EXECUTE | _READ_FILE | _READ_DIR) for path in readable]
        rules += [(path, handled) for path in writable]
        for path, rights in rules:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
                allowed = handled & (rights if folder else rights & _FILE_RIGHTS)
                rule = struct.pack("=Qi", allowed, descriptor)
                _syscall("landlock_add_rule", ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
            finally:
                os.close(descriptor)
        _syscall("landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)
    return version


_DENIED = (
    "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_open", "pidfd_getfd", "pidfd_send_signal",
    "socket", "io_uring_setup", "shmget", "msgget", "semget", "mq_open", "unshare", "setns", "mount", "umount2",
    "pivot_root", "open_tree", "move_mount", "fsopen", "mount_setattr", "bpf", "perf_event_open", "userfaultfd",
    "keyctl", "add_key", "request_key",
)  # fmt: skip
_DENIED_ALONE = ("fork", "vfork", "kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")


def filter_calls(processes: bool) -> None:
    """Seccomp: system calls that reach the network, other processes or the kernel's rarer corners fail with EPERM.

    Without `processes`, starting a process and signalling one fail as well; threads stay allowed.
    """
    load, equal, any_bit, at_least, give = 0x20, 0x15, 0x45, 0x35, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000
    arch = {0: 0xC000003E, 1: 0xC00000B7}.get(-1 if _ARCHITECTURE is None else _ARCHITECTURE)
    if arch is None:
        raise OSError(errno.ENOSYS, f"seccomp: system call numbers of {platform.machine()} are not known")
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]  # the x32 numbering of the same calls
    for name in (*_DENIED, *(() if processes else _DENIED_ALONE)):
        number = _number(name)
        if number is not None:
            program += [(equal, 0, 1, number), (give, 0, 0, refuse | errno.EPERM)]
    # limits of this process (pid 0) alone
    program += [(equal, 0, 3, _number("prlimit64") or 0), (load, 0, 0, 16), (equal, 1, 0, 0)]
    program += [(give, 0, 0, refuse | errno.EPERM), (load, 0, 0, 0)]
    # clone3 hides its flags in memory, out of a filter's sight; libc falls back to clone on ENOSYS.
    program += [(equal, 0, 1, _number("clone3") or 0), (give, 0, 0, refuse | errno.ENOSYS)]
    flags = (any_bit, 0, 1, _CLONE_NAMESPACES) if processes else (any_bit, 1, 0, CLONE_THREAD)
    program += [(equal, 0, 3, _number("clone") or 0), (load, 0, 0, 16), flags, (give, 0, 0, refuse | errno.EPERM)]
    program += [(give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    descriptor = struct.pack("@HP", len(program), ctypes.addressof(code))
    _checked(_function("prctl")(22, ctypes.c_ulong(2), descriptor, 0, 0), "seccomp")
