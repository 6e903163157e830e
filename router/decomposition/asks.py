"""The separate asks of one request, found by its form: list items, questions, sentences. Pure, linear in the text.

What stands before and behind a list decides whether its items are asks of their own or parts and data of one.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from router.decomposition.kinds import sentences
from router.decomposition.lexicon import lexicon, words
from router.decomposition.text import parts

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
_CLAUSE = re.compile(
    r"(?:[,;]\s+(?:and\s+)?(?:then\s+|also\s+)?|\s+and\s+(?:then\s+|also\s+)?|，(?:然后|再|并)?|；)(?=[^\W\d_])"
)


@dataclass(frozen=True)
class Asks:
    """What was found: asks in order, what they share, and whether their answers are to be made one."""

    items: list[str]
    context: str = ""  # statements and blocks before and behind, said once in each
    joined: bool = False  # the request wants one thing made of the answers
    titles: list[str] = field(default_factory=list)  # of file-wise work; empty = made from the items


@dataclass(frozen=True)
class _Cues:
    announces: re.Pattern[str]
    one_thing: re.Pattern[str]
    only_some: re.Pattern[str]
    leads: re.Pattern[str]
    previous: re.Pattern[str]
    all_previous: re.Pattern[str]
    numbered: re.Pattern[str]
    joins: re.Pattern[str]
    shows: re.Pattern[str]
    constrains: re.Pattern[str]
    each_file: re.Pattern[str]
    across_files: re.Pattern[str]


@cache
def cues() -> _Cues:
    """The phrases of asks.toml, compiled."""
    data = tomllib.loads((resources.files(__package__) / "asks.toml").read_text("utf-8"))
    return _Cues(
        **{name: re.compile("|".join(f"(?:{each})" for each in group), re.IGNORECASE) for name, group in data.items()}
    )


def is_ask(sentence: str) -> bool:
    """Whether a sentence asks for something."""
    if _asks_something(sentence) or lexicon().opening(sentence):
        return True
    lead, comma, rest = sentence[:400].partition(", ")
    return bool(comma and cues().leads.match(lead) and lexicon().opening(rest) - {"question"})


def _is_item(sentence: str) -> bool:
    """Whether an item of a list is an ask. Without a question mark, "what" and "is" begin options and halves."""
    return is_ask(sentence) and (_asks_something(sentence) or lexicon().opening(sentence) != {"question"})


def listed(text: str) -> Asks | None:
    """The items of the one list of a request, where each is an ask of its own and nothing around it says otherwise."""
    found = _split_list(text) or _split_list(_ordinals_as_list(text))
    if found is None:
        return None
    before, items, behind = found
    if len(items) < 2 or not all(_is_item(_first_sentence(item)) for item in items):
        return None
    announced, trailing = _announced(before), _trailing(behind)
    if announced is None or trailing is None:
        return None
    context = "\n\n".join(each for each in (announced[0], trailing[0]) if each)
    return Asks(items, context, announced[1] or trailing[1])


def questions(text: str) -> Asks | None:
    """Several questions that stand on their own, and nothing else but an announcement."""
    if "```" in text or text.count("?") + text.count("？") < 2:
        return None
    found = [each for each in sentences(text) if words(each)]
    while found and not _asks_something(found[0]):
        if not cues().announces.fullmatch(found[0].strip(" .:!？?")):
            return None
        found = found[1:]
    lines = sum(1 for line in text.splitlines() if line.strip())
    if len(found) < 2 or (len(found) == 2 and lines < 2):
        return None
    for index, each in enumerate(found):
        alone = (
            _asks_something(each)
            and len(each) >= 12
            and not re.search(r"\b(?:you|your|my|our|else)\b", each, re.IGNORECASE)
        )
        if not alone or (index and cues().previous.search(each)) or "question" not in lexicon().opening(each):
            return None
    return Asks(found)


def operations(text: str) -> Asks | None:
    """Several things to be done with one fenced block, each a sentence or a clause of its own."""
    prose, blocks = parts(text)
    if not 1 <= len(blocks) <= 3:
        return None
    items: list[str] = []
    context: list[str] = []
    for sentence in sentences(prose):
        if cues().announces.fullmatch(sentence.strip(" .:!")) and not items:
            continue
        if cues().joins.search(sentence):
            return None
        if items and sentence[:1].islower():
            return None  # goes on with the sentence before the block
        if not is_ask(sentence):
            context.append(sentence)
            continue
        clauses = [sentence]
        for found in reversed(list(_CLAUSE.finditer(sentence))[:8]):
            head, tail = clauses[0][: found.start()], clauses[0][found.end() :]
            if lexicon().opening(tail) - {"question"} and lexicon().opening(head):
                clauses[:1] = [head, tail]
        items += [each.strip(" ,;") for each in clauses]
    if len(items) < 2:
        return None
    shown = "\n\n".join(
        f"{(each.before and each.before not in prose and each.before) or ''}{_fenced(each.info, each.text)}"
        for each in blocks
    )
    return Asks(items, "\n\n".join(each for each in (" ".join(context), shown) if each))


def files(text: str, named: dict[str, str], infos: dict[str, str]) -> Asks | None:
    """One thing to be done to each of several files, one by one; `infos` = what stands on their fences."""
    prose, blocks = parts(text)
    if len(named) < 2 or len(named) != len(blocks):
        return None
    said = [
        each for each in sentences(prose) if not any(name in each and len(each) <= len(name) + 24 for name in named)
    ]
    asked = [each for each in said if is_ask(each)]
    if len(asked) != 1 or not cues().each_file.search(" ".join(said)) or cues().across_files.search(" ".join(said)):
        return None
    ask = " ".join(said)
    items = [f"{ask}\n\nThe file is `{name}`:\n\n{_fenced(infos[name], body)}" for name, body in named.items()]
    return Asks(items, titles=list(named))


def _fenced(info: str, body: str) -> str:
    longest = max((len(run) for run in re.findall(r"`{3,}", body)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{info}\n{body.rstrip()}\n{fence}"


def _asks_something(sentence: str) -> bool:
    return sentence.rstrip(" *_\"'”)").endswith(("?", "？"))


def _first_sentence(item: str) -> str:
    found = sentences(item.strip().lstrip("*_ "))
    return found[0] if found else ""


def _split_list(text: str) -> tuple[str, list[str], str] | None:
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


def _ordinals_as_list(text: str) -> str:
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


def _announced(before: str) -> tuple[str, bool] | None:
    """What stands before a list, less its announcement: (what the items share, whether the answers are to be made one).

    None = it asks for something itself, or says that the list is one thing, or that not all of it is asked for; or it
    states something and announces nothing: the parts of an exam's problem, the options of a choice.
    """
    prose, blocks = parts(before)
    said = sentences(prose)
    if cues().only_some.search(prose):
        return None
    kept, joined = before, False
    announced = not said
    for index, sentence in enumerate(said):
        last = index == len(said) - 1
        join = cues().joins.search(sentence)
        asked = re.sub(r"(?:[\s,]+(?:and|then|und|et|y))+\s*$", "", sentence[: join.start()]) if join else sentence
        if cues().announces.fullmatch(asked.strip(" .:：!*#,")):
            kept = kept.replace(sentence, "", 1)
            joined |= join is not None
            announced = True
        elif lexicon().greets(sentence):
            kept = kept.replace(sentence, "", 1)
        elif is_ask(sentence) or (last and _heads_one_thing(sentence, bool(blocks))):
            return None
        else:
            announced |= bool(blocks) and cues().shows.search(sentence) is not None
    return (kept.strip(), joined) if announced else None


def _heads_one_thing(sentence: str, blocks: bool) -> bool:
    """Whether what follows a sentence before a list is parts or data of one thing."""
    introduces = sentence.endswith((":", "：")) and not (blocks and cues().shows.search(sentence))
    return introduces or cues().one_thing.search(sentence) is not None


def _trailing(behind: str) -> tuple[str, bool] | None:
    """What stands behind a list: (what the items share, whether the answers are to be made one). None = another ask."""
    prose, _ = parts(behind)
    kept, joined = behind, False
    for sentence in sentences(prose):
        if cues().joins.search(sentence):
            joined = True
            kept = kept.replace(sentence, "", 1)
        elif is_ask(sentence) and not cues().constrains.match(sentence):
            return None
        elif lexicon().greets(sentence):
            kept = kept.replace(sentence, "", 1)
    return kept.strip(), joined
