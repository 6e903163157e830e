"""What a request is about and what it needs, from what the user really said. Pure.

Stack traces and sheer length say nothing about how hard a request is, so neither is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from contracts.routing import Demand
from router.chat import Message
from router.decomposition.lexicon import lexicon, words
from router.decomposition.plan import Kind
from router.decomposition.text import clipped, last_spoken, parts, spoken

_LOOK_BACK = 40  # turns that are searched for what a "yes" agrees to

_SENTENCE = re.compile(r"(?<=[.!?;])\s+(?![a-z])|(?<=[。！？；])|\n+")
_EXPRESSION = re.compile(r"\d\)?\s?(?:[+*×÷^%]|\*\*|\s[-/]\s)\s?\(?\s?-?\d")
_TOPIC = re.compile(r"\b(?:about|über|sur|sobre|про|о|об)\b", re.IGNORECASE)
_ENUMERATION = re.compile(r"[,，、]|\b(?:and|und|et|y|e|и)\b|和|以及")
_STEP = re.compile(r"^\s{0,3}(?:#{1,4}\s*)?(?:\d{1,2}[.):]|[-*•]|step \d|phase \d)", re.IGNORECASE | re.MULTILINE)

# Which kind's opener decides when a sentence begins with a word of several, first come first; and which wins a draw.
_ORDER = (
    Kind.PROOF, Kind.TRANSLATION, Kind.SUMMARY, Kind.TESTS, Kind.EXTRACTION, Kind.DEBUGGING, Kind.DESIGN,
    Kind.EXPLANATION, Kind.EDIT, Kind.SYNTAX, Kind.ARITHMETIC, Kind.CODE, Kind.WRITING, Kind.QUESTION, Kind.CHAT,
)  # fmt: skip
_KINDS = {kind.value: kind for kind in _ORDER}
_ALWAYS_DEEP = frozenset({Kind.PROOF, Kind.DESIGN, Kind.DEBUGGING})
_GROWS = frozenset(
    {Kind.CODE, Kind.TESTS, Kind.EXPLANATION, Kind.QUESTION, Kind.WRITING, Kind.EXTRACTION}
)  # into deep ones


_OBJECTS = (Kind.TESTS, Kind.CODE, Kind.WRITING)  # of "write": that they are named says what is written


@dataclass(frozen=True)
class Reading:
    """What was understood of a request."""

    text: str  # what was asked, capped
    kind: Kind
    demand: Demand
    confirms: bool = False  # the last turn only agreed to what was proposed: this is about what it agreed to
    turn: int = -1  # index of the message that was read; -1 = none
    known: bool = True  # some word said what it is about


def sentences(text: str) -> list[str]:
    """Sentences and lines that hold a word."""
    return [each.strip() for each in _SENTENCE.split(text) if each and each.strip()]


def understand(text: str) -> Reading:
    """Kind and demand of one request, or of one part of it; `text` without injected blocks."""
    text = clipped(text)
    prose, blocks = parts(text)
    if lexicon().greets(prose):
        return Reading(text, Kind.CHAT, Demand.MECHANICAL)
    asked = sentences(prose)
    asked = asked[:6] + asked[6:][-3:]
    openings = [lexicon().opening(sentence) for sentence in asked]
    counts = lexicon().words.counts(words(" \n ".join(map(_object, asked, openings))))
    scores = _scores(asked, openings, counts)
    if _EXPRESSION.search(prose) and Kind.PROOF not in scores:
        scores[Kind.ARITHMETIC] = scores.get(Kind.ARITHMETIC, 0.0) + 2.0
    if blocks and not scores:
        scores[Kind.CODE] = 0.5
    kind = max(_ORDER, key=lambda each: scores.get(each, 0.0)) if scores else Kind.QUESTION
    return Reading(text, kind, _demand(kind, _size(counts, asked)), known=bool(scores))


def _scores(asked: Sequence[str], openings: Sequence[frozenset[str]], counts: Mapping[str, int]) -> dict[Kind, float]:
    """What speaks for each kind: one point for a word, more for the first word of a sentence, most in the first one.

    Question words open requests of any kind, so they count for less. Tuned by hand on labelled prompts.
    """
    scores = {_KINDS[name]: float(min(count, 3)) for name, count in counts.items() if name in _KINDS}
    for index, names in enumerate(openings):
        kind = next((kind for name, kind in _KINDS.items() if name in names), None)
        if kind and (kind is not Kind.QUESTION or kind not in scores):
            lead = 1.3 if kind is Kind.QUESTION else 2.5
            scores[kind] = scores.get(kind, 0.0) + (lead if not index else lead - 1.0)
    if any(sentence.endswith(("?", "？")) for sentence in asked):
        scores[Kind.QUESTION] = scores.get(Kind.QUESTION, 0.0) + 0.6
    if any("produce" in names for names in openings):
        for kind in _OBJECTS:
            if kind in scores:
                scores[kind] += 1.0
        if not scores:
            scores[Kind.WRITING] = 0.1
    return scores


def _object(sentence: str, opening: frozenset[str]) -> str:
    """A sentence that asks for something to be made, less what that is to be about."""
    return _TOPIC.split(sentence, maxsplit=1)[0] if "produce" in opening else sentence


def _size(counts: Mapping[str, int], asked: Sequence[str]) -> float:
    """How much is asked for: signs of large systems, and how many parts one sentence names."""
    named = max((len(_ENUMERATION.findall(sentence)) for sentence in asked), default=0)
    return counts.get("weight", 0) + max(named - 1, 0) * 0.7


def _demand(kind: Kind, size: float) -> Demand:
    if kind in _ALWAYS_DEEP:
        return Demand.DEEP
    large = 1.5 if kind in (Kind.CODE, Kind.TESTS) else 2.0
    return Demand.DEEP if kind in _GROWS and size >= large else Demand.MECHANICAL


def plans(text: str) -> bool:
    """Whether an assistant's turn proposes work in several steps: what a "yes" to it starts is no small thing."""
    return len(_STEP.findall(clipped(text))) >= 3


def read(messages: Sequence[Message]) -> Reading:
    """What the conversation now asks for: its last real user turn, or what that turn agrees to.

    "yes" and "go on" take on the kind and demand of what they confirm, and at least the demand of the plan that the
    assistant had proposed.
    """
    known = lexicon()
    index = last_spoken(messages)
    if index < 0:
        return Reading("", Kind.CHAT, Demand.MECHANICAL)
    latest = index
    proposed = False
    for _ in range(_LOOK_BACK):
        said = spoken(messages[index].text)
        if not known.agrees(said):
            break
        proposed |= any(each.role == "assistant" and plans(each.text) for each in messages[max(index - 3, 0) : index])
        earlier = last_spoken(messages, index)
        if earlier < 0:
            break
        index = earlier
    said = spoken(messages[index].text)
    confirms = index != latest or known.agrees(said)
    reading = understand(said)
    if not reading.known and (earlier := last_spoken(messages, index)) >= 0:
        before = understand(spoken(messages[earlier].text))  # "same for the other one": more of that
        reading = replace(reading, kind=before.kind, demand=before.demand)
    proposed |= confirms and any(plans(each.text) for each in messages[index + 1 : latest] if each.role == "assistant")
    demand = Demand.DEEP if proposed else reading.demand
    kind = Kind.PLANNING if proposed and reading.kind in (Kind.CHAT, Kind.QUESTION) else reading.kind
    return replace(reading, kind=kind, demand=demand, confirms=confirms, turn=index)
