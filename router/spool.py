"""A queue of records on disk: appended at one end, taken from the other, bounded in bytes, safe against kill -9.

Segments `00000001.log`, … hold records of 8 bytes head (length, crc32, big-endian) and a body; `position` says up to
which byte of which segment they have been taken. A segment that has been taken whole is deleted.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import structlog

from infra.errors import UserError

log = structlog.get_logger(__name__)

HEAD = struct.Struct(">II")
SEGMENT_BYTES = 8 * 1024 * 1024


class Spool:
    """One process's queue in a folder of its own; its methods may be called from several threads."""

    def __init__(self, directory: Path, limit: int, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open what an earlier process left. `limit` in bytes. Raises `UserError` where the folder cannot be used."""
        self._directory, self._limit, self._segment_bytes = directory, limit, segment_bytes
        self._guard = threading.Lock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory} is in use by another router; give each a router.directory of its own"
            ) from None
        except OSError as error:
            raise UserError(f"{directory}: {error.strerror}; choose another router.directory") from None
        numbers = sorted(int(path.stem) for path in directory.glob("*.log") if path.stem.isdigit()) or [1]
        self._first, self._last = numbers[0], numbers[-1]
        self._offset = self._read_position()
        self._seen = (self._first, self._offset)  # behind the last record that `peek` gave
        self._file = self._path(self._last).open("ab", buffering=0)
        self._end = _whole(self._path(self._last))
        os.ftruncate(self._file.fileno(), self._end)
        sizes = (self._path(n).stat().st_size for n in range(self._first, self._last + 1) if self._path(n).exists())
        self._bytes = sum(sizes) - self._offset
        self._dirty = False

    @property
    def size(self) -> int:
        """Bytes not yet taken."""
        return self._bytes

    def append(self, records: Sequence[bytes]) -> int:
        """Add records and return how many found room: the first ones. Raises `OSError`; none was added then."""
        with self._guard:
            data, kept = bytearray(), 0
            for record in records:
                if self._bytes + len(data) + HEAD.size + len(record) > self._limit:
                    break
                data += HEAD.pack(len(record), zlib.crc32(record)) + record
                kept += 1
            if not data:
                return 0
            if self._end >= self._segment_bytes:
                self._rotate()
            try:
                _write(self._file.fileno(), data)
            except OSError:
                os.ftruncate(self._file.fileno(), self._end)
                raise
            self._end += len(data)
            self._bytes += len(data)
            self._dirty = True
            return kept

    def peek(self, count: int) -> list[bytes]:
        """The oldest records, at most `count`, none when there are none; they stay until `advance`."""
        with self._guard:
            records: list[bytes] = []
            number, offset = self._first, self._offset
            while len(records) < count:
                found, offset, broken = _read(self._path(number), offset, count - len(records))
                records += found
                if number == self._last or len(records) == count:
                    break
                if broken:
                    log.error("what follows in a segment of the outbox is unreadable", segment=number, offset=offset)
                number, offset = number + 1, 0
            self._seen = (number, offset)
            return records

    def advance(self) -> None:
        """Take what `peek` gave last."""
        with self._guard:
            number, offset = self._seen
            gone = range(self._first, number)
            self._bytes -= offset - self._offset + sum(self._path(n).stat().st_size for n in gone)
            self._first, self._offset = number, offset
            partial = self._directory / "position.partial"
            partial.write_text(f"{number} {offset}")
            partial.replace(self._directory / "position")
            for passed in gone:
                self._path(passed).unlink()

    def sync(self) -> None:
        """Make sure that what was appended survives a loss of power too."""
        with self._guard:
            if self._dirty:
                os.fsync(self._file.fileno())
                self._dirty = False

    def close(self) -> None:
        """Sync and let others open it. Raises `OSError` where the disk refuses; it is closed all the same."""
        try:
            self.sync()
        finally:
            self._file.close()
            self._lock.close()

    def _rotate(self) -> None:
        os.fsync(self._file.fileno())
        following = self._path(self._last + 1).open("ab", buffering=0)  # the old one stays in use should this fail
        self._file.close()
        self._file, self._end, self._last = following, 0, self._last + 1

    def _read_position(self) -> int:
        """Offset in the first segment; 0 where the file is missing, or speaks of a segment that is gone."""
        try:
            number, offset = map(int, (self._directory / "position").read_text().split())
        except (OSError, ValueError):
            return 0
        if number > self._first:  # killed before the segments that had been taken were deleted
            for passed in range(self._first, min(number, self._last)):
                self._path(passed).unlink(missing_ok=True)
            self._first = min(number, self._last)
        return offset if number == self._first and offset <= _whole(self._path(number)) else 0

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:08d}.log"


def _read(path: Path, offset: int, count: int) -> tuple[list[bytes], int, bool]:
    """Records from `offset` on, where they end, and whether something unreadable follows."""
    records: list[bytes] = []
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        while len(records) < count and (head := file.read(HEAD.size)):
            length, checksum = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0)
            if not 0 < length <= size - offset - HEAD.size:  # nothing so long is read: it may say four gigabytes
                return records, offset, True
            body = file.read(length)
            if zlib.crc32(body) != checksum:
                return records, offset, True
            records.append(body)
            offset += HEAD.size + length
    return records, offset, False


def _whole(path: Path) -> int:
    """Bytes of whole records in a segment: a process that was killed may have left half a one at its end."""
    if not path.exists():
        return 0
    _, end, broken = _read(path, 0, 1 << 62)
    if broken:
        log.warning("half a record at the end of the outbox is cut off", path=str(path), offset=end)
    return end


def _write(descriptor: int, data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
