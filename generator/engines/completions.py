"""The life of one completion, without a model: its random numbers, and when it ends."""

from __future__ import annotations

import random
from collections.abc import Callable

from contracts.messages import Finish, Sampling

Decode = Callable[[list[int]], str]  # token ids -> text


class StopMatcher:
    """Notices that a completion's text contains a stop string, at the token that completes it.

    Every token carries at least one byte of text, so the last tokens, one for each byte of the longest stop string,
    hold any stop string that ends now; some more absorb what a decoder trims at the start of a text.
    """

    MARGIN = 4  # tokens

    def __init__(self, stops: list[str], decode: Decode) -> None:
        self._stops, self._decode = stops, decode
        self._window = max((len(stop.encode()) for stop in stops), default=0) + self.MARGIN
        self._recent: list[int] = []

    def push(self, token: int) -> bool:
        """True if the text now contains a stop string."""
        if not self._stops:
            return False
        self._recent = [*self._recent[1 - self._window :], token]
        text = self._decode(self._recent)
        return any(stop in text for stop in self._stops)


class Completion:
    """What decides about one completion between two steps of the model."""

    def __init__(
        self, index: int, prompt_length: int, sampling: Sampling, seed: int, window: int, eos: set[int], decode: Decode
    ) -> None:
        self.index = index  # in its group
        self.length = prompt_length  # tokens whose keys and values are in the cache
        self.token = -1  # the last one sampled; not in the cache yet
        self._left = min(sampling.max_tokens, window - prompt_length)
        self._eos = eos
        self._stops = StopMatcher(sampling.stop, decode)
        self._random = random.Random(f"{seed}/{index}")

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next token. 40 bits: products with it round below their bound."""
        return self._random.getrandbits(40) * 2.0**-40

    def accept(self, token: int) -> Finish | None:
        """Take a sampled token; returns why the completion ends with it, if it does."""
        self.token = token
        self._left -= 1
        if token in self._eos or self._stops.push(token):
            return Finish.STOP
        return None if self._left else Finish.LENGTH
