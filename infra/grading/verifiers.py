"""The verifiers of text: each is one small pure function, linear in its input, that evaluates nothing.

A new one is a function here and a line in `VERIFIERS`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any, TypedDict

from infra.grading import extract, numbers


class Verdict(TypedDict):
    """What a verifier says, JSON-able."""

    outcome: str  # ok, wrong or no_answer
    reward: float
    parts: dict[str, float]  # named components of the reward
    complete: bool  # the answer is all there, even if sampling ended at its length limit


Verifier = Callable[[str, Any], Verdict]


def verdict(reward: float, right: bool, parts: dict[str, float], complete: bool = False) -> Verdict:
    """The verdict on an answer that is there."""
    return {"outcome": "ok" if right else "wrong", "reward": reward, "parts": parts, "complete": complete}


def no_answer() -> Verdict:
    """The verdict where there is nothing to judge."""
    return {"outcome": "no_answer", "reward": 0.0, "parts": {}, "complete": False}


def exact(completion: str, expected: Any) -> Verdict:
    """Equality with the gold text after normalisation; the answer is the marked one, else the whole completion."""
    marked = extract.marked_answer(completion)
    answer = normalised(extract.without_reasoning(completion) if marked is None else marked)
    if not answer:
        return no_answer()
    right = answer == normalised(str(expected))
    return verdict(float(right), right, {"correct": float(right)})


def letters(completion: str, expected: Any) -> Verdict:
    """The share of positions at which answer and gold agree, over the longer of the two; right only as a whole."""
    answer, gold = completion.strip(), str(expected)
    if not answer:
        return no_answer()
    right = answer == gold
    share = sum(a == b for a, b in zip(answer, gold, strict=False)) / max(len(answer), len(gold))
    return verdict(share, right, {"correct": float(right), "letters": share}, complete=len(answer) >= len(gold))


def number(completion: str, expected: Any) -> Verdict:
    """Numeric equality; the answer is the marked one, else the whole completion, else its last number.

    Raises `ValueError` if the gold is not a number.
    """
    gold = numbers.parse(str(expected))
    if gold is None:
        raise ValueError(f"the expected answer {str(expected)[:80]!r} is not a number")
    marked = extract.marked_answer(completion)
    if marked is None:
        text = extract.without_reasoning(completion).strip()
        answer = numbers.parse(text) or numbers.last_standalone(text)
        if answer is None:
            return no_answer()
    elif not marked:
        return no_answer()
    else:
        answer = numbers.parse(marked)
    right = answer is not None and numbers.same(answer, gold)
    return verdict(float(right), right, {"correct": float(right), "marked": float(marked is not None)})


VERIFIERS: dict[str, Verifier] = {"exact": exact, "letters": letters, "number": number}


def grade(requests: list[dict[str, Any]]) -> list[Verdict]:
    """Sandbox entry: judge several completions, each {verifier, completion, expected}."""
    return [VERIFIERS[request["verifier"]](request["completion"], request["expected"]) for request in requests]


_SYNONYMS = {"\\varnothing": "\\emptyset", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "−": "-", "’": "'", "{,}": ","}
_LAYOUT = re.compile(r"\\left|\\right|\\[!,;:]|[$`]")


def normalised(text: str) -> str:
    """Compatible characters, case, spaces, quotes, closing full stop and LaTeX layout made the same."""
    text = unicodedata.normalize("NFKC", text)
    for written, meant in _SYNONYMS.items():
        text = text.replace(written, meant)
    text = " ".join(_LAYOUT.sub("", text).casefold().split())
    return text.strip(" *").rstrip(".").strip(" \"'*")
