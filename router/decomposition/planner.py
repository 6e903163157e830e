"""From a chat request to a plan. Pure; most requests stay whole and cost no extra call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from contracts.routing import Demand
from router.chat import ChatRequest
from router.decomposition import checks
from router.decomposition.kinds import Reading, read
from router.decomposition.plan import Kind, Plan, Subtask
from router.decomposition.structural import take_apart
from router.decomposition.text import last_spoken, spoken
from router.decomposition.trajectory import Trajectory, follow
from router.settings import PlanSettings
from router.verification import registry
from router.verification.check import Check
from router.verification.result import BadCheck

# What an agent answers straight away rather than planning work for it, and work that takes no thought to plan.
_SMALL = frozenset(
    {Kind.CHAT, Kind.QUESTION, Kind.EXPLANATION, Kind.SUMMARY, Kind.TRANSLATION, Kind.ARITHMETIC, Kind.EXTRACTION}
)
_STRAIGHT = frozenset({Kind.TESTS, Kind.SYNTAX})
_LEAST = 512  # tokens of each part's answer: with less to go round, a request stays whole

# Request fields under which an answer made of several would mean something else, unless they bear this value.
_WHOLE_UNLESS: dict[str, tuple[Any, ...]] = {
    "n": (None, 1), "logprobs": (None, False), "top_logprobs": (None, 0), "stop": (None, "", []), "tools": (None, []),
    "functions": (None, []), "response_format": (None, {"type": "text"}), "prediction": (None,), "audio": (None,),
    "logit_bias": (None, {}), "web_search_options": (None,),
}  # fmt: skip


def plan(request: ChatRequest, settings: PlanSettings | None = None) -> Plan:
    """What is to be done for a request: itself as it stands, or a graph of subtasks. Never raises."""
    settings = settings or PlanSettings()
    reading = read(request.messages)
    trajectory = follow(request.messages, bool(request.tools))
    if settings.planner != "none" and may_be_taken_apart(request, settings) and not trajectory.figures:
        found = take_apart(spoken(request.messages[reading.turn].text), settings)
        if found and _affordable(found, request):
            subtasks = tuple(replace(each, check=_usable(each.check)) for each in found.subtasks)
            return replace(found, subtasks=subtasks, text=reading.text)
    return _whole(request, reading, trajectory)


def may_be_taken_apart(request: ChatRequest, settings: PlanSettings) -> bool:
    """Whether the form of a request allows for parts: one user turn of text alone, no tools, no format of its own."""
    turns = [message for message in request.messages if message.role not in ("system", "developer")]
    return (
        len(turns) == 1
        and turns[0].role == "user"
        and not turns[0].images
        and not request.tools
        and not request.json_mode
        and request.schema is None
        and request.choices == 1
        and last_spoken(request.messages) >= 0
        and all(request.body.get(name) in usual for name, usual in _WHOLE_UNLESS.items())
    )


def _affordable(found: Plan, request: ChatRequest) -> bool:
    return request.max_tokens is None or request.max_tokens >= _LEAST * len(found.subtasks)


def _whole(request: ChatRequest, reading: Reading, trajectory: Trajectory) -> Plan:
    kind, demand = reading.kind, reading.demand
    if trajectory.figures or request.tools:
        kind, demand = _agents(reading, trajectory)
    if request.tools:
        check = checks.calls(request) if demand is Demand.MECHANICAL else None
    else:
        check = checks.whole(request, reading.text, kind, demand)
    subtask = Subtask("", kind, demand, "", check=_usable(check), minimum=trajectory.minimum)
    return Plan((subtask,), "whole", text=reading.text, trajectory=trajectory.figures)


def _agents(reading: Reading, trajectory: Trajectory) -> tuple[Kind, Demand]:
    """Kind and demand of an agent's next turn.

    Looking around, running tests and carrying out a step are mechanical, whatever the task is. Planning work needs
    thought, and so does getting out of a failed verification, or of any failure that has not gone away at once.
    """
    kind = trajectory.kind or reading.kind
    if kind is Kind.PLANNING:
        if reading.known and reading.kind in _SMALL:
            return reading.kind, reading.demand
        return kind, Demand.MECHANICAL if reading.known and reading.kind in _STRAIGHT else Demand.DEEP
    if kind is Kind.RECOVERING:
        return kind, Demand.DEEP if trajectory.hard else Demand.MECHANICAL
    if kind is Kind.PRODUCING:
        deep = reading.demand is Demand.DEEP and reading.kind in (Kind.DESIGN, Kind.PROOF, Kind.CODE)
        return kind, Demand.DEEP if deep else Demand.MECHANICAL
    return kind, Demand.MECHANICAL


def _usable(check: Check | None) -> Check | None:
    """A check that its verifier can use: a schema of the application may be none."""
    if check is None:
        return None
    try:
        registry.validate(check)
    except BadCheck:
        return None
    return check
