"""Which waiting groups start now: a pure decision between two decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """What a group asks of the engine."""

    prompt: int  # tokens to prefill
    slots: int  # completions
    span: int  # tokens of its longest possible sequence


@dataclass(frozen=True)
class Limits:
    """What the engine has."""

    slots: int  # completions at once
    cache_tokens: int  # slots times longest sequence, at most
    prefill_tokens: int  # tokens, padding included, in one prefill between two decode steps


def admit(waiting: Sequence[Demand], active_slots: int, active_span: int, limits: Limits) -> int:
    """How many groups from the head of the queue to prefill together now; never past one that does not fit.

    A prompt longer than `prefill_tokens` goes alone, and is then prefilled in pieces.
    """
    slots, span, longest = active_slots, active_span, 0
    for count, group in enumerate(waiting):
        slots, span, longest = slots + group.slots, max(span, group.span), max(longest, group.prompt)
        fits = slots <= limits.slots and slots * span <= limits.cache_tokens
        if not fits or (count and (count + 1) * longest > limits.prefill_tokens):
            return count
    return len(waiting)
