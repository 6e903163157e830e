"""The one list of a request, by its form: what stands before it, its items, and what stands behind. Pure."""

from __future__ import annotations

import re

_LABEL = (
    r"(?:step|task|question|part|item|q|schritt|aufgabe|frage|étape|tâche|paso|tarea|pregunta|passo|pergunta|шаг|задача|"
    r"вопрос|задание|任务|问题|步骤|質問|タスク)"
)
_NUMBERED = re.compile(
    rf"^ {{0,3}}(?:#{{1,4}} )?(?:\*\*)?(?:{_LABEL}\s*#?|第)?\(?(\d{{1,2}}|[a-h]|[一二三四五六七八九])"
    r"(?:[.):：、）]|(?:个|題|题)[:：]?)(?:\*\*)?[ \t]*(?=\S)",
    re.IGNORECASE,
)
_BULLET = re.compile(r"^ {0,3}[-*•+–][ \t]+(?:\[ \][ \t]+)?(?=\S)")
_ORDINAL = re.compile(
    r"(?:(?<=\n)|(?<=^)|(?<=[.!?;:] ))(first|second|third|fourth|fifth|sixth|finally|lastly|last)(?:ly)?"
    r"(?: of all)?[,:] (?=\S)",
    re.IGNORECASE,
)
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_CHINESE = "一二三四五六七八九"


def split(text: str) -> tuple[str, list[str], str] | None:
    """(before, items, behind) of the one top-level list; None where there is none, or several, or it miscounts."""
    lines = text.split("\n")
    if len(lines) > 2000:
        return None
    before: list[str] = []
    behind: list[str] = []
    items: list[list[str]] = []
    style, fence, blank, expected = "", "", False, 1
    for line in lines:
        marker = _FENCE.match(line)
        if marker:
            fence = "" if fence and marker[1].startswith(fence) else fence or marker[1]
        number = None if fence or marker else _NUMBERED.match(line)
        bullet = None if fence or marker or number else _BULLET.match(line)
        if style != "bullet" and number and _value(number[1]) == expected and not behind:
            style = "number"
            expected += 1
            items.append([line[number.end() :]])
        elif style == "number" and number and not line.startswith("  "):
            return None  # counts otherwise: not one list of steps
        elif style != "number" and bullet and not behind:
            style = "bullet"
            items.append([line[bullet.end() :]])
        elif not items:
            before.append(line)
        elif behind or (blank and line.strip() and not line.startswith((" ", "\t")) and not fence and not marker):
            if (number or bullet) and not fence:
                return None
            behind.append(line)
        else:
            items[-1].append(line)
        blank = not line.strip()
    if items and not behind:
        behind = _cut_off(items[-1])
    made = ["\n".join(item).strip() for item in items]
    return ("\n".join(before).strip(), made, "\n".join(behind).strip()) if made else None


def _cut_off(item: list[str]) -> list[str]:
    """Take from the last item what follows it without an indent: nothing shows that it belongs to it."""
    fenced = False
    for index, line in enumerate(item):
        fenced ^= _FENCE.match(line) is not None
        if index and line.strip() and not fenced and not line.startswith((" ", "\t")) and not _FENCE.match(line):
            behind = item[index:]
            del item[index:]
            return behind
    return []


def _value(label: str) -> int:
    if label.isdigit():
        return int(label)
    return _CHINESE.index(label) + 1 if label in _CHINESE else ord(label.lower()) - ord("a") + 1


def written_out(text: str) -> str:
    """A text whose sentences begin with first, second, ... finally, written as a numbered list; others as they are."""
    found = list(_ORDINAL.finditer(text)) if "first" in text or "First" in text else []
    if not 3 <= len(found) <= 8 or "```" in text[found[0].start() :]:
        return text
    for index, each in enumerate(found):
        word = each[1].lower()
        if word != (_ORDINALS[index] if index < len(_ORDINALS) else "") and not (
            index == len(found) - 1 and word[0] in "fl"
        ):
            return text
    pieces = [text[: found[0].start()]]
    for index, each in enumerate(found):
        end = found[index + 1].start() if index + 1 < len(found) else len(text)
        pieces.append(f"{index + 1}. {text[each.end() : end].strip()}")
    return "\n".join(pieces)
