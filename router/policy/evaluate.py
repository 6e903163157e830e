"""How well the method routes on public tables: what `tailrace route eval` measures. Deterministic.

Each seed splits a table by clusters of near-duplicates, trains on one side and routes the other. The method's constants
were chosen on seeds 0 to 14; what is reported is on others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.errors import UserError
from router.policy import curves
from router.policy.duplicates import clusters
from router.policy.features import Features, extract
from router.policy.fit import FOLDS, Places, Prompts, fit
from router.policy.model import COMPACT, STRONG, TIER, Matrix
from router.policy.simulate import cascade
from router.policy.tables import DEMANDS, Table
from router.policy.train import tiers_of

FIRST_SEED = 100
TRAINING = 7000  # prompts of the larger training set; all others are routed, for the smaller one too
SMALL = 1500
SUBJECT_PRIOR = 10  # prompts of the average subject that each subject's mean is smoothed with
SHARES = (0.2, 0.4, 0.6)  # of strong calls at which accuracy is told, beside a random choice of as many
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
VERIFIERS = (1.0, 0.9, 0.8)  # precision and recall
T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, 1 to 9 degrees of freedom
PRICES = {"mistralai/Mixtral-8x7B-Instruct-v0.1": 0.24, "gpt-4-1106-preview": 24.7}  # dollars per million tokens
Numbers = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Pair:
    """A table of two models, N prompts."""

    features: list[Features]
    prompts: Prompts
    alike: Places  # [N] cluster of near-duplicates
    weak: Matrix
    strong: Matrix
    groups: list[str]
    lengths: Numbers  # characters

    @classmethod
    def of(cls, table: Table) -> Pair:
        """By price, which of the two is which."""
        tiers = tiers_of(table, PRICES)
        if sorted(tiers.values()) != [COMPACT, STRONG]:
            raise UserError(f"{table.name}: a weak and a strong model are needed, it tells of {table.models}")
        compact, strong = (next(name for name, tier in tiers.items() if tier == which) for which in (COMPACT, STRONG))
        features = [extract(prompt) for prompt in table.prompts]
        return cls(
            features=features,
            prompts=Prompts.of(features),
            alike=clusters(table.prompts),
            weak=table.of(compact),
            strong=table.of(strong),
            groups=table.groups,
            lengths=np.array([len(prompt) for prompt in table.prompts], dtype=float),
        )

    def scores(self, inside: Places, outside: Places, seed: int, *, grouped: bool = True) -> Numbers:
        """[outside] P(strong is right) - P(weak is right), learned inside. Only training knows groups."""
        groups = [self.groups[row] if grouped else "" for row in inside]
        outcomes = {COMPACT: self.weak[inside], STRONG: self.strong[inside]}
        model = fit(self.prompts[inside], outcomes, groups, self.alike[inside], seed).model
        chances = np.stack([model.chances(self.features[row]) for row in outside])
        return chances[:, 1] - chances[:, 0]

    def subject_means(self, inside: Places, outside: Places) -> Numbers:
        """[outside] mean gain of each prompt's subject inside: knows the subject, which a router does not."""
        gains = (self.strong - self.weak)[inside]
        names, places = np.unique(np.array(self.groups), return_inverse=True)
        sums = np.bincount(places[inside], weights=gains, minlength=len(names))
        counts = np.bincount(places[inside], minlength=len(names))
        return ((sums + SUBJECT_PRIOR * gains.mean()) / (counts + SUBJECT_PRIOR))[places[outside]]


def split(alike: Places, seed: int, count: int) -> tuple[Places, Places]:
    """Rows to train on, `count` or a few more, and all others; a cluster lies on one side.

    The order is random, so that the first rows of either side are a sample of it.
    """
    names, places = np.unique(alike, return_inverse=True)
    order = np.argsort(np.random.default_rng(seed).permutation(len(names))[places], kind="stable")
    while count < len(order) and places[order[count]] == places[order[count - 1]]:
        count += 1
    return order[:count], order[count:]


def quality(score: Numbers, weak: Numbers, strong: Numbers) -> dict[str, float]:
    """The figures of one ranking."""
    curve = curves.recovered(score, weak, strong)
    gap, base = float(strong.mean() - weak.mean()), float(weak.mean())
    at_shares = {f"accuracy_at_{share:g}": base + gap * float(curve[round(share * len(score))]) for share in SHARES}
    return {
        "apgr": float(curve.mean()),
        "cpt50": curves.cpt(score, weak, strong, 0.5),
        "cpt80": curves.cpt(score, weak, strong, 0.8),
        **at_shares,
    }


def summary(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Means over seeds, each with its 95 % interval (Student's t)."""
    found: dict[str, Any] = {}
    for name in runs[0]:
        values = np.array([run[name] for run in runs])
        found[name] = round(float(values.mean()), 4)
        if len(values) > 1:
            freedom = len(values) - 1
            half = (T95[freedom - 1] if freedom <= len(T95) else 2.0) * float(values.std(ddof=1)) / len(values) ** 0.5
            found[f"{name}_interval"] = [round(found[name] - half, 4), round(found[name] + half, 4)]
    return found


def mmlu(pair: Pair, seeds: Sequence[int], progress: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """The keys mmlu_1500 and mmlu_7000: the same prompts are routed after either training."""
    if len(pair.alike) < 2 * TRAINING:
        raise UserError(f"the MMLU table has {len(pair.alike)} prompts, {2 * TRAINING} are needed; give it whole")
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for seed in seeds:
        inside, outside = split(pair.alike, seed, TRAINING)
        for labels in (SMALL, TRAINING):
            progress(f"MMLU, seed {seed}: learning from {labels} prompts")
            some = inside[:labels] if labels < TRAINING else inside
            scores = {
                "router": pair.scores(some, outside, seed),
                "without_groups": pair.scores(some, outside, seed, grouped=False),
                "subject_mean": pair.subject_means(some, outside),
                "prompt_length": pair.lengths[outside],
                "random": np.random.default_rng(seed).random(len(outside)),
            }
            for name, score in scores.items():
                run = quality(score, pair.weak[outside], pair.strong[outside])
                runs.setdefault(f"mmlu_{labels}", {}).setdefault(name, []).append(run)
    return {key: _beside(found) for key, found in runs.items()}


def gsm8k(pair: Pair, seeds: Sequence[int], progress: Callable[[str], None]) -> dict[str, Any]:
    """The key gsm8k: every prompt is routed by a model that was trained on the other folds."""
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in seeds:
        progress(f"GSM8K, seed {seed}: {FOLDS} folds")
        names, places = np.unique(pair.alike, return_inverse=True)
        folds = np.random.default_rng(seed).permutation(len(names))[places] % FOLDS
        score = np.zeros(len(folds))
        for fold in range(FOLDS):
            inside, outside = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
            score[outside] = pair.scores(inside, outside, seed)
        chance = np.random.default_rng(seed).random(len(score))
        for name, each in {"router": score, "prompt_length": pair.lengths, "random": chance}.items():
            runs.setdefault(name, []).append(quality(each, pair.weak, pair.strong))
    return _beside(runs)


def _beside(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    return {**summary(runs["router"]), **{name: summary(runs[name]) for name in runs if name != "router"}}


def cascades(pair: Pair) -> dict[str, Any]:
    """Weak first, strong where a verifier of stated precision and recall refuses; dollars per million tokens."""
    weak, strong = pair.weak > 0.5, pair.strong > 0.5
    cheap, dear = PRICES.values()
    found: dict[str, Any] = {
        "weak_alone": {"accuracy": round(float(weak.mean()), 4), "strong_share": 0.0, "cost": cheap},
        "strong_alone": {"accuracy": round(float(strong.mean()), 4), "strong_share": 1.0, "cost": dear},
    }
    for level in VERIFIERS:
        got = cascade(weak, strong, cheap, dear, precision=level, recall=level)
        found[f"verifier_{level:g}"] = {name: round(value, 4) for name, value in vars(got).items()}
    return found


def multi_model(table: Table, seeds: Sequence[int], progress: Callable[[str], None]) -> dict[str, Any]:
    """Which of many: for each tolerance the cheapest model whose P(success) is at most that much below the best one's.

    Beside it: the best single model of the training side, the cheapest, and the cheapest that is right.
    """
    features = [extract(prompt) for prompt in table.prompts]
    prompts, alike = Prompts.of(features), clusters(table.prompts)
    models = table.models
    truth = np.stack([table.of(model) for model in models], axis=1)
    prices = np.array([table.prices[model] for model in models])
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in seeds:
        progress(f"many models, seed {seed}")
        inside, outside = split(alike, seed, round(0.7 * len(features)))
        groups = [table.groups[row] for row in inside]
        outcomes = {model: truth[inside, place] for place, model in enumerate(models)}
        model = fit(prompts[inside], outcomes, groups, alike[inside], seed).model
        chances = np.stack([model.chances(features[row]) for row in outside])
        right = truth[outside]
        chosen = {
            "best_single": np.full(len(outside), truth[inside].mean(0).argmax()),
            "cheapest": np.full(len(outside), prices.argmin()),
            "oracle": np.where(right >= right.max(1, keepdims=True), prices, np.inf).argmin(1),
        }
        for tolerance in TOLERANCES:
            good = chances >= chances.max(1, keepdims=True) - tolerance
            cost = np.where(good, prices - 1e-6 * chances, np.inf)  # of equal prices the likelier
            chosen[f"router_{tolerance:g}"] = cost.argmin(1)
        for name, choice in chosen.items():
            accuracy = float(right[np.arange(len(choice)), choice].mean())
            runs.setdefault(name, []).append({"accuracy": accuracy, "cost": float(prices[choice].mean())})
    return {name: summary(run) for name, run in runs.items()}


def tiers(train: Table, dev: Table) -> dict[str, Any]:
    """How often the tier of demand is told right, and whether it takes thought at all (COMPLEX, REASONING)."""
    alike = clusters([*train.prompts, *dev.prompts])
    alone = np.flatnonzero(~np.isin(alike[: len(train.prompts)], alike[len(train.prompts) :]))
    said = np.array(train.tiers)[alone]
    outcomes = {TIER + demand: (said == demand).astype(np.float32) for demand in DEMANDS}
    prompts = Prompts.of([extract(train.prompts[row]) for row in alone])
    model = fit(prompts, outcomes, [train.groups[row] for row in alone], alike[alone]).model
    chances = np.stack([model.chances(extract(prompt)) for prompt in dev.prompts])
    truth = np.array([DEMANDS.index(tier) for tier in dev.tiers])
    told = chances.argmax(1)
    deep, deep_told = truth >= 2, chances[:, 2:].sum(1) > chances[:, :2].sum(1)
    return {
        "prompts": len(truth),
        "near_duplicates_left_out": len(train.prompts) - len(alone),
        "accuracy": round(float((told == truth).mean()), 4),
        "within_one_tier": round(float((abs(told - truth) <= 1).mean()), 4),
        "majority": round(float(np.bincount(truth).max() / len(truth)), 4),
        "deep_accuracy": round(float((deep_told == deep).mean()), 4),
        "deep_recall": round(float(deep_told[deep].mean()), 4),
        "deep_majority": round(float(max(deep.mean(), 1 - deep.mean())), 4),
    }
