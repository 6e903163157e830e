"""Which requests an engine takes, and which waiting groups start now: pure decisions between two decode steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from generator.engines.base import PromptTooLong, RequestRefused, SampleRequest


@dataclass(frozen=True)
class Demand:
    """What a group asks of the engine."""

    prompt: int  # tokens to prefill
    slots: int  # completions
    span: int  # tokens of its longest possible sequence

    @classmethod
    def of(cls, request: SampleRequest, window: int) -> Demand:
        """What `request` asks of an engine whose model has that window."""
        prompt = len(request.prompt)
        return cls(prompt, request.group_size, min(prompt + request.sampling.max_tokens, window))


@dataclass(frozen=True)
class Limits:
    """What the engine has."""

    slots: int  # completions at once
    cache_tokens: int  # slots times longest sequence, at most
    prefill_tokens: int  # tokens, padding included, in one prefill between two decode steps
    window: int  # tokens of the longest sequence the model can hold
    vocabulary: int  # token ids are below it


def check(request: SampleRequest, limits: Limits) -> None:
    """Raise `RequestRefused`, or its subclass `PromptTooLong`, for a request that the engine could never sample."""
    prompt, sampling = request.prompt, request.sampling
    if not prompt or min(prompt) < 0 or max(prompt) >= limits.vocabulary:
        raise RequestRefused(f"the prompt must be token ids in 0..{limits.vocabulary - 1}, at least one")
    if len(prompt) >= limits.window:
        raise PromptTooLong(f"the prompt of {len(prompt)} tokens leaves no room in a window of {limits.window}")
    if not 1 <= request.group_size <= limits.slots:
        raise RequestRefused(f"a group of {request.group_size} is outside 1..{limits.slots} (max_requests)")
    if not (0 <= sampling.temperature < math.inf and 0 < sampling.top_p <= 1 and sampling.top_k >= 0):
        raise RequestRefused("temperature must be finite and >= 0, top_p in (0, 1], top_k >= 0")
    if sampling.max_tokens < 1 or not all(sampling.stop):
        raise RequestRefused("max_tokens must be >= 1 and no stop string empty")
    span = Demand.of(request, limits.window).span
    if request.group_size * span > limits.cache_tokens:
        raise RequestRefused(
            f"a group of {request.group_size} times {span} tokens is above the cache's {limits.cache_tokens}"
        )


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
