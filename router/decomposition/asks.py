"""The separate asks of one request, found by its form: list items, questions, sentences. Pure, linear in the text.

What stands before and behind a list decides whether its items are asks of their own or parts and data of one.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from router.decomposition import lists
from router.decomposition.kinds import sentences
from router.decomposition.lexicon import lexicon, words
from router.decomposition.text import fenced, parts

_CLAUSE = re.compile(
    r"(?:[,;]\s+(?:and\s+)?(?:then\s+|also\s+)?|(?<!\s)\s+and\s+(?:then\s+|also\s+)?|，(?:然后|再|并)?|；)(?=[^\W\d_])"
)

_CONNECTIVES = re.compile(r"(?<![\s,])(?:[\s,]+(?:and|then|und|et|y))+\s*$")


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
    announcing: re.Pattern[str]
    single: re.Pattern[str]
    one_thing: re.Pattern[str]
    only_some: re.Pattern[str]
    together: re.Pattern[str]
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
    found = lists.split(text) or lists.split(lists.written_out(text))
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
    context = []
    while found and not _asks_something(found[0]):
        if not _announces(found[0]) or cues().single.search(found[0]):
            return None
        context.append(_said_besides(found[0]))
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
    return Asks(found, "\n".join(filter(None, context)))


def operations(text: str) -> Asks | None:
    """Several things to be done with one fenced block, each a sentence or a clause of its own."""
    prose, blocks = parts(text)
    if not 1 <= len(blocks) <= 3:
        return None
    items: list[str] = []
    context: list[str] = []
    for sentence in sentences(prose):
        if _announces(sentence) and not items:
            context += filter(None, [_said_besides(sentence)])
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
        f"{(each.before and each.before not in prose and each.before) or ''}{fenced(each.text.rstrip(), each.info)}"
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
    items = [f"{ask}\n\nThe file is `{name}`:\n\n{fenced(body.rstrip(), infos[name])}" for name, body in named.items()]
    return Asks(items, titles=list(named))


def _asks_something(sentence: str) -> bool:
    return sentence.rstrip(" *_\"'”)").endswith(("?", "？"))


def _first_sentence(item: str) -> str:
    found = sentences(item.strip().lstrip("*_ "))
    return found[0] if found else ""


def _announced(before: str) -> tuple[str, bool] | None:
    """What stands before a list, less its bare announcement: (what its items share, whether one answer is made of all).

    None = it asks for something itself, or says that the list is one thing, or that not all of it is asked for; or it
    states something and announces nothing: the parts of an exam's problem, the options of a choice.
    """
    prose, blocks = parts(before)
    said = sentences(prose)
    if cues().only_some.search(prose) or cues().together.search(prose):
        return None
    kept, joined = before, False
    announced = not said
    for index, sentence in enumerate(said):
        last = index == len(said) - 1
        join = cues().joins.search(sentence)
        asked = _CONNECTIVES.sub("", sentence[: join.start()]) if join else sentence
        if _announces(asked):
            if cues().single.search(asked):
                return None
            kept = kept.replace(sentence, _said_besides(asked), 1)
            joined |= join is not None
            announced = True
        elif lexicon().greets(sentence):
            kept = kept.replace(sentence, "", 1)
        elif is_ask(sentence) or (last and _heads_one_thing(sentence, bool(blocks))):
            return None
        else:
            announced |= bool(blocks) and cues().shows.search(sentence) is not None
    return (kept.strip(), joined) if announced else None


def _announces(sentence: str) -> bool:
    """Whether a sentence announces asks and asks for nothing itself."""
    return cues().announces.fullmatch(sentence.strip(" .:：!？?*#,")) is not None


def _said_besides(announcement: str) -> str:
    """An announcement that says more than that asks follow, what they are about or how to answer; else empty."""
    neutral = all(cues().announcing.fullmatch(word) for word in words(announcement))
    return "" if neutral else announcement.strip(" *#,")


def _heads_one_thing(sentence: str, blocks: bool) -> bool:
    """Whether what follows a sentence before a list is parts or data of one thing."""
    introduces = sentence.endswith((":", "：")) and not (blocks and cues().shows.search(sentence))
    return introduces or cues().one_thing.search(sentence) is not None


def _trailing(behind: str) -> tuple[str, bool] | None:
    """What stands behind a list: (what its items share, whether one answer is made of all).

    None = another ask, or something about all answers together.
    """
    prose, _ = parts(behind)
    if cues().together.search(prose):
        return None
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
