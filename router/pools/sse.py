"""Server-sent events out of bytes, however they were cut up (HTML standard, section 9.2.6). Pure."""

from __future__ import annotations

from typing import NamedTuple

LONGEST = 4 * 2**20  # bytes of one event


class Oversized(ValueError):
    """An event is longer than it may be."""


class Event(NamedTuple):
    """One event: lines of data are joined by newlines; `name` is empty for a plain message."""

    data: bytes  # UTF-8, not checked
    name: str = ""


class Parser:
    """Takes bytes as they arrive and gives the events that they complete.

    Only whole lines are looked at, so a character or a line end may be cut anywhere.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._rest = bytearray()  # an unfinished line
        self._data: list[bytes] = []
        self._size = 0  # bytes in _data
        self._name = ""
        self._first = True  # no line was read yet

    def feed(self, received: bytes) -> list[Event]:
        """Events that end in `received`. Raises `Oversized`."""
        ended = b"\n" in received or b"\r" in received or self._rest.endswith(b"\r")
        self._rest += received
        lines: list[bytes] = []
        if ended:  # else a long line that comes in many pieces would be looked through for each
            lines, self._rest = _lines(bytes(self._rest))
        events = [event for line in lines if (event := self._line(line)) is not None]
        self._bound(len(self._rest))
        return events

    def end(self) -> list[Event]:
        """The last event where its blank line was left out: some upstreams do, at the end of their answer."""
        rest, self._rest = bytes(self._rest), bytearray()
        events = [self._line(line) for line in (rest.rstrip(b"\r"), b"")]
        return [event for event in events if event is not None]

    def _line(self, line: bytes) -> Event | None:
        if self._first:
            self._first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            if not self._data:
                self._name = ""
                return None
            event = Event(self._data[0] if len(self._data) == 1 else b"\n".join(self._data), self._name)
            self._data, self._size, self._name = [], 0, ""
            return event
        field, _, value = line.partition(b":")
        if field == b"data":
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._size += len(value) + 1
            self._bound(0)
        elif field == b"event":
            self._name = value.removeprefix(b" ").decode("utf-8", "replace")
        return None  # comments, ids, retry times and unknown fields say nothing to us

    def _bound(self, unfinished: int) -> None:
        if self._size + unfinished > self._longest:
            raise Oversized(f"an event is longer than {self._longest} bytes")


def _lines(text: bytes) -> tuple[list[bytes], bytearray]:
    """Whole lines, ended by CRLF, LF or CR, and what is left. A CR at the very end may be half a CRLF: it is left."""
    if b"\r" not in text:
        *lines, rest = text.split(b"\n")
        return lines, bytearray(rest)
    held = text.endswith(b"\r")
    *lines, rest = (text[:-1] if held else text).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return lines, bytearray(rest + b"\r" if held else rest)
