"""The decision: the cheapest pool that is good enough, reproducibly, and with the probability it was made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.routing import Demand
from router.policy.calibration import Calibration
from router.policy.decide import NEUTRAL, Outlook, Policy, choose, decide
from router.policy.decision import Decision
from router.pools.base import PoolState
from tests.unit.router.policies import pool, question


@dataclass(frozen=True)
class Oracle:
    """Says what the test wants to be known of the text."""

    said: dict[str, float]
    version: str = "oracle"

    def logits(self, text: str) -> dict[str, float]:
        return self.said


def policy(**logits: float) -> Policy:
    return Policy("p", Oracle(logits), Calibration())


def decided(pools: list[PoolState], using: Policy = NEUTRAL, draw: float = 0.5, **fields: Any) -> Decision:
    exploration = fields.pop("exploration", 0.0)
    return decide(question(**fields), pools, using, draw=draw, exploration=exploration)


PAIR = [pool("compact"), pool("strong")]


@pytest.mark.parametrize(
    ("demand", "logits", "tolerance", "chosen"),
    [
        (Demand.MECHANICAL, {"compact": 0.8, "strong": 1.4}, 0.1, "compact"),
        (Demand.DEEP, {"compact": 0.8, "strong": 1.4}, 0.1, "strong"),
        (Demand.DEEP, {"compact": 5.0, "strong": 5.0}, 0.1, "compact"),  # a deep kind, but P says that it is easy
        (Demand.MECHANICAL, {"compact": -2.0, "strong": 1.4}, 0.1, "strong"),
        (Demand.MECHANICAL, {"compact": 0.8, "strong": 1.4}, 0.0, "strong"),  # the best, whatever it costs
        (Demand.DEEP, {"compact": -5.0, "strong": 5.0}, 1.0, "compact"),  # the cheapest, whatever it knows
    ],
)
def test_the_cheapest_that_is_good_enough(
    demand: Demand, logits: dict[str, float], tolerance: float, chosen: str
) -> None:
    found = decided(PAIR, policy(**logits), demand=demand, tolerance=tolerance)
    assert found.pool == chosen
    assert found.order[0] == chosen and set(found.order) == {"compact", "strong"}
    assert found.scores["compact"].cost < found.scores["strong"].cost


def test_equal_pools_are_told_apart_by_p_and_then_by_name() -> None:
    twins = [pool("b", like="better"), pool("c"), pool("a")]
    assert decided(twins, policy(compact=1.0, better=1.1)).pool == "b"
    assert decided(twins, policy(compact=1.0, better=1.0)).pool == "a"


def test_a_pool_is_judged_by_the_model_it_resembles_else_by_its_tier() -> None:
    pools = [pool("x", like="llama-3-8b"), pool("y", like="unheard-of")]
    found = decided(pools, policy(compact=0.0, strong=0.0, **{"llama-3-8b": 2.0}))
    assert found.scores["x"].success > found.scores["y"].success
    assert (found.features["logit.x"], found.features["logit.y"]) == (2.0, 0.0)


shares = st.floats(0, 1)


@given(
    st.lists(st.tuples(shares, st.integers(0, 10**12), st.floats(0, 0.05)), min_size=1, max_size=6),
    st.lists(shares, min_size=2, max_size=6),
)
def test_more_tolerance_never_costs_more(pools: list[tuple[float, int, float]], tolerances: list[float]) -> None:
    names = [f"p{index}" for index in range(len(pools))]
    success, cost, bonus = ({name: each[i] for name, each in zip(names, pools, strict=True)} for i in range(3))
    outlook = Outlook(success, success, cost, bonus)  # type: ignore[arg-type]
    chosen = [choose(outlook, names, tolerance) for tolerance in sorted(tolerances)]
    costs = [outlook.cost[name] for name in chosen]
    value = [min(outlook.final[name] + outlook.bonus[name], 1.0) for name in chosen]
    assert costs == sorted(costs, reverse=True)
    assert value == sorted(value, reverse=True)


def test_what_a_verifier_looks_at_starts_compact_where_that_is_worth_trying() -> None:
    hard = policy(compact=-1.0, strong=1.0)
    assert decided(PAIR, hard).pool == "strong"
    checked = decided(PAIR, hard, checked=True)
    assert checked.pool == "compact"
    unchecked = decided(PAIR, hard)
    dearer = checked.scores["compact"].cost - unchecked.scores["compact"].cost
    expected = (1 - checked.scores["compact"].success) * unchecked.scores["strong"].cost
    assert dearer == pytest.approx(expected, rel=1e-6)  # the escalation is part of the price
    assert checked.scores["compact"].success == unchecked.scores["compact"].success  # but not of its own merit


def test_what_is_not_escalated_is_not_taken_for_a_try() -> None:
    """Nobody is asked after a strong pool: a cheap one's mistakes stay, whoever may look at them."""
    pools = [pool("strong-cheap", price_in=0.5, price_out=1.0, like="weak"), pool("strong")]
    knowing = Policy("p", Oracle({"weak": -1.0, "strong": 3.0}), Calibration())
    for checked in (False, True):
        assert decided(pools, knowing, checked=checked).pool == "strong"
    assert decided([*pools, pool("compact")], knowing, checked=True).pool == "compact"


def test_a_try_that_costs_nearly_as_much_and_fails_anyway_is_not_made() -> None:
    dear = [pool("compact", price_in=2.5, price_out=12.0), pool("strong", price_cache_write=None)]
    assert decided(dear, policy(compact=-4.0, strong=2.0), checked=True).pool == "strong"


def test_exploration_picks_every_usable_pool_as_often_as_it_says() -> None:
    pools = [*PAIR, pool("strong-2"), pool("other", window=10), pool("foreign")]
    mine = frozenset({"compact", "strong", "strong-2", "other"})
    draws = [(index + 0.5) / 3000 for index in range(3000)]
    found = [decided(pools, draw=draw, exploration=0.3, allowed=mine) for draw in draws]
    counts = {name: sum(each.pool == name for each in found) / len(found) for name in ("compact", "strong", "strong-2")}
    assert counts == {"compact": pytest.approx(0.8), "strong": pytest.approx(0.1), "strong-2": pytest.approx(0.1)}
    for each in found:  # the propensity is that share, whichever way the pool came to be chosen
        assert each.propensity == pytest.approx(counts[each.pool])
        assert each.reason == ("policy" if each.pool == "compact" else "explored")
        assert each.order[0] == each.pool and len(set(each.order)) == 3


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999999])
def test_without_exploration_nothing_is_left_to_chance(draw: float) -> None:
    assert (decided(PAIR, draw=draw).pool, decided(PAIR, draw=draw).propensity) == ("compact", 1.0)
    only = decided(PAIR, draw=draw, exploration=0.2, allowed=frozenset({"strong"}))
    assert (only.pool, only.propensity, only.reason) == ("strong", 1.0, "only_pool")


def test_a_warm_prompt_cache_is_not_left_for_exploration() -> None:
    warm = [pool("compact", {"cached_tokens": 900}), pool("strong")]
    found = decided(warm, draw=0.0, exploration=0.2, session_pool="compact")
    assert (found.pool, found.propensity) == ("compact", 1.0)


def test_a_trial_policy_is_asked_and_not_followed() -> None:
    trial = Policy("t", Oracle({"compact": -3.0, "strong": 3.0}), Calibration())
    found = decide(question(), PAIR, NEUTRAL, draw=0.5, trial=trial)
    assert (found.pool, found.shadow, found.policy) == ("compact", {"t": "strong"}, "neutral")


def test_features_hold_no_text_and_no_number_that_is_none() -> None:
    said = question("secret words", trajectory={"severity": float("nan"), "spinning": 1e300}, tools=True)
    found = decide(said, PAIR, policy(compact=float("inf"), strong=1.0), draw=0.5)
    assert "secret" not in repr(found)
    assert all(abs(value) < 1e6 for value in found.features.values())
    assert found.features["agent.severity"] == 0.0
    assert all(0 < score.success < 1 for score in found.scores.values())
