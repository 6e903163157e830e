"""What is stored of the routing policy: versions, and the head that says which one is in force. Pure.

Whatever comes from a disk or from the bus is checked here before it is believed.
"""

from __future__ import annotations

import hashlib
import math

import msgspec

from router.policy.calibration import Calibration

MAX_BYTES = 512 * 1024  # of a document; fits a message of NATS
MAX_WEIGHT = 100.0
DIGEST = 16  # hex digits of a version's name


class Invalid(ValueError):
    """A policy that must not be used; the text is one sentence for people."""


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of the routing policy, as it is stored."""

    model: str  # version of the cold-start model
    calibration: Calibration
    parent: str = ""  # the version in force when it was made; empty = none
    metrics: dict[str, float] = {}  # of its fit
    made_ns: int = 0  # unix ns


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happened to a version last."""

    since_ns: int  # unix ns
    reason: str
    metrics: dict[str, float] = {}  # of its trial


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which version is what. Of two heads, that with the higher serial is newer."""

    serial: int = 0
    history: list[str] = []  # versions put in force, the last one is; empty = the shipped one is
    trial: str = ""  # version that is only asked; empty = none
    notes: dict[str, Note] = {}

    def state(self, version: str) -> str:
        """active, shadow or retired."""
        return "active" if version in self.history[-1:] else "shadow" if version == self.trial else "retired"


def encode(document: Document) -> tuple[str, bytes]:
    """A document's version and bytes."""
    data = msgspec.json.encode(document, order="sorted")
    return hashlib.sha256(data).hexdigest()[:DIGEST], data


def decode(version: str, data: bytes) -> Document:
    """Check a document and read it. Raises `Invalid`."""
    if len(data) > MAX_BYTES:
        raise Invalid(f"routing policy {version}: {len(data)} bytes, more than {MAX_BYTES}")
    if hashlib.sha256(data).hexdigest()[:DIGEST] != version:
        raise Invalid(f"routing policy {version}: the content has another digest; it was cut short or altered")
    try:
        document = msgspec.json.decode(data, type=Document)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Invalid(f"routing policy {version}: not a policy: {error}") from None
    weights = [value for pool in document.calibration.weights.values() for value in pool.values()]
    if not all(math.isfinite(value) and abs(value) <= MAX_WEIGHT for value in weights):
        raise Invalid(f"routing policy {version}: a weight is not a number within ±{MAX_WEIGHT:g}")
    if not all(0 <= value < 1e9 for value in document.calibration.lengths.values()):
        raise Invalid(f"routing policy {version}: a mean answer length is not a number of tokens")
    return document


def decode_head(data: bytes) -> Head:
    """Raises `Invalid`."""
    try:
        head = msgspec.json.decode(data, type=Head)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Invalid(f"head of the routing policies: {error}") from None
    for version in (*head.history, *head.notes, *([head.trial] if head.trial else [])):
        checked(version)
    return head


def checked(version: str) -> str:
    """A version as it stands, which is safe as the name of a file. Raises `Invalid`."""
    if len(version) != DIGEST or not set(version) <= set("0123456789abcdef"):
        raise Invalid(f"routing policies: {version!r} is no version")
    return version
