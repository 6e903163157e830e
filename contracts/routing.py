"""The router's messages: what it is asked, what it decides, what came of it, and what people said about it.

Money on the wire is in picodollars (1e-12 USD), so that sums are exact: at $0.20 per million tokens one token costs
200,000 of them. `key` is the name that the operator gave an API key, never the key.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from contracts.base import INT64_MAX, Message, Nat, PolicyRef, Token, require_finite
from contracts.errors import InvalidMessage

Share = Annotated[float, Meta(ge=0, le=1)]


class Demand(StrEnum):
    """What a subtask needs."""

    MECHANICAL = "mechanical"  # a compact model does it, and often a program can check it
    DEEP = "deep"  # thought


class Role(StrEnum):
    """Why a model was called."""

    ANSWER = "answer"  # the request, or a subtask of it
    PLAN = "plan"  # to take the request apart
    ESCALATION = "escalation"  # again on a stronger pool, because the answer before was refused or deferred
    JOIN = "join"  # to make one answer of those of the subtasks
    HEDGE = "hedge"  # beside a slow attempt; the first to answer wins


class Verdict(StrEnum):
    """What a verifier said about an attempt's answer."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"  # it timed out, broke, or found nothing to check: says nothing about the answer
    DEFERRED = "deferred"  # the answer shows that the turn is for a stronger pool: not wrong, and not given
    NONE = "none"  # no verifier was asked


class Status(StrEnum):
    """How an attempt, or a whole request, ended."""

    OK = "ok"
    ERROR = "error"
    PARTIAL = "partial"  # it failed in mid-stream: what came until then was paid for
    CANCELLED = "cancelled"  # whoever asked went away


class RouteRequest(Message, frozen=True, tag="route_request"):
    """Ask where a chat request should go without sending it there: downstream -> router, which publishes a decision."""

    id: str  # chosen by the asker; the decision bears it as request_id
    run: Token  # run id
    body: str  # the chat request as JSON, as it would be posted to /v1/chat/completions
    key: str = ""  # whose budget, filters and pools apply; empty = nobody's
    session: str = ""  # requests of one conversation bear the same; empty = derived from its first messages
    issued_ns: Nat = 0  # unix ns


class PoolScore(msgspec.Struct, frozen=True):
    """What the routing policy expected of one pool."""

    success: Share  # calibrated P(success | pool, features)
    cost: Nat  # expected picodollars, prompt cache and switching included


class RouteDecision(Message, frozen=True, tag="route_decision"):
    """Where a request, or one subtask of it, was sent and why: router -> analyzer, downstream."""

    id: str  # {request_id}.{subtask}, or the request id for a whole request
    run: Token  # run id
    request_id: str  # of the response header x-tailrace-request-id
    subtask: str  # its name in the plan; empty = the whole request
    session: str  # of the conversation, hashed
    key: str  # name of the API key; empty = nobody's
    requested: str  # the model that was asked for: auto, auto-0.3, or a pool
    kind: str  # of the subtask: code, extraction, tool_result, exploring, ...
    demand: str  # Demand
    pool: str  # chosen; empty = none could take it
    order: list[str]  # pools to fall back on, in this order
    reason: str  # machine-readable: policy, named, affinity, explored, only_pool, tenant, verifier, refused, ...
    scores: dict[str, PoolScore]  # by pool that could have served it
    excluded: dict[str, str]  # pool -> why it could not
    features: dict[str, float]  # what was known: sizes, trajectory, base scores; never text
    propensity: Share  # probability with which the policy in force picks this pool here
    tolerance: Share  # success that may be given up for a lower cost
    policy: str  # version of the routing policy
    shadow: dict[str, str]  # version of a policy on trial -> the pool that it would have chosen
    at_ns: Nat  # unix ns
    error: str = ""  # the sentence that an application would have been given; empty where a pool was chosen

    def check(self) -> None:
        require_finite(f"decision {self.id}", self.features.values())


class Attempt(msgspec.Struct, frozen=True):
    """One call of one pool, whatever came of it."""

    subtask: str  # its name in the plan; empty = the whole request
    pool: str  # that was called
    model: str  # that answered, by its own word; empty when nothing did
    role: str  # Role
    status: str  # Status
    verdict: str  # Verdict
    prompt_tokens: Nat  # cached ones included
    cached_tokens: Nat  # of prompt_tokens, read from the pool's prompt cache
    completion_tokens: Nat  # reasoning included
    cost: Nat  # picodollars
    estimated: bool  # True where the pool did not report usage and it was counted here
    seconds: float  # from sending to the last token
    first_token_seconds: float  # from sending to the first token; 0 when none came
    error: str = ""  # one sentence; empty when it went well
    tier: str = ""  # compact or strong
    policy: PolicyRef | None = None  # weights that served it, for pools of our generators
    rollout: str = ""  # id of the rollout that holds its tokens and log-probs, for pools of our generators


class RouteOutcome(Message, frozen=True, tag="route_outcome"):
    """What a request cost and how it ended, retries and failures included: router -> learner, analyzer, downstream."""

    request_id: str  # of the response header x-tailrace-request-id
    run: Token  # run id
    key: str  # name of the API key; empty = nobody's
    session: str  # of the conversation, hashed
    requested: str  # the model that was asked for
    pool: str  # that gave the answer, or the part of it that needed most; empty when none did
    kind: str  # of the request
    status: str  # Status
    decisions: list[str]  # ids of the decisions taken for it
    attempts: list[Attempt]  # in the order in which they ended
    cost: Nat  # picodollars of all attempts
    counterfactual: Nat  # picodollars of one call of the strongest pool with this prompt and an answer of this length
    error: str  # the sentence the application was given; empty when it went well
    seconds: float  # from the request's last byte to the answer's last
    overhead_seconds: float  # of these, spent in the router itself
    at_ns: Nat  # unix ns

    def check(self) -> None:
        where = f"outcome of {self.request_id}"
        times = [time for each in self.attempts for time in (each.seconds, each.first_token_seconds)]
        require_finite(where, [self.seconds, self.overhead_seconds, *times])
        if self.cost != min(sum(each.cost for each in self.attempts), INT64_MAX):
            raise InvalidMessage(f"{where}: costs {self.cost}, its attempts another sum")


class Feedback(Message, frozen=True, tag="feedback"):
    """What became of an answer in the world: gateway, downstream -> router, learner, analyzer."""

    id: str  # unique: the same when it is sent again
    run: Token  # run id
    request_id: str  # the answer it is about
    key: str  # name of the API key that sent it; empty = nobody's
    score: Share | None = None  # 1 = good; None = not said
    passed: bool | None = None  # whether the tests passed that it had to pass; None = not said
    correction: str = ""  # the answer that would have been right; empty = not said
    comment: str = ""  # for people
    at_ns: Nat = 0  # unix ns

    def check(self) -> None:
        if self.score is None and self.passed is None and not self.correction:
            raise InvalidMessage(f"feedback {self.id}: says neither score nor passed nor correction")
