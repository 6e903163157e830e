"""The folders of worker processes. An owner that is killed leaves its folder behind, for another to clear away.

Each is locked by its owner for as long as that lives; unlike a process id, a lock is seen from another container too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "tailrace-sandboxed-"
YOUNG_SECONDS = 60.0  # a folder this young may be about to be locked


class Folder:
    """A new, empty folder below the system's temporary one."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it and all it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clear_abandoned(now: float) -> None:
    """Remove this user's folders that nobody has locked; `now` is in unix seconds. One that resists is left alone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(folder)
                if status.st_uid == os.geteuid() and now - status.st_mtime > YOUNG_SECONDS:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(folder)
