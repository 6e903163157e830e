"""A prompt as numbers, for the routing policy: hashed n-grams and a few figures about its form. Pure and vectorised.

The hot path: nothing here loops over characters in Python, and the text is capped first, so that the time of a decision
does not grow with the prompt. Any text is taken, whatever is in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

CAP = 2000  # characters looked at: half from the head, half from the tail
GRAMS = range(3, 6)  # lengths of character n-grams, in bytes of UTF-8
BITS = 15  # of a bucket: 2**BITS buckets for characters' n-grams, as many for words'
BUCKETS = 1 << BITS

Indices = npt.NDArray[np.int32]
Values = npt.NDArray[np.float32]

_GOLDEN32, _FNV32 = np.uint32(0x9E3779B1), np.uint32(0x01000193)
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_LONGEST = 4 * (CAP + 16)  # bytes of a capped text


def _powers(base: int) -> npt.NDArray[np.uint64]:
    powers = np.full(_LONGEST + 1, base, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


_POWERS, _INVERSES = _powers(_BASE), _powers(pow(_BASE, -1, 1 << 64))
_LETTER = np.array([chr(byte).isalnum() if byte < 128 else True for byte in range(256)])


@dataclass(frozen=True)
class Sparse:
    """Buckets that occur in a text, ascending and unique, and 1 + log of how often."""

    indices: Indices  # [n]
    values: Values  # [n]


@dataclass(frozen=True)
class Features:
    """All that is known of a prompt."""

    grams: Sparse  # character n-grams, in [0, BUCKETS)
    words: Sparse  # words and pairs of words, in [0, BUCKETS)
    shape: Values  # [len(SHAPE)] figures about its form


def cap(text: str) -> str:
    """At most CAP characters: what comes first usually says what is asked, what comes last often asks it."""
    return text if len(text) <= CAP else f"{text[: CAP // 2]} … {text[-CAP // 2 :]}"


def extract(text: str) -> Features:
    """The features of any text."""
    capped = cap(text)
    # Lone surrogates, which JSON can hold, become question marks.
    folded = f" {' '.join(capped.lower().split())} ".encode("utf-8", "replace")[:_LONGEST]
    letters = np.frombuffer(folded, dtype=np.uint8)
    return Features(_counted(_gram_hashes(letters)), _counted(_word_hashes(letters)), _shape(capped, len(text)))


def _counted(buckets: npt.NDArray[np.uint32]) -> Sparse:
    indices, counts = np.unique(buckets, return_counts=True)
    return Sparse(indices.astype(np.int32), (1 + np.log(counts)).astype(np.float32))


def _gram_hashes(letters: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Buckets of all n-grams: each length's hashes from those of the length before."""
    hashes = letters.astype(np.uint32)
    found = []
    for length in range(2, GRAMS.stop):
        hashes = hashes[:-1] * _FNV32 + letters[length - 1 :]
        if length in GRAMS:
            found.append(((hashes ^ np.uint32(length * 0x85EBCA6B & 0xFFFFFFFF)) * _GOLDEN32) >> np.uint32(32 - BITS))
    return np.concatenate(found)


def _word_hashes(letters: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Buckets of words and of pairs of neighbours.

    A word's hash is the polynomial of its bytes, read off the running sum over the text: (S[end] - S[start]) / B^start.
    """
    edges = np.diff(_LETTER[letters].astype(np.int8), prepend=0, append=0)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    sums = np.zeros(len(letters) + 1, dtype=np.uint64)
    np.cumsum((letters.astype(np.uint64) + np.uint64(1)) * _POWERS[: len(letters)], out=sums[1:])
    words = _mixed((sums[ends] - sums[starts]) * _INVERSES[starts])
    pairs = _mixed(words[:-1] * np.uint64(0x94D049BB133111EB) + words[1:])
    return (np.concatenate([words, pairs]) >> np.uint64(64 - BITS)).astype(np.uint32)


def _mixed(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (hashes ^ (hashes >> np.uint64(32))) * np.uint64(_BASE)


# Figures of form that are counts of characters, by the characters they count.
_MARKS = {
    "lines": "\n",
    "stops": ".!",
    "questions": "?",
    "commas": ",;:",
    "digits": "0123456789",
    "capitals": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "operators": "=+*/^<>~|",
    "backslashes": "\\_",
    "brackets": "()[]{}",
    "money": "$%",
    "quotes": "\"'`",
    "dashes": "-",
}
_MARK = np.full(256, len(_MARKS) + 1, dtype=np.intp)
_MARK[128:] = len(_MARKS)
for _place, _characters in enumerate(_MARKS.values()):
    _MARK[[ord(_character) for _character in _characters]] = _place

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# Words that tell how much reasoning is asked for, by what they count as.
_CUES = {
    "number words": "two three four five six seven eight nine ten dozen hundred",
    "parts and multiples": "half third quarter twice double triple thrice times percent",
    "each": "each every per",
    "comparisons": "more less fewer than least most only",
    "rests": "left remaining rest remain another other",
    "conditions": "if suppose unless would then when",
    "order": "first second before after next last originally",
    "time": "day days week weeks month months year years hour hours minute minutes old",
    "negations": "not except never no false incorrect cannot without",
    "asks": "what which who when where",
    "amounts": "many much total altogether",
    "thought": "why how explain prove show derive design compare because following",
}
_CUE = {word: place for place, words in enumerate(_CUES.values()) for word in words.split()}
_WORD = re.compile(r"[^\W\d_]+")
_WORDLIKE = re.compile(r"\w+")
_ITEM = re.compile(r"^\(?(?:[a-j]|\d\d?)[.)][ \t]+(\S.*)", re.MULTILINE)
ITEMS = 8  # of a list that are looked at
_SHARED = ("items share, mean", "items share, most", "items and rest share, mean", "items and rest share, most")
SHAPE = (
    "characters", "words", "distinct words", "letters per word", "longest line", "longest sentence",
    "numbers", "distinct numbers", "largest number", "smallest number", "fractions", "large numbers",
    *_MARKS, "foreign", *_CUES,
    *(f"{what} {figure}" for what in ("words", "letters") for figure in _SHARED), "numeric items", "ratio of items",
)  # fmt: skip


def _shape(capped: str, characters: int) -> Values:
    """log(1 + figure) for each of SHAPE; `characters` is the length before the cap."""
    marks = np.bincount(_MARK[np.frombuffer(capped.encode("utf-8", "replace"), np.uint8)], minlength=len(_MARKS) + 2)
    words = _WORD.findall(capped.lower())
    cues = [0] * len(_CUES)
    for word in words:
        place = _CUE.get(word)
        if place is not None:
            cues[place] += 1
    found = [number.replace(",", "") for number in _NUMBER.findall(capped)]
    numbers = [min(float(number), 1e12) for number in found if len(number) < 300]
    figures = [
        characters,
        len(words),
        len(set(words)),
        sum(map(len, words)) / max(len(words), 1),
        max(map(len, capped.split("\n"))),
        max(map(len, capped.replace("? ", ". ").split(". "))),
        len(numbers),
        len(set(numbers)),
        max(numbers, default=0.0),
        min(numbers, default=0.0),
        sum("." in number for number in found),
        sum(number >= 100 for number in numbers),
        *marks[:-1],
        *cues,
        *_list_figures(capped.lower()),
    ]
    return np.log1p(np.array(figures, dtype=np.float32))


def _list_figures(text: str) -> list[float]:
    """How alike the items of a list are, to each other and to the rest; zeros where there is no list.

    Items are often answers to choose from: the more alike they are, the closer the choice.
    """
    items = _ITEM.findall(text)[:ITEMS]
    if len(items) < 2:
        return [0.0] * (2 * len(_SHARED) + 2)
    rest = _ITEM.sub("", text)
    words, letters = _shared(_words, items, rest), _shared(_trigrams, items, rest)
    starts = [_NUMBER.match(item.lstrip("-$(")) for item in items]
    numbers = [min(float(start[0].replace(",", "")), 1e12) for start in starts if start and len(start[0]) < 300]
    positive = [number for number in numbers if number > 0] or [1.0]
    return [*words, *letters, len(numbers) / len(items), min(max(positive) / min(positive) - 1, 1e12)]


def _words(text: str) -> set[object]:
    return set(_WORDLIKE.findall(text))


def _trigrams(text: str) -> set[object]:
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    return set((letters[:-2] << 42 | letters[1:-1] << 21 | letters[2:]).tolist())


def _shared(parts: Callable[[str], set[object]], items: list[str], rest: str) -> list[float]:
    """_SHARED: Jaccard similarity of two items; share of an item's parts that the rest has too."""
    sets, others = [parts(item) for item in items], parts(rest)
    common = [(len(one & other), len(one) + len(other)) for one, other in combinations(sets, 2)]
    among = [both / max(total - both, 1) for both, total in common]
    within = [len(each & others) / max(len(each), 1) for each in sets]
    return [sum(among) / len(among), max(among), sum(within) / len(within), max(within)]
