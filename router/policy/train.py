"""From tables of outcomes to a model and its card: what `tailrace route train` does. Deterministic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.errors import UserError
from router.policy import curves
from router.policy.duplicates import clusters
from router.policy.features import extract
from router.policy.fit import FOLDS, Fitted, Prompts, fit
from router.policy.model import COMPACT, LEAST, STRONG, TIER, Matrix
from router.policy.tables import DEMANDS, Table

FEWEST = 100  # prompts that a model can be trained on
BINS = 10  # of the calibration error, equally full
METHOD = (
    "ridge on hashed n-grams plus kernel ridge on their projections, the groups of the training data and figures of "
    "form; out of fold: near-duplicates share a fold"
)


@dataclass(frozen=True)
class Rows:
    """The rows of all tables as arrays, N in all."""

    prompts: list[str]
    outcomes: dict[str, Matrix]  # [N] each, NaN where unknown
    groups: list[str]
    tables: npt.NDArray[np.intp]  # [N] place of the table in the list


def tiers_of(table: Table, prices: Mapping[str, float]) -> dict[str, str]:
    """Which models of a table are compact and which strong.

    By price, apart at the geometric mean of the cheapest and the dearest; where prices are missing, by mean outcome,
    apart at the middle. A model that a cheaper one equals stands for no tier (""): nobody would call it.
    """
    known = {**table.prices, **prices}
    means = {model: float(np.nanmean(table.of(model))) for model in table.models}
    priced = all(known.get(model, 0) > 0 for model in means)
    values = {model: math.log(known[model]) if priced else means[model] for model in means}
    middle = (min(values.values()) + max(values.values())) / 2 if values else 0.0
    return {
        model: ""
        if priced and any(known[other] < known[model] and means[other] >= means[model] for other in means)
        else (COMPACT if value < middle else STRONG)
        for model, value in values.items()
    }


def assemble(tables: Sequence[Table], prices: Mapping[str, float]) -> Rows:
    """Put tables under each other; `compact` and `strong` are the means over the models of that tier."""
    models = sorted({model for table in tables for model in table.models})
    parts: list[dict[str, Matrix]] = []
    for table in tables:
        columns = {model: table.of(model) for model in table.models}
        tiers = tiers_of(table, prices)
        for tier in (COMPACT, STRONG):
            own = [columns[model] for model in tiers if tiers[model] == tier]
            if own:
                stacked, known = np.stack(own), ~np.isnan(np.stack(own))
                count = known.sum(0)
                total = np.where(known, stacked, 0).sum(0)
                columns[tier] = np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)
        for demand in DEMANDS:
            said = [float(tier == demand) if tier else math.nan for tier in table.tiers]
            columns[TIER + demand] = np.array(said, dtype=np.float32)
        parts.append(columns)
    names = [COMPACT, STRONG, *models, *(TIER + demand for demand in DEMANDS)]
    outcomes = {
        name: np.concatenate(
            [
                part.get(name, np.full(len(table.prompts), np.nan, np.float32))
                for part, table in zip(parts, tables, strict=True)
            ]
        )
        for name in names
    }
    return Rows(
        prompts=[prompt for table in tables for prompt in table.prompts],
        outcomes={name: values for name, values in outcomes.items() if name in (COMPACT, STRONG) or _any(values)},
        groups=[f"{table.name} {group}" for table in tables for group in table.groups],
        tables=np.repeat(np.arange(len(tables)), [len(table.prompts) for table in tables]),
    )


def _any(values: Matrix) -> bool:
    return not bool(np.isnan(values).all())


def train(
    tables: Sequence[Table], prices: Mapping[str, float], *, seed: int = 0, progress: Callable[[str], None] = print
) -> Fitted:
    """Fit a model to all tables; its card says from what and how well. Raises UserError when there is too little."""
    rows = assemble(tables, prices)
    for tier in (COMPACT, STRONG):
        if not _any(rows.outcomes[tier]):
            raise UserError(f"no table tells of a {tier} model: give one with at least two models that differ in price")
    if len(rows.prompts) < FEWEST:
        raise UserError(f"{len(rows.prompts)} prompts are too few to learn from; give at least {FEWEST}")
    progress(f"{len(rows.prompts)} prompts from {len(tables)} tables: features and near-duplicates")
    prompts = Prompts.of([extract(prompt) for prompt in rows.prompts])
    alike = clusters(rows.prompts)
    progress(f"fitting {len(rows.outcomes)} outcomes, {FOLDS} folds")
    fitted = fit(prompts, rows.outcomes, rows.groups, alike, seed)
    fitted.model.card.update(card_of(tables, rows, fitted.out_of_fold, prices, len(np.unique(alike)), seed))
    return fitted


def card_of(
    tables: Sequence[Table], rows: Rows, out_of_fold: Matrix, prices: Mapping[str, float], distinct: int, seed: int
) -> dict[str, Any]:
    """The model's card: provenance, licences, sizes, and figures out of fold."""
    said = dict(zip(rows.outcomes, out_of_fold.T, strict=True))
    return {
        "method": METHOD,
        "seed": seed,
        "prompts": len(rows.prompts),
        "distinct_prompts": distinct,
        "training_data": [
            {
                "table": table.name,
                "prompts": len(table.prompts),
                "left_out": dict(table.bad),
                "models": tiers_of(table, prices),
                "prices_usd_per_million": {
                    model: price for model, price in {**table.prices, **prices}.items() if model in table.models
                },
                "licences": table.licences,
                "apgr": _apgr(rows, said, rows.tables == place),
            }
            for place, table in enumerate(tables)
        ],
        "outcomes": {name: quality(said[name], values) for name, values in rows.outcomes.items()},
    }


def _apgr(rows: Rows, said: Mapping[str, Matrix], here: npt.NDArray[np.bool_]) -> float | None:
    weak, strong = rows.outcomes[COMPACT][here], rows.outcomes[STRONG][here]
    known = ~np.isnan(weak + strong)
    if not known.any() or strong[known].mean() <= weak[known].mean():
        return None
    score = (said[STRONG] - said[COMPACT])[here][known]
    return round(curves.apgr(score, weak[known], strong[known]), 4)


def quality(said: Matrix, outcomes: Matrix) -> dict[str, float]:
    """How well probabilities foretell outcomes: Brier score beside that of the mean, and expected calibration error."""
    known = ~np.isnan(outcomes)
    chances, truth = np.clip(said[known], LEAST, 1 - LEAST), outcomes[known]
    bins = np.array_split(np.argsort(chances, kind="stable"), BINS)
    error = sum(len(part) * abs(float(chances[part].mean() - truth[part].mean())) for part in bins if len(part))
    return {
        "prompts": int(known.sum()),
        "mean": round(float(truth.mean()), 4),
        "brier": round(float(((chances - truth) ** 2).mean()), 4),
        "brier_of_mean": round(float(truth.var()), 4),
        "calibration_error": round(error / max(len(truth), 1), 4),
    }
