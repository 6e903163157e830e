"""The decision: filters, then P(success) and cost of what is left, then the cheapest that is good enough. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from contracts.base import INT64_MAX
from contracts.routing import PoolScore
from router.policy import cost
from router.policy.calibration import Calibration, features, inputs_of
from router.policy.decision import Decision, Question
from router.policy.filters import screen
from router.pools.base import PoolState

LOYALTY = 0.1  # P(success) that a pool must be better by than the one of its tier that has the session cached


class Model(Protocol):
    """A cold-start model of which LLM can answer what."""

    @property
    def version(self) -> str:
        """Digest of its content."""

    def logits(self, text: str) -> dict[str, float]:
        """Log-odds of success by tier (`compact`, `strong`), and by the names of LLMs it was trained on."""


@dataclass(frozen=True)
class NeutralModel:
    """Knows nothing of the text."""

    version: str = "neutral"

    def logits(self, text: str) -> dict[str, float]:
        """The same for every text."""
        return {"compact": 0.8, "strong": 1.4}


@dataclass(frozen=True)
class Policy:
    """A version of the routing policy: what it was trained to know, and what it has learned since."""

    version: str
    model: Model
    calibration: Calibration


NEUTRAL = Policy("neutral", NeutralModel(), Calibration())


@dataclass(frozen=True)
class Outlook:
    """What to expect of giving a request to each of several pools."""

    success: dict[str, float]  # P(its own first answer is right)
    final: dict[str, float]  # P(the answer is right in the end), after an escalation where there is a verifier
    cost: dict[str, int]  # picodollars, switching and escalation included
    bonus: dict[str, float]  # added to `final` while choosing


def choose(outlook: Outlook, names: Sequence[str], tolerance: float) -> str:
    """The cheapest pool whose P(success) is at most `tolerance` below the best one's; of equals the better one.

    The higher the tolerance, the lower (or the same) are cost and P(success) of what is chosen.
    """
    value = {name: min(outlook.final[name] + outlook.bonus.get(name, 0.0), 1.0) for name in names}
    floor = max(value.values()) - tolerance
    good = [name for name in names if value[name] >= floor]
    return min(good, key=lambda name: (outlook.cost[name], -value[name], name))


def foresee(
    success: dict[str, float],
    calls: Mapping[str, int],
    lost: Mapping[str, int],
    escalated: Collection[str],
    bonus: dict[str, float],
) -> Outlook:
    """The outlook, given P(success) and cost of one call of each pool and what is lost by switching to it.

    Of the pools whose refused answers are `escalated`, a failure costs a call of the best pool and no wrong answer (the
    verifier taken as right).
    """
    best = max(sorted(success), key=lambda name: success[name])
    final, total = dict(success), dict[str, int]()
    for name, p in success.items():
        price = calls[name]
        if name in escalated and name != best:
            price = cost.cascade(price, p, calls[best])
            final[name] = p + (1.0 - p) * success[best]
        total[name] = price + lost.get(name, 0)
    return Outlook(success, final, total, {} if escalated else bonus)


def decide(
    question: Question,
    pools: Sequence[PoolState],
    policy: Policy,
    *,
    draw: float,
    exploration: float = 0.0,
    trial: Policy | None = None,
) -> Decision:
    """Where a request or subtask goes.

    `draw` is uniform in [0, 1): with probability `exploration` it picks one of the usable pools at random, though
    never away from a warm prompt cache. `trial` is a policy that is only asked what it would have done.
    Raises `ApiError` when no pool can take it.
    """
    screened = screen(question, pools, policy.calibration)
    usable = {pool.name: pool for pool in screened.usable}
    known = features(question, usable.values(), policy.model.logits(question.text))
    outlook = _outlook(question, usable, policy.calibration, known)
    order = _ranked(outlook, question.tolerance)
    chosen, reason = order[0], _reason(question, usable, policy.calibration, known, order[0])

    explores = exploration if len(usable) > 1 and usable[chosen].cached_tokens == 0 else 0.0
    if draw < explores:
        explored = sorted(usable)[min(int(draw / explores * len(usable)), len(usable) - 1)]
        if explored != chosen:
            reason = "explored"
            order = [explored, *(name for name in order if name != explored)]
    propensity = explores / len(usable) + (1.0 - explores if order[0] == chosen else 0.0)

    shadow = {}
    if trial is not None:
        known_to_it = (
            known
            if trial.model is policy.model
            else features(question, usable.values(), trial.model.logits(question.text))
        )
        preferred = choose(_outlook(question, usable, trial.calibration, known_to_it), list(usable), question.tolerance)
        shadow[trial.version] = preferred
    return Decision(
        pool=order[0],
        order=tuple(order),
        reason=reason,
        scores={name: PoolScore(outlook.success[name], min(outlook.cost[name], INT64_MAX)) for name in usable},
        excluded=screened.excluded,
        features=known | {f"loyalty.{name}": value for name, value in outlook.bonus.items()},
        propensity=min(propensity, 1.0),
        policy=policy.version,
        shadow=shadow,
    )


def _outlook(
    question: Question, usable: Mapping[str, PoolState], calibration: Calibration, known: Mapping[str, float]
) -> Outlook:
    answer = calibration.answer_tokens(question)
    success, calls, lost = dict[str, float](), dict[str, int](), dict[str, int]()
    for name, pool in usable.items():
        inputs = inputs_of(name, question.kind, question.demand, known)
        success[name] = calibration.success(name, pool.settings.tier, inputs)
        calls[name] = cost.expected(pool, question.prompt_tokens, answer)
        lost[name] = cost.lost(usable.values(), name, question.prompt_tokens)
    # of a strong pool's answer the verdict is noted, and that is all: see router.cascade
    escalated = [name for name, pool in usable.items() if question.checked and pool.settings.tier == "compact"]
    return foresee(success, calls, lost, escalated, _loyalty(question, usable))


def _loyalty(question: Question, usable: Mapping[str, PoolState]) -> dict[str, float]:
    """In each tier a session stays with the pool that knows most of it, unless another is clearly better: estimates of
    P differ a little from text to text, and each change costs a prompt cache."""
    known: dict[str, PoolState] = {}
    for pool in usable.values():
        best = known.get(pool.settings.tier)
        if pool.cached_tokens > (best.cached_tokens if best else 0):
            known[pool.settings.tier] = pool
    prompt = max(question.prompt_tokens, 1)
    return {pool.name: LOYALTY * min(pool.cached_tokens / prompt, 1.0) for pool in known.values()}


def _ranked(outlook: Outlook, tolerance: float) -> list[str]:
    """Each the one that would be chosen if those before it were not there."""
    left, order = sorted(outlook.cost), list[str]()
    while left:
        order.append(choose(outlook, left, tolerance))
        left.remove(order[-1])
    return order


def _reason(
    question: Question,
    usable: Mapping[str, PoolState],
    calibration: Calibration,
    known: Mapping[str, float],
    chosen: str,
) -> str:
    if len(usable) == 1:
        return "only_pool"
    if chosen == question.session_pool:
        stranger = replace(question, session_pool="")
        cold = {name: replace(pool, cached_tokens=0, expiring=0.0) for name, pool in usable.items()}
        if choose(_outlook(stranger, cold, calibration, known), list(usable), question.tolerance) != chosen:
            return "affinity"
    return "policy"
