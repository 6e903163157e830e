"""Calibration: it starts at the prior, moves with evidence, and says the same whatever the order."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from contracts.routing import Demand
from router.decomposition.plan import Kind
from router.policy.calibration import LENGTHS, MEAN, MOST, Calibration, Judged, features, fit, inputs_of
from tests.unit.router.policies import pool, question

PRIOR = Calibration()


def inputs(logit: float = 1.0, demand: str = Demand.MECHANICAL, kind: str = Kind.CODE) -> dict[str, float]:
    return inputs_of("a", kind, demand, {"logit.a": logit, "prompt_tokens": 1000.0})


def judged(count: int, rate: float, seed: int = 0, **given: object) -> list[Judged]:
    rng = random.Random(seed)
    return [Judged("a", "compact", inputs(**given), rng.random() < rate) for _ in range(count)]  # type: ignore[arg-type]


def success(calibration: Calibration, **given: object) -> float:
    return calibration.success("a", "compact", inputs(**given))  # type: ignore[arg-type]


def test_the_prior_believes_the_model_and_doubts_compact_models_where_thought_is_needed() -> None:
    assert success(PRIOR, logit=2.0) > success(PRIOR, logit=0.0)
    assert success(PRIOR, demand=Demand.MECHANICAL) - success(PRIOR, demand=Demand.DEEP) > 0.2
    strong = [PRIOR.success("a", "strong", inputs(1.4, demand)) for demand in (Demand.MECHANICAL, Demand.DEEP)]
    assert strong[0] - strong[1] < 0.1
    assert PRIOR.success("unheard of", "strong", inputs()) == PRIOR.success("a", "strong", inputs())


@pytest.mark.parametrize(("rate", "count"), [(0.2, 50), (0.2, 1000), (0.99, 1000), (0.5, 1000), (0.0, 5000), (1.0, 1)])
def test_evidence_moves_it_towards_what_happens(rate: float, count: int) -> None:
    observed = judged(count, rate)
    share = sum(each.success for each in observed) / count
    found = success(fit(observed))
    assert abs(found - share) < abs(success(PRIOR) - share) or count == 1
    if count >= 1000:
        assert found == pytest.approx(share, abs=0.02)


def test_it_learns_by_kind_and_leaves_the_others_alone() -> None:
    fitted = fit([*judged(500, 0.1, kind=Kind.TESTS), *judged(500, 0.9, seed=1, kind=Kind.CODE)])
    assert success(fitted, kind=Kind.TESTS) < 0.2 < 0.8 < success(fitted, kind=Kind.CODE)
    assert 0.3 < success(fitted, kind=Kind.SUMMARY) < 0.8  # never seen: what holds for all kinds


def test_it_corrects_a_model_that_is_too_sure_of_itself() -> None:
    """Probabilities agree with frequencies afterwards: expected calibration error over deciles."""
    rng = random.Random(1)
    observed = []
    for _ in range(4000):
        truth = rng.gauss(0.5, 1.0)
        right = rng.random() < 1 / (1 + math.exp(-truth))
        observed.append(Judged("a", "compact", inputs(logit=3 * truth - 2), right))

    def error(calibration: Calibration) -> float:
        bins: dict[int, list[tuple[float, bool]]] = {}
        for each in observed:
            p = calibration.success("a", "compact", each.inputs)
            bins.setdefault(int(10 * p), []).append((p, each.success))
        return sum(abs(sum(p - y for p, y in found)) for found in bins.values()) / len(observed)

    assert error(fit(observed[:2000])) < 0.03 < 0.08 < error(PRIOR)


def test_the_order_of_evidence_does_not_matter_to_the_last_bit() -> None:
    observed = [*judged(200, 0.7), *judged(200, 0.3, seed=2, kind=Kind.TESTS, demand=Demand.DEEP)]
    shuffled = random.Random(3).sample(observed, len(observed))
    assert fit(observed) == fit(shuffled)


@pytest.mark.parametrize("value", [1e300, -1e300, math.inf, -math.inf, math.nan])
def test_impossible_numbers_neither_break_a_fit_nor_a_prediction(value: float) -> None:
    poison = [Judged("a", "compact", {**inputs(), "agent.x": value, "logit": value}, bool(i % 2)) for i in range(20)]
    fitted = fit([*judged(100, 0.7), *poison])
    assert all(math.isfinite(weight) for weight in fitted.weights["a"].values())
    assert 0 < fitted.success("a", "compact", inputs()) < 1
    known = features(question(trajectory={"x": value}), [pool("a")], {"compact": value})
    assert 0 < fitted.success("a", "compact", inputs_of("a", Kind.CODE, Demand.DEEP, known)) < 1


def test_what_is_fitted_is_bounded_whatever_names_come() -> None:
    flood = [Judged(f"pool-{i}", "compact", {**inputs(), f"kind.{i}": 1.0}, True) for i in range(500)]
    names = [Judged("a", "compact", {**inputs(), f"kind.{i}": 1.0}, True) for i in range(2000)]
    fitted = fit([*flood, *names], [(f"kind-{i}", 10) for i in range(500)])
    assert len(fitted.weights) == len(fitted.lengths) == MOST
    assert len(fitted.weights["a"]) <= MOST + len(MEAN["compact"])


def test_answer_lengths_start_at_a_guess_and_never_exceed_the_limit() -> None:
    asked = question(kind=Kind.CODE)
    assert PRIOR.answer_tokens(asked) == LENGTHS["code"]
    assert PRIOR.answer_tokens(question(kind=Kind.CODE, max_tokens=16)) == 16
    fitted = fit([], [("code", 100)] * 200)
    assert 100 < fitted.answer_tokens(asked) < 150
    assert fit([], [("code", 100)]).answer_tokens(asked) == pytest.approx(LENGTHS["code"], abs=30)


def test_it_survives_being_written_and_read() -> None:
    fitted = fit(judged(50, 0.5), [("code", 10)])
    assert msgspec.json.decode(msgspec.json.encode(fitted), type=Calibration) == fitted
    assert fitted.samples == {"a": 50}
