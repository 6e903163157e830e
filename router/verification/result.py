"""What a verifier says about an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from contracts.routing import Verdict

MAX_REASON = 400  # characters
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")


class BadCheck(ValueError):
    """A check that cannot be made whatever the answer: an unknown verifier, or arguments it cannot use."""


@dataclass(frozen=True)
class Result:
    """A verdict, and a sentence that helps whoever answers next; at most `MAX_REASON` characters, on one line."""

    verdict: Verdict
    reason: str


def passed(reason: str = "") -> Result:
    """The answer is right as far as the verifier can see."""
    return Result(Verdict.PASSED, sentence(reason))


def failed(reason: str) -> Result:
    """The answer is wrong."""
    return Result(Verdict.FAILED, sentence(reason))


def undecided(reason: str) -> Result:
    """Nothing is known about the answer."""
    return Result(Verdict.UNDECIDED, sentence(reason))


def together(results: Iterable[Result]) -> Result:
    """Of an answer in parts: the first that is wrong, else the first of which nothing is known, else right."""
    found = list(results)
    for verdict in (Verdict.FAILED, Verdict.UNDECIDED):
        for result in found:
            if result.verdict is verdict:
                return result
    return passed()


def sentence(text: str) -> str:
    """Text as one bounded line without control characters and lone surrogates."""
    head = _CONTROLS.sub(" ", text[: 4 * MAX_REASON])
    line = " ".join(head.split())
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 1] + "…"
