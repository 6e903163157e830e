"""Questions a small model half knows, with two worked examples of the same kind before each.

The prompt ends with "A:" without a space: tokenizers with byte-level pieces encode the answer with its leading space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from contracts.messages import Split
from generator.environments.base import Item, first_in, make_item, split_of

T = TypeVar("T")

EXAMPLES = 2
MAX_TRIES = 100  # of one seed; none of them is in the held-out tenth once in 40,000 seeds
CONSONANTS, VOWELS = "bdlmnprstvz", "aeiou"
TWO_DIGITS, THREE_DIGITS = range(10, 100), range(100, 1000)
NAMES = (
    "Tom", "Ann", "Bob", "Eve", "Sam", "Joe", "Kim", "Max", "Amy", "Ben", "Dan", "Jim", "Lee", "Mia", "Ned", "Pam",
    "Ray", "Sue", "Tim", "Zoe",
)  # fmt: skip


class Choices:
    """Turns an index into a sequence of choices, and different indices below `size` into different ones."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.size = 1  # of the space of all choices made so far

    def one(self, options: Sequence[T]) -> T:
        """One of the options."""
        self.size *= len(options)
        self.index, position = divmod(self.index, len(options))
        return options[position]

    def distinct(self, options: Sequence[T], count: int) -> list[T]:
        """Different options, in an order that is part of the choice."""
        pool = list(options)
        return [pool.pop(self.one(range(len(pool)))) for _ in range(count)]

    def word(self, length: int) -> str:
        """A pronounceable word: consonant and vowel in turn."""
        return "".join(self.one(VOWELS if position % 2 else CONSONANTS) for position in range(length))


Kind = Callable[[Choices], tuple[str, str]]  # question and answer


def larger(choose: Choices) -> tuple[str, str]:
    small, large = choose.one(TWO_DIGITS), choose.one(THREE_DIGITS)
    a, b = choose.one([(small, large), (large, small)])
    return f"Which is larger, {a} or {b}?", str(large)


def first_letter(choose: Choices) -> tuple[str, str]:
    word = choose.word(5)
    return f"What is the first letter of {word}?", word[0]


def parity(choose: Choices) -> tuple[str, str]:
    number = choose.one(range(10, 10_000))
    return f"Is {number} even or odd?", "odd" if number % 2 else "even"


def middle_number(choose: Choices) -> tuple[str, str]:
    numbers = choose.distinct(TWO_DIGITS, 3)
    return "Which number is in the middle: {}, {}, {}?".format(*numbers), str(numbers[1])


def middle_word(choose: Choices) -> tuple[str, str]:
    words = [choose.word(3) for _ in range(3)]
    return "Which word is in the middle: {}, {}, {}?".format(*words), words[1]


def middle_person(choose: Choices) -> tuple[str, str]:
    names = choose.distinct(NAMES, 3)
    return "{}, {} and {} stand in line. Who is in the middle?".format(*names), names[1]


def last_person(choose: Choices) -> tuple[str, str]:
    names = choose.distinct(NAMES, 3)
    return "{}, {} and {} stand in line. Who is last?".format(*names), names[2]


KINDS: tuple[Kind, ...] = (
    larger,
    first_letter,
    parity,
    middle_number,
    middle_word,
    middle_person,
    last_person,
)


class QuickFacts:
    """Kinds take turns by seed; the first seeds of either split give different questions."""

    name = "quick-facts"

    def __init__(self) -> None:
        self._spaces = [_Space(kind) for kind in KINDS]

    def item(self, seed: int, split: Split) -> Item:
        """See `Environment.item`; takes some tens of microseconds."""
        turn, choice = divmod(seed, len(self._spaces))
        space = self._spaces[choice]
        # tries of neighbouring seeds never meet: each seed walks its own residue class
        stride = space.size // MAX_TRIES
        asked = turn % stride
        return first_in(split, lambda attempt: space.item(asked + attempt * stride), self.name, MAX_TRIES)


class _Space:
    """All questions of one kind, scattered so that neighbouring indices have little in common."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        choices = Choices(0)
        kind(choices)
        self.size = choices.size
        self._step = int(self.size * (math.sqrt(5) - 1) / 2)
        while math.gcd(self._step, self.size) != 1:
            self._step += 1

    def _ask(self, index: int) -> tuple[str, str]:
        return self._kind(Choices(index * self._step % self.size))

    def item(self, index: int) -> Item:
        """The item at `index`. The question alone decides its side of the split, and no held-out one is ever shown as a
        worked example."""
        question, answer = self._ask(index)
        random = Random(f"{question} {answer}")  # examples belong to the question
        shown: list[str] = []
        while len(shown) < EXAMPLES:
            asked, answered = self._ask(random.randrange(self.size))
            if asked != question and split_of(make_item(asked, answered, "exact")) is Split.TRAIN:
                shown.append(f"Q: {asked}\nA: {answered}\n")
        return make_item("".join(shown) + f"Q: {question}\nA:", answer, "exact", content=question)
