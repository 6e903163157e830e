"""Dead letters: what is kept of a message that could not be used. Pure; `Bus.bury` publishes it."""

from __future__ import annotations

from contracts.messages import DeadLetter
from infra.pull import Raw

PAYLOAD_BYTES = 16 * 1024  # of the body; the whole message stays in its stream until that stream drops it
HEADERS = 32
HEADER_CHARACTERS = 512
REASON_CHARACTERS = 1024


def dead_letter(raw: Raw, *, stream: str, consumer: str, code: str, reason: str, at_ns: int) -> DeadLetter:
    """The record of an unusable message, bounded in size whatever the message holds."""
    return DeadLetter(
        stream=stream,
        subject=raw.subject,
        sequence=raw.sequence,
        consumer=consumer,
        code=code,
        reason=_text(reason, REASON_CHARACTERS),
        headers={
            _text(name, HEADER_CHARACTERS): _text(value, HEADER_CHARACTERS)
            for name, value in list(raw.headers.items())[:HEADERS]
        },
        payload=raw.data[:PAYLOAD_BYTES],
        size=len(raw.data),
        deliveries=raw.deliveries,
        at_ns=at_ns,
    )


def _text(value: str, characters: int) -> str:
    return value[:characters].encode("utf-8", "replace").decode()
