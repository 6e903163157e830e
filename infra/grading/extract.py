"""Where in a completion the answer is. Linear in the length of the text, whatever the text."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

_BOX_OPENS = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(
    r"(?:^|[^a-z])(?:final answer|answer)(?:\s?is\s?:?|\s?[:=]|\*\*\s?:)[ \t*]*([^\n]*)", re.IGNORECASE
)


@dataclass(frozen=True)
class Extracted:
    """An answer's text, and whether the completion marked it as its answer or it is merely what stood there last."""

    text: str
    marked: bool


def marked_answer(completion: str) -> str | None:
    """The answer a completion marks as such, stripped; None if it marks none.

    In this order: the last `<answer>…</answer>`, the last `\\boxed{…}` with balanced braces, the last `#### …`, the
    last line that says "Answer: …" or "the answer is …". Reasoning inside `<think>…</think>` is no answer.
    """
    text = without_reasoning(completion)
    tagged = _last_tagged(text)
    if tagged is not None:
        boxed = _last_boxed(tagged)
        return (tagged if boxed is None else boxed).strip()
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    _, hashes, after = text.rpartition("####")
    if hashes:
        return after.strip().partition("\n")[0].strip()
    lines = deque(_ANSWER_LINE.finditer(text), maxlen=1)
    return lines[0].group(1).strip(" \t*") if lines else None


def answer(completion: str) -> Extracted | None:
    """The marked answer, else the last line that is not empty; None if there is neither."""
    marked = marked_answer(completion)
    if marked is not None:
        return Extracted(marked, True) if marked else None
    lines = without_reasoning(completion).strip().rsplit("\n", 1)
    return Extracted(lines[-1].strip(), False) if lines[-1] else None


def without_reasoning(completion: str) -> str:
    """What follows the last `</think>`; nothing if a `<think>` is still open."""
    _, closed, after = completion.rpartition("</think>")
    return "" if "<think>" in after else after if closed else completion


def _last_tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len("<answer>") : end]


def _last_boxed(text: str) -> str | None:
    """The contents of the box that opens last among those whose braces are balanced."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    opened: list[tuple[int, bool]] = []  # (where the contents begin, whether it is a box) of every open brace
    best: tuple[int, int] | None = None
    for match in _BOX_OPENS.finditer(text):
        token = match.group()
        if token == "}":
            if opened:
                start, box = opened.pop()
                if box and (best is None or start > best[0]):
                    best = (start, match.start())
        elif token.endswith("{") and len(token) != 2:  # two characters: an escaped brace
            opened.append((match.end(), len(token) > 2))
    return None if best is None else text[best[0] : best[1]]
