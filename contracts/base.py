"""What every message is made of: the base struct, the vocabulary of field types, and the name of a policy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from contracts.errors import InvalidMessage

INT64_MAX = 2**63 - 1  # what clients in other languages can hold

Nat = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INT64_MAX)]
# `$` alone would let a trailing newline through in Python; the lookahead means the same in every dialect
Token = Annotated[str, Meta(pattern=r"^[a-z0-9-]+(?!\n)$")]
TokenOrNone = Annotated[str, Meta(pattern=r"^[a-z0-9-]*(?!\n)$")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}(?!\n)$")]


class Message(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """Base of every message: a map with `type` (wire tag), `v` (major version) and the fields below."""

    MAJOR: ClassVar[int] = 1

    v: int = 1  # major version; equals the version in the subject

    def check(self) -> None:
        """Raise `InvalidMessage` where the fields contradict each other; types and ranges are checked by the codec."""


def require_finite(where: str, numbers: Iterable[float]) -> None:
    if not all(map(math.isfinite, numbers)):
        raise InvalidMessage(f"{where}: every number must be finite, neither NaN nor infinite")


class PolicyRef(msgspec.Struct, frozen=True, order=True):
    """Which weights: no two different contents ever share a reference."""

    generation: Nat  # how often a learner has started on this run; older generations are refused
    version: Nat  # optimizer steps since the run's first policy
    digest: Digest  # sha256 of the weight bytes, lowercase hex
