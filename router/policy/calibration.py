"""P(success | pool): the cold-start model's logits, corrected by what came of earlier decisions. Pure.

One regularised logistic regression per pool over a few dense features (a logit, demand, kind, sizes, an agent's
figures): the maximum a posteriori under independent Gaussian priors, that is Platt scaling (Platt 1999) with a prior.
The prior believes the cold-start model, though not blindly, since it was trained on other questions; it trusts compact
models with what is mechanical, and less where thought is needed or an agent has open failures. Text is neither needed
nor kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from contracts.routing import Demand
from router.policy.decision import Question
from router.pools.base import PoolState

LIMIT = 8.0  # bound of every input, and of the logit that comes out
MEAN: dict[str, dict[str, float]] = {  # prior means by tier; 0 where nothing is said
    "compact": {"bias": 1.6, "logit": 0.6, "deep": -2.4, "agent.severity": -1.5, "agent.spinning": -1.5},
    "strong": {"bias": 1.5, "logit": 0.6, "deep": -0.6, "agent.severity": -0.5, "agent.spinning": -0.5},
}
PRECISION = {"bias": 1.0, "logit": 4.0}  # prior precisions, 1 / variance
OTHER_PRECISION = 2.0
LENGTHS = {  # answer tokens expected of a kind before any was seen
    "code": 600, "tests": 600, "edit": 400, "extraction": 200, "summary": 250, "arithmetic": 120, "syntax": 150,
    "writing": 700, "design": 1000, "proof": 800, "exploring": 120, "verifying": 120,
}  # fmt: skip
OTHER_LENGTH = 350
LENGTH_WEIGHT = 20  # answers that the guess above counts as
MOST = 64  # pools, kinds, and inputs of a pool that are fitted: the most frequent ones
NEWTON_STEPS = 25
CONVERGED = 1e-8


class Calibration(msgspec.Struct, frozen=True):
    """What was learned from traffic. Empty = the prior."""

    weights: dict[str, dict[str, float]] = {}  # pool -> input -> weight
    lengths: dict[str, float] = {}  # kind -> mean answer tokens
    samples: dict[str, int] = {}  # pool -> judged decisions it was fitted to

    def success(self, pool: str, tier: str, inputs: Mapping[str, float]) -> float:
        """P(success) of a pool for `inputs_of` a decision."""
        weights = self.weights.get(pool) or MEAN[tier]
        score = sum(weights[name] * value for name, value in inputs.items() if name in weights)
        return sigmoid(score)

    def answer_tokens(self, question: Question) -> int:
        """Tokens that an answer to this question is expected to have; never above its limit."""
        mean = self.lengths.get(question.kind) or LENGTHS.get(question.kind, OTHER_LENGTH)
        return round(mean if question.max_tokens is None else min(mean, question.max_tokens))


@dataclass(frozen=True)
class Judged:
    """One answer that was judged: what was known before, and whether it was right."""

    pool: str
    tier: str
    inputs: Mapping[str, float]
    success: bool


def sigmoid(score: float) -> float:
    """Logistic function of a score bounded to ± LIMIT, so that no P(success) is ever 0 or 1."""
    return 1.0 / (1.0 + math.exp(-bounded(score)))


def bounded(value: float) -> float:
    """Within ± LIMIT; what is no number says nothing."""
    return 0.0 if value != value else max(-LIMIT, min(LIMIT, value))


def features(question: Question, pools: Iterable[PoolState], logits: Mapping[str, float]) -> dict[str, float]:
    """Everything a decision is made from but kind and demand, as it is recorded: never text."""
    found = {
        "prompt_tokens": float(question.prompt_tokens),
        "tools": float(question.tools),
        "json": float(question.json_mode),
        "images": float(question.images),
        "checked": float(question.checked),
    }
    if question.max_tokens is not None:
        found["max_tokens"] = float(question.max_tokens)
    for name, value in question.trajectory.items():
        found[f"agent.{name}"] = bounded(value)
    for pool in pools:
        base = logits.get(pool.settings.like)
        found[f"logit.{pool.name}"] = bounded(logits.get(pool.settings.tier, 0.0) if base is None else base)
    return found


def inputs_of(pool: str, kind: str, demand: str, features: Mapping[str, float]) -> dict[str, float]:
    """What P(success) of one pool is computed from, out of a decision's recorded features."""
    figures = {name: value for name, value in features.items() if name.startswith("agent.")}
    return figures | {
        "bias": 1.0,
        "logit": features.get(f"logit.{pool}", 0.0),
        "deep": float(demand == Demand.DEEP),
        "size": math.log10(1.0 + max(features.get("prompt_tokens", 0.0), 0.0)) - 3.0,
        "tools": features.get("tools", 0.0),
        "json": features.get("json", 0.0),
        f"kind.{kind}": 1.0,
    }


def fit(judged: Iterable[Judged], answers: Iterable[tuple[str, int]] = ()) -> Calibration:
    """Calibration of what was judged, and mean lengths of (kind, answer tokens). Deterministic, whatever the order."""
    by_pool: dict[str, list[Judged]] = {}
    for each in judged:
        by_pool.setdefault(each.pool, []).append(each)
    by_kind: dict[str, list[int]] = {}
    for kind, tokens in answers:
        by_kind.setdefault(kind, []).append(tokens)
    pools = _most({pool: len(items) for pool, items in by_pool.items()})
    kinds = _most({kind: len(seen) for kind, seen in by_kind.items()})
    return Calibration(
        weights={pool: _posterior(by_pool[pool]) for pool in pools},
        lengths={kind: _mean_length(kind, by_kind[kind]) for kind in kinds},
        samples={pool: len(by_pool[pool]) for pool in pools},
    )


def _most(counts: Mapping[str, int]) -> list[str]:
    """The most frequent names, in order of the alphabet."""
    return sorted(sorted(counts, key=lambda name: (-counts[name], name))[:MOST])


def _mean_length(kind: str, seen: list[int]) -> float:
    guess = LENGTHS.get(kind, OTHER_LENGTH)
    return (guess * LENGTH_WEIGHT + sum(seen)) / (LENGTH_WEIGHT + len(seen))


def _posterior(judged: list[Judged]) -> dict[str, float]:
    """Newton's method on ½ Σ λ (w − m)² + Σ log(1 + exp(−y w·x)); it is strictly convex, so there is one answer."""
    mean = MEAN[judged[0].tier]
    names = sorted({*_most(Counter(name for each in judged for name in each.inputs)), *mean})
    column = {name: index for index, name in enumerate(names)}
    x = np.zeros((len(judged), len(names)))
    for row, each in enumerate(judged):
        for name, value in each.inputs.items():
            if name in column:
                x[row, column[name]] = bounded(value)
    order = np.lexsort((*x.T, [each.success for each in judged]))  # sums of floats depend on their order
    x = x[order]
    y = np.array([each.success for each in judged], dtype=float)[order]
    prior = np.array([mean.get(name, 0.0) for name in names])
    precision = np.array([PRECISION.get(name, OTHER_PRECISION) for name in names])

    def loss(w: np.ndarray) -> float:
        score = x @ w
        return float(np.sum(np.logaddexp(0.0, score) - y * score) + 0.5 * np.sum(precision * (w - prior) ** 2))

    w, now = prior.copy(), loss(prior)
    for _ in range(NEWTON_STEPS):
        p = 1.0 / (1.0 + np.exp(-(x @ w)))
        gradient = x.T @ (p - y) + precision * (w - prior)
        step = np.linalg.solve((x.T * (p * (1.0 - p))) @ x + np.diag(precision), gradient)
        while (then := loss(w - step)) > now and float(np.max(np.abs(step))) >= CONVERGED:
            step = step / 2.0
        w, now = w - step, then
        if float(np.max(np.abs(step))) < CONVERGED:
            break
    return {name: float(value) for name, value in zip(names, w, strict=True)}
