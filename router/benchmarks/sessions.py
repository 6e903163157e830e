"""Sessions of a coding agent, made up: what it asks turn by turn, and what becomes of good and bad answers.

A session has a user's request and one to five items of work. For each item the agent explores, writes, and runs the
tests; where they fail it tries to recover. Bad answers have consequences: a bad look costs another look, a bad edit
breaks the item, the tests on hand show most of what is broken but not all, a bad plan makes every later edit harder.
The session succeeds when nothing is broken at its end. The requests are real ones, with tools, files, command output
and tracebacks, growing turn by turn; only the models are tables of probabilities (`SKILL`), which are assumptions.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Work(StrEnum):
    """What the next turn does in truth; the router sees only the conversation."""

    PLAN = "plan"
    LOOK = "look"
    SMALL_EDIT = "small edit"  # a rename, an import, a simple test
    HARD_EDIT = "hard edit"
    RUN = "run"
    RECOVER = "recover"
    REPORT = "report"


MECHANICAL = frozenset({Work.LOOK, Work.SMALL_EDIT, Work.RUN, Work.REPORT})

SKILL = {  # P(the turn is done well) by tier
    "compact": {
        Work.PLAN: 0.55, Work.LOOK: 0.95, Work.SMALL_EDIT: 0.92, Work.HARD_EDIT: 0.50, Work.RUN: 0.98,
        Work.RECOVER: 0.30, Work.REPORT: 0.97,
    },
    "strong": {
        Work.PLAN: 0.92, Work.LOOK: 0.98, Work.SMALL_EDIT: 0.97, Work.HARD_EDIT: 0.85, Work.RUN: 0.99,
        Work.RECOVER: 0.70, Work.REPORT: 0.99,
    },
}  # fmt: skip
MALFORMED = {"compact": 0.02, "strong": 0.002}  # calls whose arguments do not fit the tool
BAD_PLAN = 0.2  # what a bad plan takes from P(a hard edit is good)
SHOWN = 0.85  # share of broken items that the tests on hand show
SMALL = 0.4  # share of edits that are small
LOOKS = 3.0  # mean looks per item beyond the first
RECOVERIES = 6  # tries for one item until the agent leaves it
ANSWER = {  # median tokens of an answer; lognormal, sigma .4
    Work.PLAN: 350, Work.LOOK: 80, Work.SMALL_EDIT: 200, Work.HARD_EDIT: 600, Work.RUN: 60, Work.RECOVER: 500,
    Work.REPORT: 200,
}  # fmt: skip

TASKS = (
    "The date picker loses the time zone when a form is saved twice. Find out why and fix it.",
    "Add a retry with backoff to the payment client, and tests for it.",
    "Our export job runs out of memory on large tenants. Make it stream.",
    "Replace the deprecated config loader everywhere and keep the old file format readable.",
    "Users are logged out at random since the last release. Investigate and repair it.",
    "Implement pagination for the search endpoint, with cursor tokens.",
    "The nightly sync writes duplicates when two workers overlap. Make it idempotent.",
    "Split the order service's module into smaller ones without changing behaviour.",
)
SYSTEM = (
    "You are a careful software engineer who works in a terminal. Use the tools, one call per turn. Read before you "
    "write, keep changes small, and run the tests after each change. Report briefly when the work is done. "
) * 12
SCHEMAS = {
    "read_file": {"path": "string"},
    "grep": {"pattern": "string", "path": "string"},
    "edit_file": {"path": "string", "old": "string", "new": "string"},
    "bash": {"command": "string"},
    "update_plan": {"plan": "string"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ')} in the working copy",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in fields.items()},
                "required": list(fields),
                "additionalProperties": False,
            },
        },
    }
    for name, fields in SCHEMAS.items()
]
WORDS = tuple(
    "session window handler retry index cursor field buffer parse value result return config order module import "  # noqa: SIM905
    "client token state update query table stream check store event worker batch".split()
)


@dataclass
class Item:
    """One piece of work."""

    name: str
    looks: int  # that are needed before it can be written
    small: bool
    shown: bool  # the tests on hand show when it is broken
    stage: Work | None = Work.LOOK  # None = closed
    broken: bool = False
    recoveries: int = 0


@dataclass(frozen=True)
class Answer:
    """What a model says in one turn: OpenAI's message and its length in tokens."""

    message: dict[str, Any]
    tokens: int
    good: bool


class Session:
    """One session: `body` is the next request, `answer` what a model of a tier says to it, `advance` what follows."""

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        self.seed = seed
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{draw.choice(TASKS)} (ticket {seed})"},
        ]
        self.items = [
            Item(f"part_{number}", 1 + _poisson(draw, LOOKS), draw.random() < SMALL, draw.random() < SHOWN)
            for number in range(1 + min(_poisson(draw, 1.5), 4))
        ]
        self.planned: bool | None = None  # whether the plan is good; None = there is none yet
        self.done = False

    @property
    def success(self) -> bool:
        """Whether nothing is broken."""
        return not any(item.broken for item in self.items)

    @property
    def body(self) -> dict[str, Any]:
        """The next request."""
        return {"model": "auto", "messages": list(self.messages), "tools": TOOLS, "prompt_cache_key": f"s{self.seed}"}

    @property
    def work(self) -> Work:
        """What the next turn has to do."""
        if self.planned is None:
            return Work.PLAN
        item = self._item
        return Work.REPORT if item is None or item.stage is None else item.stage

    @property
    def _item(self) -> Item | None:
        return next((item for item in self.items if item.stage is not None), None)

    def answer(self, tier: str) -> Answer:
        """What a model of this tier says now. Asking again, or another tier, draws again."""
        work, draw = self.work, self._draw
        chance = SKILL[tier][work] - (BAD_PLAN if work is Work.HARD_EDIT and self.planned is False else 0.0)
        malformed = draw.random() < MALFORMED[tier]
        good = not malformed and draw.random() < chance
        tokens = max(round(ANSWER[work] * math.exp(draw.gauss(0.0, 0.4))), 5)
        return Answer(self._message(work, malformed, tokens), tokens, good)

    def advance(self, answer: Answer) -> None:
        """The answer is taken: its tool runs, and the agent's next turn begins."""
        self.messages.append(answer.message)
        calls = answer.message.get("tool_calls")
        if calls is None:
            self.done = True
            return
        fits = well_formed(calls[0]["function"])
        result = self._follow(answer.good) if fits else "<tool_use_error>Invalid arguments</tool_use_error>"
        self.messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": result})

    def _follow(self, good: bool) -> str:
        """What a well-formed call does to the session, and what its tool prints."""
        item = self._item
        if self.planned is None or item is None:
            self.planned = good
            return "plan updated"
        if item.stage is Work.LOOK:
            item.looks -= good
            if not item.looks:
                item.stage = Work.SMALL_EDIT if item.small else Work.HARD_EDIT
            return self._prose(self._tokens(500)) if good else "no matches found"
        if item.stage is Work.RUN:
            if not good:
                return "usage: pytest [options] [file_or_dir]\npytest: error: unrecognized arguments"
            if item.broken and item.shown and item.recoveries < RECOVERIES:
                item.stage = Work.RECOVER
                return self._failure(item)
            item.stage = None
            return (
                self._failure(item)
                if item.broken and item.shown
                else f"===== {self._draw.randint(5, 60)} passed in 4.1s ====="
            )
        item.recoveries += item.stage is Work.RECOVER
        item.stage, item.broken = Work.RUN, not good
        return "edited 1 file"

    # -- what is said and printed ------------------------------------------------------------------------------------

    def _message(self, work: Work, malformed: bool, tokens: int) -> dict[str, Any]:
        """An assistant's turn that does this work, about `tokens` long."""
        if work is Work.REPORT:
            return {"role": "assistant", "content": self._prose(tokens)}
        name, arguments = self._call(work, tokens)
        if malformed:
            arguments = {"input": next(iter(arguments.values()))}
        call = {"name": name, "arguments": json.dumps(arguments)}
        id = f"call_{self.seed}_{len(self.messages)}"
        return {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": call}]}

    def _call(self, work: Work, tokens: int) -> tuple[str, dict[str, str]]:
        item = self._item
        path = f"src/{item.name}.py" if item else "src"
        if work is Work.PLAN:
            return "update_plan", {"plan": self._prose(tokens)}
        if work is Work.LOOK:
            if self._draw.random() < 0.5:
                return "read_file", {"path": f"src/{self._draw.choice(WORDS)}_{self._draw.randint(1, 99)}.py"}
            return "grep", {"pattern": f"{self._draw.choice(WORDS)}_{self._draw.randint(1, 99)}", "path": "src"}
        if work is Work.RUN:
            return "bash", {"command": f"python -m pytest -q tests/test_{path[4:-3]}.py"}
        return "edit_file", {"path": path, "old": self._prose(tokens // 4), "new": self._prose(tokens - tokens // 4)}

    def _failure(self, item: Item) -> str:
        line = self._draw.randint(10, 200)
        return (
            f'Traceback (most recent call last):\n  File "tests/test_{item.name}.py", line {line}, in test_\n'
            f"    assert result == expected\nAssertionError: {line} != {line + 1}\n{self._prose(self._tokens(150))}\n"
            f"===== 1 failed, {self._draw.randint(5, 60)} passed in 4.3s ====="
        )

    def _prose(self, tokens: int) -> str:
        return " ".join(self._draw.choices(WORDS, k=max(tokens * 2 // 3, 1)))

    def _tokens(self, median: int) -> int:
        return round(median * math.exp(self._draw.gauss(0.0, 0.7)))


def well_formed(function: Mapping[str, str]) -> bool:
    """Whether a call's arguments are those of its tool."""
    return set(json.loads(function["arguments"])) == set(SCHEMAS[function["name"]])


def _poisson(draw: random.Random, mean: float) -> int:
    """A Poisson variate (Knuth's product of uniforms; the means are small)."""
    limit, product, count = math.exp(-mean), draw.random(), 0
    while product > limit:
        product *= draw.random()
        count += 1
    return count
