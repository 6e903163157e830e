"""A plan: a small graph of subtasks that together answer one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from contracts.routing import Demand
from router.verification.check import Check


class Kind(StrEnum):
    """What a request or subtask is about; each has a demand it usually makes."""

    CHAT = "chat"
    QUESTION = "question"
    CODE = "code"
    TESTS = "tests"
    EDIT = "edit"  # a change to given text or code: diffs, renames, formatting
    EXTRACTION = "extraction"  # structured data out of text
    SUMMARY = "summary"
    TRANSLATION = "translation"
    ARITHMETIC = "arithmetic"
    SYNTAX = "syntax"  # checks and fixes of syntax
    EXPLANATION = "explanation"  # explanations, comparisons, reviews
    WRITING = "writing"  # prose of one's own: stories, letters, ideas
    DESIGN = "design"  # architecture, plans, trade-offs
    PROOF = "proof"  # proofs, derivations, puzzles
    DEBUGGING = "debugging"
    EXPLORING = "exploring"  # an agent looks around: reads, lists, searches
    PRODUCING = "producing"  # an agent writes
    VERIFYING = "verifying"  # an agent runs tests, linters, builds
    RECOVERING = "recovering"  # an agent's last tools failed
    PLANNING = "planning"  # an agent's first turn, or a change of plan
    JOIN = "join"


@dataclass(frozen=True)
class Subtask:
    """One node: what is asked, of whose answers, and how the answer can be checked."""

    name: str  # unique in the plan: s1, s2, ...
    kind: Kind
    demand: Demand
    prompt: str  # what is asked, complete in itself but for `inputs`; empty = the request as it stands
    inputs: tuple[str, ...] = ()  # names of the subtasks whose answers it needs
    check: Check | None = None
    minimum: str = ""  # tier below which it must not go: strong while a session has escalated


@dataclass(frozen=True)
class Plan:
    """Subtasks in an order in which each comes after its inputs.

    A request that is not taken apart is a plan with one subtask whose prompt is empty: it costs no extra call.
    """

    subtasks: tuple[Subtask, ...]
    planner: str  # whole, structural, model
    join: str = "none"  # none: one subtask; concatenate: in order, under their headings; model: a deep model joins
    titles: dict[str, str] = field(default_factory=dict)  # subtask -> its heading in a concatenated answer
    text: str = ""  # what the user really asked, capped: of the turn that is answered, or of the one it confirms
    trajectory: dict[str, float] = field(default_factory=dict)  # figures about an agent's turns; empty = no agent

    @property
    def whole(self) -> bool:
        """Whether the request is answered as it stands."""
        return len(self.subtasks) == 1 and not self.subtasks[0].prompt
