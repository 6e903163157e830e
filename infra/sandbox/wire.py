"""Frames between the pool and its worker processes: two lengths, a JSON header, a body that the worker never reads."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

MAX_PAYLOAD_BYTES = 32 * 1024 * 1024
MAX_RESULT_BYTES = 1024 * 1024
MAX_REASON = 300  # characters of an error's text that are kept
LENGTHS = struct.Struct(">II")


def frame(header: dict[str, Any], body: bytes) -> bytes:
    """One frame as bytes."""
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(body)) + head + body


def write_frame(stream: BinaryIO, header: dict[str, Any], body: bytes) -> None:
    """Write one frame and flush it."""
    stream.write(frame(header, body))
    stream.flush()


def read_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Read one frame, waiting for it; None when the other side has closed."""
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head, body = LENGTHS.unpack(lengths)
    header: dict[str, Any] = json.loads(stream.read(head))
    return header, stream.read(body)


def sentence(error: BaseException) -> str:
    """An error as one bounded line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
