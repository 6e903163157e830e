"""Is a policy on trial better than the one in force, and than any single pool? Judged on logged decisions. Pure.

What another choice would have brought is estimated off-policy, from the probability with which the logged choice was
made: inverse propensity scores (Horvitz and Thompson 1952), self-normalised (Swaminathan and Joachims 2015), and doubly
robust (Dudík, Langford and Li 2011), which adds a correction to what the policy in force expected:

    v(π) = mean of q(x, π(x)) + [π(x) = a] / p(a | x) · (u − q(x, a))

with a the logged pool, p its propensity, u what came of it and q what was expected of each pool. Its error has mean 0
however wrong q is. Only decisions count that were logged after the policy on trial was fixed, and there is one look at
them: a policy that is looked at until it pleases pleases in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.routing import PoolScore

TRIAL_SIZE = 1000  # judged decisions of a trial
SUPPORT = 20  # of these, with the choice of the policy on trial where it differs: without them nothing is known of it
PATIENCE = 20_000  # judged decisions after which a trial without support ends
CONFIDENCE_Z = 1.96  # standard errors of a bound: wrong in 2.5 %, if the normal approximation holds

Choice = Callable[["Logged"], str]


@dataclass(frozen=True)
class Logged:
    """One decision that was judged."""

    pool: str  # chosen
    propensity: float  # with which it was
    greedy: str  # what the policy in force prefers
    trial: str  # what the policy on trial prefers
    scores: Mapping[str, PoolScore]  # what the policy in force expected, by usable pool
    checked: bool  # a verifier looked at the answer, so that a failure could be escalated
    tolerance: float
    success: bool  # of the answer in the end
    cost: int  # picodollars of all its calls

    def expected(self, pool: str) -> tuple[float, float]:
        """Success in the end and cost that were expected of a pool."""
        p, best = self.scores[pool].success, max(score.success for score in self.scores.values())
        return (p + (1 - p) * best if self.checked and p < best else p), float(self.scores[pool].cost)


@dataclass(frozen=True)
class Estimate:
    """Success, cost (picodollars per decision) and utility of a policy, with the utility's standard error."""

    success: float
    cost: float
    utility: float
    error: float
    ips: float  # utility by inverse propensity scores
    snips: float  # the same, self-normalised
    matched: int  # decisions whose logged pool it would have chosen as well


@dataclass(frozen=True)
class Advantage:
    """By how much the policy on trial is better than another one: utility, and its lower confidence bound."""

    mean: float
    lower: float
    support: int  # decisions with the choice of the policy on trial, where that differs


@dataclass(frozen=True)
class Judgement:
    """What a trial came to."""

    promote: bool
    reason: str
    metrics: dict[str, float]


def exchange_rate(records: Sequence[Logged]) -> float:
    """Success per picodollar: the mean tolerance is what may be given up for going from the dearest pool to the
    cheapest one."""
    names = {name for record in records for name in record.scores}
    costs = [np.mean([r.scores[name].cost for r in records if name in r.scores]) for name in names]
    spread = float(max(costs) - min(costs)) if costs else 0.0
    tolerance = float(np.mean([record.tolerance for record in records])) if records else 0.0
    return tolerance / spread if spread > 0 else 0.0


def estimate(records: Sequence[Logged], choice: Choice, rate: float) -> Estimate:
    """Value of a policy, given by what it would choose. Raises `ValueError` without records."""
    if not records:
        raise ValueError("no records to judge by")
    values = np.array([_doubly_robust(record, choice(record)) for record in records])
    utility = values[:, 0] - rate * values[:, 1]
    weights = np.array([1.0 / r.propensity if choice(r) == r.pool else 0.0 for r in records])
    gained = weights * np.array([r.success - rate * r.cost for r in records])
    return Estimate(
        success=float(values[:, 0].mean()),
        cost=float(values[:, 1].mean()),
        utility=float(utility.mean()),
        error=_standard_error(utility),
        ips=float(gained.mean()),
        snips=float(gained.sum() / weights.sum()) if weights.any() else math.nan,
        matched=int((weights > 0).sum()),
    )


def advantage(records: Sequence[Logged], ours: Choice, theirs: Choice, rate: float) -> Advantage:
    """Difference of two policies on the same decisions, so that what they have in common cancels out.

    Where they differ, little is seen of the one that is not in force, and what is seen weighs much; by chance all of it
    may be good. So one success and one failure more are taken to have been seen (after Agresti and Coull 1998).
    """
    differences, weights = [0.0] * len(records), {True: [0.0], False: [0.0]}
    for index, record in enumerate(records):
        a, b = ours(record), theirs(record)
        if a != b:
            mine, other = _doubly_robust(record, a), _doubly_robust(record, b)
            differences[index] = mine[0] - other[0] - rate * (mine[1] - other[1])
            if record.pool in (a, b):
                weights[record.pool == a].append(1.0 / record.propensity)
    support = len(weights[True]) - 1
    heaviest = max(sum(seen) / max(len(seen) - 1, 1) for seen in weights.values())
    values = np.array([*differences, heaviest, -heaviest])
    mean = float(values.mean())
    return Advantage(mean, mean - CONFIDENCE_Z * _standard_error(values), support)


def judge(records: Sequence[Logged]) -> Judgement | None:
    """End a trial: None while too little is known.

    A policy is promoted only when the lower bounds of its advantages over the policy in force and over every single
    pool are above 0: all at once, so that the error of the whole is no larger than that of one.
    """
    if len(records) < TRIAL_SIZE:
        return None
    rate = exchange_rate(records)
    over_active = advantage(records, on_trial, in_force, rate)
    if over_active.support < SUPPORT:
        if len(records) < PATIENCE:
            return None
        return Judgement(False, f"only {over_active.support} decisions told the two policies apart", {})
    ours, theirs = estimate(records, on_trial, rate), estimate(records, in_force, rate)
    singles = {name: advantage(records, on_trial, single(name), rate) for name in _pools(records)}
    hardest = min(singles, key=lambda name: (singles[name].lower, name))
    metrics = {
        "decisions": float(len(records)),
        "success": ours.success,
        "cost": ours.cost,
        "success_in_force": theirs.success,
        "cost_in_force": theirs.cost,
        "advantage": over_active.mean,
        "advantage_lower": over_active.lower,
        "advantage_over_single_lower": singles[hardest].lower,
    }
    if not over_active.lower > 0:
        return Judgement(False, f"not shown to be better than the policy in force ({_range(over_active)})", metrics)
    if not singles[hardest].lower > 0:
        return Judgement(False, f"not shown to be better than {hardest} alone ({_range(singles[hardest])})", metrics)
    return Judgement(True, f"better than the policy in force ({_range(over_active)}) and any single pool", metrics)


def on_trial(record: Logged) -> str:
    """What the policy on trial prefers."""
    return record.trial


def in_force(record: Logged) -> str:
    """What the policy in force prefers, exploration left out."""
    return record.greedy


def single(pool: str) -> Choice:
    """Always the same pool; where that cannot take a request, what the policy in force prefers."""
    return lambda record: pool if pool in record.scores else record.greedy


def _doubly_robust(record: Logged, pool: str) -> tuple[float, float]:
    """Success and cost of giving this request to a pool."""
    success, cost = record.expected(pool)
    if pool == record.pool:
        success += (record.success - success) / record.propensity
        cost += (record.cost - cost) / record.propensity
    return success, cost


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf


def _pools(records: Sequence[Logged]) -> list[str]:
    return sorted({name for record in records for name in record.scores})


def _range(found: Advantage) -> str:
    return f"{found.mean:+.4f}, at least {found.lower:+.4f}"
