"""Where in an answer the part is that can be checked. Pure; linear in the length of the text, whatever the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from infra.grading import extract, numbers

MAX_STARTS = 32  # places in prose at which a JSON value is looked for
_FENCE = re.compile(r"([ \t>]{0,12})(`{3,}|~{3,})[ \t]*([^`]*)")
_TAG = re.compile(r"[\w+#.-]+")
_BRACKETS = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|[{}\[\]]')


@dataclass(frozen=True)
class Block:
    """The contents of a fenced block."""

    language: str  # first word after the fence, in lower case; empty where there is none
    text: str


def blocks(answer: str) -> list[Block]:
    """All fenced blocks in order, reasoning left out. A fence that is never closed reaches to the end."""
    found: list[Block] = []
    lines = extract.without_reasoning(answer).split("\n")
    position = 0
    while position < len(lines):
        opening = _FENCE.fullmatch(lines[position])
        position += 1
        if opening is None or len(opening.group(3)) > 200:
            continue
        indent, fence, info = opening.groups()
        start = position
        while position < len(lines) and not _closes(lines[position], fence):
            position += 1
        tag = _TAG.search(info)
        text = "\n".join(_unindented(line, indent) for line in lines[start:position])
        language = tag.group().lower().lstrip(".") if tag else ""
        found.append(Block(language, text))
        position += 1
    return found


def _closes(line: str, fence: str) -> bool:
    rest = line.strip(" \t\r>")
    return len(rest) >= len(fence) and not rest.strip(fence[0])


def _unindented(line: str, indent: str) -> str:
    line = line.removesuffix("\r")
    if line.startswith(indent):
        return line[len(indent) :]
    return line.lstrip(" \t") if len(line) - len(line.lstrip(" \t")) < len(indent) else line


def code(answer: str, languages: frozenset[str]) -> list[Block]:
    """Blocks tagged as one of `languages`; where there are none, those without a tag."""
    every = blocks(answer)
    tagged = [block for block in every if block.language in languages]
    return tagged or [block for block in every if not block.language]


def plain(answer: str) -> str | None:
    """The answer itself, stripped, reasoning left out, where it holds no fenced block."""
    text = extract.without_reasoning(answer)
    return None if any(_FENCE.fullmatch(line) for line in text.split("\n")) else text.strip()


def json_text(answer: str, *, bare: bool = False) -> str | None:
    """The JSON value in an answer, as text that may or may not be valid: bare, in a fence, or in prose.

    With `bare` it is always the whole answer. None where nothing looks like an object or a list.
    """
    text = extract.without_reasoning(answer).strip()
    if bare:
        return text
    fenced = [block.text for block in code(answer, frozenset({"json", "jsonc", "json5"})) if block.text.strip()]
    if fenced:
        return next((text for text in fenced if _is_json(text)), fenced[0])
    if _is_json(text):
        return text
    found = list(_values(text))
    return next((value for value in found if _is_json(value)), next((v for v in found if v.startswith("{")), None))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except RecursionError:
        return True  # too deep for this look at it, but the text to judge
    except ValueError:
        return False
    return True


def _values(text: str) -> Iterator[str]:
    """From each of the first places where an object or a list opens outside another to where its brackets close."""
    start, depth, starts = 0, 0, 0
    for match in _BRACKETS.finditer(text):
        token = match.group()
        if token in ("{", "["):
            if depth == 0:
                start, starts = match.start(), starts + 1
                if starts > MAX_STARTS:
                    return
            depth += 1
        elif token in ("}", "]") and depth:
            depth -= 1
            if depth == 0:
                yield text[start : match.end()]
    if depth:
        yield text[start:]


def number(answer: str) -> numbers.Number | None:
    """The answer's final number: the marked one, else the whole answer, else the last number that stands alone."""
    marked = extract.marked_answer(answer)
    if marked:
        value = numbers.parse(marked) or numbers.last_standalone(marked)
        if value is not None:
            return value
    text = extract.without_reasoning(answer).strip()
    return numbers.parse(text) or numbers.last_standalone(text)
