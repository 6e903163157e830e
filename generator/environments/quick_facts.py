"""Questions a small model half knows, with two worked examples of the same kind before each.

The prompt ends with "A:" without a space: tokenizers with byte-level pieces encode the answer with its leading space.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from contracts.messages import Split
from generator.environments.base import Item, first_in, make_item

EXAMPLES = 2
MAX_TRIES = 100  # of one seed; none of them is in the held-out tenth once in 40,000 seeds
_NUMBERS = range(10, 100)
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_WORDS_OF_4 = (len(_CONSONANTS) * len(_VOWELS)) ** 2
_PAIRS = len(_NUMBERS) * (len(_NUMBERS) - 1)


@dataclass(frozen=True)
class Kind:
    """One kind of question: `ask(index)` gives question and answer for every index in [0, size), all different."""

    size: int
    ask: Callable[[int], tuple[str, str]]


def _distinct(index: int, count: int) -> list[int]:
    """The `index`-th ordered choice of `count` different two-digit numbers."""
    pool = list(_NUMBERS)
    chosen = []
    for _ in range(count):
        index, position = divmod(index, len(pool))
        chosen.append(pool.pop(position))
    return chosen


def _word(index: int, length: int) -> str:
    """The `index`-th pronounceable word of that length: consonant and vowel in turn."""
    letters = []
    for position in range(length):
        alphabet = _VOWELS if position % 2 else _CONSONANTS
        index, letter = divmod(index, len(alphabet))
        letters.append(alphabet[letter])
    return "".join(letters)


def _larger(index: int) -> tuple[str, str]:
    a, b = _distinct(index, 2)
    return f"Which is larger, {a} or {b}?", str(max(a, b))


def _smaller(index: int) -> tuple[str, str]:
    a, b = _distinct(index, 2)
    return f"Which is smaller, {a} or {b}?", str(min(a, b))


def _largest(index: int) -> tuple[str, str]:
    a, b, c = _distinct(index, 3)
    return f"Which is the largest, {a}, {b} or {c}?", str(max(a, b, c))


def _parity(index: int) -> tuple[str, str]:
    number = index + _NUMBERS.start
    return f"Is {number} even or odd?", "odd" if number % 2 else "even"


def _first_letter(index: int) -> tuple[str, str]:
    word = _word(index // 2, 4 + index % 2)
    return f"What is the first letter of {word}?", word[0]


def _first_digit(index: int) -> tuple[str, str]:
    number = index + 100
    return f"What is the first digit of {number}?", str(number)[0]


KINDS: dict[str, Kind] = {
    "larger of two": Kind(_PAIRS, _larger),
    "smaller of two": Kind(_PAIRS, _smaller),
    "largest of three": Kind(_PAIRS * (len(_NUMBERS) - 2), _largest),
    "even or odd": Kind(9_990, _parity),
    "first letter": Kind(2 * _WORDS_OF_4, _first_letter),
    "first digit": Kind(9_900, _first_digit),
}


class QuickFacts:
    """Kinds take turns by seed; the first seeds of either split give different questions."""

    name = "quick-facts"

    def __init__(self) -> None:
        self._kinds = list(KINDS.values())

    def item(self, seed: int, split: Split) -> Item:
        """See `Environment.item`; takes some tens of microseconds."""
        turn, choice = divmod(seed, len(self._kinds))
        kind = self._kinds[choice]
        # tries of neighbouring seeds never meet: each seed walks its own residue class
        stride = kind.size // MAX_TRIES
        return first_in(split, lambda attempt: _item(kind, turn + attempt * stride), self.name, MAX_TRIES)


def _item(kind: Kind, index: int) -> Item:
    index = index * _coprime(kind.size) % kind.size
    question, answer = kind.ask(index)
    random = Random(index)  # the examples belong to the question, so that its hash stands for it
    shown = [kind.ask((index + 1 + random.randrange(kind.size - 1)) % kind.size) for _ in range(EXAMPLES)]
    prompt = "".join(f"Q: {asked}\nA: {answered}\n" for asked, answered in shown)
    return make_item(f"{prompt}Q: {question}\nA:", answer, "exact")


def _coprime(size: int) -> int:
    """A multiplier that scatters consecutive indices over [0, size) without meeting one twice."""
    step = int(size * (math.sqrt(5) - 1) / 2)
    while math.gcd(step, size) != 1:
        step += 1
    return step
