"""Dead letters: messages that could not be used, kept with the reason."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from contracts.messages import DeadLetter
from contracts.subjects import DLQ
from infra.pull import Raw

if TYPE_CHECKING:
    from infra.bus import Bus

log = structlog.get_logger(__name__)

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


async def bury(bus: Bus, raw: Raw, *, stream: str, consumer: str, code: str, reason: str) -> None:
    """Publish the dead letter of a message, once per message and consumer. Raises as `Bus.publish` does."""
    log.warning("dead letter", stream=stream, subject=raw.subject, sequence=raw.sequence, code=code, reason=reason)
    letter = dead_letter(raw, stream=stream, consumer=consumer, code=code, reason=reason, at_ns=time.time_ns())
    await bus.publish(DLQ, letter, id=f"dlq.{stream}.{raw.sequence}.{consumer}.{code}", stream=stream.lower())


def _text(value: str, characters: int) -> str:
    return value[:characters].encode("utf-8", "replace").decode()
