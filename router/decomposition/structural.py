"""The planner by form: a user's request that clearly consists of several asks becomes a plan. Pure.

Precision before recall: a request wrongly taken apart loses its answer, one wrongly left whole loses a few cents.
"""

from __future__ import annotations

import re

from contracts.routing import Demand
from router.decomposition import asks as forms
from router.decomposition import checks
from router.decomposition.asks import Asks, cues
from router.decomposition.kinds import understand
from router.decomposition.lexicon import words
from router.decomposition.plan import Kind, Plan, Subtask
from router.decomposition.text import parts
from router.settings import PlanSettings

SHORTEST = 50  # characters: less holds no two asks that are worth two calls
LONGEST = 16_000  # characters of a request that is taken apart
SHARED = 4000  # characters of context that each subtask is given again
TITLE = 80  # characters of a heading

_CHANGES = frozenset({Kind.EDIT, Kind.CODE, Kind.DEBUGGING, Kind.SYNTAX})
_FILE_WISE = frozenset(
    {
        Kind.EDIT,
        Kind.TESTS,
        Kind.SYNTAX,
        Kind.SUMMARY,
        Kind.TRANSLATION,
        Kind.EXPLANATION,
        Kind.EXTRACTION,
        Kind.WRITING,
        Kind.CODE,
    }
)
_THEN = re.compile(
    r"\W*(?:then|after that|afterwards|next|dann|danach|ensuite|puis|luego|después|depois|затем|потом|然后|接着|再)\b",
    re.IGNORECASE,
)
_A_THING = re.compile(r"\ban?((?: [\w-]+){1,3})", re.IGNORECASE)
_THE_THING = re.compile(r"\b(?:the|this|that)((?: [\w-]+){1,2})", re.IGNORECASE)
_PARTICLES = frozenset(
    {"about", "all", "and", "for", "from", "its", "new", "one", "that", "the", "this", "two", "with"}
)
_OWN_OBJECT = re.compile(r"[:：]\s*\S|[\"“«『「'`].{3,}[\"”»』」'`]", re.DOTALL)


def take_apart(text: str, settings: PlanSettings) -> Plan | None:
    """The plan of a request of several asks; None = it is one ask, or not certainly several."""
    if not SHORTEST <= len(text) <= LONGEST:
        return None
    if found := _by_files(text):
        return _plan(found, settings, by_files=True)
    if found := forms.listed(text):
        return _plan(found, settings)
    if found := forms.operations(text):
        kinds = [understand(item).kind for item in found.items]
        return _plan(found, settings) if len(set(kinds)) == len(kinds) else None
    if found := forms.questions(text):
        return _plan(found, settings)
    return None


def _by_files(text: str) -> Asks | None:
    if text.count("```") < 4:
        return None
    _, blocks = parts(text)
    named = checks.named_files(blocks)
    return forms.files(text, named, {checks.file_name(block): block.info for block in blocks})


def _plan(found: Asks, settings: PlanSettings, by_files: bool = False) -> Plan | None:
    items = found.items
    if not 2 <= len(items) <= settings.subtasks or len(found.context) > SHARED:
        return None
    readings = [understand(item) for item in items]
    kinds = [reading.kind for reading in readings]
    shares_block = "```" in found.context or "~~~" in found.context
    if Kind.CHAT in kinds or (by_files and not set(kinds) <= _FILE_WISE):
        return None
    if not by_files:
        changes = [index for index, kind in enumerate(kinds) if kind in _CHANGES]
        if shares_block and len(changes) > 1:
            return None  # several changes to one text must come out as one text
        if not shares_block and any(kinds[index] is Kind.EDIT and not _has_object(items[index]) for index in changes):
            return None  # changes to something that is not in the request
    inputs: list[tuple[int, ...]] | None = [()] * len(items)
    if not by_files:
        inputs = _dependencies(items, kinds, shares_block, bool(found.context))
    if inputs is None:
        return None
    deepest = _depth(inputs)
    if deepest > settings.depth or deepest >= len(items):
        return None  # nothing could run beside anything else
    subtasks = []
    for index, (item, reading) in enumerate(zip(items, readings, strict=True)):
        prompt = f"{found.context}\n\n{item}" if found.context else item
        check = checks.asked(prompt, reading.kind, reading.demand)
        needed = tuple(f"s{other + 1}" for other in inputs[index])
        subtasks.append(Subtask(f"s{index + 1}", reading.kind, reading.demand, prompt, needed, check))
    if all(subtask.demand is Demand.DEEP for subtask in subtasks) and found.joined:
        return None  # a strong model would do every part and the joining: once is cheaper and better
    titles = found.titles or [_title(index, item) for index, item in enumerate(items)]
    names = [subtask.name for subtask in subtasks]
    return Plan(
        tuple(subtasks), "structural", "model" if found.joined else "concatenate", dict(zip(names, titles, strict=True))
    )


def _has_object(item: str) -> bool:
    return "```" in item or _OWN_OBJECT.search(item) is not None


def _dependencies(
    items: list[str], kinds: list[Kind], shares_block: bool, has_context: bool
) -> list[tuple[int, ...]] | None:
    """Which items each needs the answers of, by what it refers to; None = it refers to what is not there."""
    known = cues()
    inputs: list[tuple[int, ...]] = []
    for index, item in enumerate(items):
        prose, blocks = parts(item)
        opening = " ".join(prose.split())[:400]
        needed: set[int] = set()
        for numbers in known.numbered.findall(opening):
            number = int(next(filter(None, numbers if isinstance(numbers, tuple) else (numbers,))))
            if 1 <= number <= index:
                needed.add(number - 1)
        if index and known.all_previous.search(opening):
            needed.update(range(index))
        needed.update(other for other in range(index) if _makes(items[other]) & _means(opening))
        refers = _refers(opening)
        if refers and not needed and not blocks and not _OWN_OBJECT.search(opening):
            earlier = [other for other in range(index) if kinds[other] in _CHANGES]
            if shares_block:
                needed.update(earlier[-1:])
            elif index:
                needed.add(earlier[-1] if earlier else index - 1)
            elif not has_context:
                return None
        if index and not needed and _THEN.match(item):
            needed.add(index - 1)
        inputs.append(tuple(sorted(needed)))
    return inputs


def _refers(opening: str) -> bool:
    """Whether a sentence speaks of something that stands outside it: a pronoun early on, or "the result"."""
    found = cues().previous.search(opening)
    if not found:
        return False
    if len(found[0].split()) > 1:
        return True
    # A lone pronoun: later in a long sentence it means something named in it.
    early = len(words(opening[: found.start()])) <= 4 and found.start() <= 24
    return early or len(words(opening)) <= 8


def _makes(item: str) -> set[str]:
    """What an item asks to be made or names for the first time: "a new file", "an app"."""
    return _nouns(_A_THING.findall(item[:400]))


def _means(opening: str) -> set[str]:
    """What an item takes for known: "the app"; not where it names it itself."""
    return _nouns(_THE_THING.findall(opening)) - _makes(opening)


def _nouns(phrases: list[str]) -> set[str]:
    return {word for phrase in phrases for word in words(phrase) if len(word) > 2 and word not in _PARTICLES}


def _depth(inputs: list[tuple[int, ...]]) -> int:
    depths: list[int] = []
    for needed in inputs:
        depths.append(1 + max((depths[other] for other in needed), default=0))
    return max(depths)


def _title(index: int, item: str) -> str:
    line = next((each for each in item.splitlines() if each.strip()), "").strip().strip("#*_ ")
    line = re.sub(r"\s+", " ", line).rstrip(" :.,;*")
    if len(line) > TITLE:
        line = line[: TITLE - 1].rsplit(" ", 1)[0] + "…"
    return f"{index + 1}. {line}"
