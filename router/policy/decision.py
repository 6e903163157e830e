"""What the routing policy looks at and what it says. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.routing import Demand, PoolScore
from router.decomposition.plan import Kind


@dataclass(frozen=True)
class Question:
    """What is to be decided: one request or subtask."""

    text: str  # of the last real user turn, or the subtask's prompt; capped by the features
    kind: Kind
    demand: Demand
    prompt_tokens: int
    max_tokens: int | None = None
    tools: bool = False
    json_mode: bool = False
    images: bool = False
    checked: bool = False  # a verifier will look at the answer, so a failure costs a call and not a wrong answer
    session_pool: str = ""  # that served this session's last turn
    trajectory: dict[str, float] = field(default_factory=dict)  # figures about an agent's turns, from decomposition
    allowed: frozenset[str] | None = None  # pools that the key may use; None = all
    budget: int | None = None  # picodollars left for this request; None = without limit
    tolerance: float = 0.0  # P(success) that may be given up for a lower cost, 0..1
    minimum: str = ""  # tier below which it must not go: set while a session has escalated


@dataclass(frozen=True)
class Decision:
    """What was decided, with all that is needed to judge it later."""

    pool: str
    order: tuple[str, ...]  # the chosen one and what to fall back on, best first
    reason: str
    scores: dict[str, PoolScore]
    excluded: dict[str, str]
    features: dict[str, float]
    propensity: float
    policy: str  # version
    shadow: dict[str, str] = field(default_factory=dict)
