"""Trials on logged decisions, by simulation: a policy that is no better is not promoted, one that is better is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from contracts.routing import PoolScore
from router.policy import shadow
from router.policy.shadow import Logged, advantage, estimate, exchange_rate, in_force, judge, on_trial, single

CENT = 10_000_000_000  # picodollars
COST = {"compact": CENT // 10, "other": CENT // 10, "strong": CENT}
EPSILON = 0.1

# P(success) of a pool, by kind of question: what is true, and what the policy in force believes
Table = dict[str, dict[str, float]]
TRUE: Table = {
    "easy": {"compact": 0.9, "other": 0.9, "strong": 0.92},
    "tricky": {"compact": 0.3, "other": 0.3, "strong": 0.9},  # looks easy, and is not
    "hard": {"compact": 0.2, "other": 0.2, "strong": 0.8},
}
BELIEVED: Table = TRUE | {"tricky": {"compact": 0.9, "other": 0.9, "strong": 0.92}}
KINDS = ["easy"] * 5 + ["tricky"] * 3 + ["hard"] * 2


def in_force_choice(kind: str) -> str:
    return "strong" if kind == "hard" else "compact"


def logged(
    count: int, seed: int, trial: Callable[[str, random.Random], str], epsilon: float = EPSILON, checked: bool = False
) -> list[Logged]:
    """Traffic under the policy in force, with exploration."""
    rng, records = random.Random(seed), list[Logged]()
    for _ in range(count):
        kind = rng.choice(KINDS)
        greedy = in_force_choice(kind)
        pool = rng.choice(sorted(COST)) if rng.random() < epsilon else greedy
        records.append(
            Logged(
                pool=pool,
                propensity=epsilon / len(COST) + (1 - epsilon) * (pool == greedy),
                greedy=greedy,
                trial=trial(kind, rng),
                scores={name: PoolScore(p, COST[name]) for name, p in BELIEVED[kind].items()},
                checked=checked,
                tolerance=0.2,
                success=rng.random() < TRUE[kind][pool],
                cost=round(COST[pool] * rng.uniform(0.5, 1.5)),
            )
        )
    return records


def better(kind: str, rng: random.Random) -> str:
    return "compact" if kind == "easy" else "strong"


def equal(kind: str, rng: random.Random) -> str:
    """Differs from the policy in force in a third of all decisions, and nothing comes of it."""
    return in_force_choice(kind) if kind == "hard" or rng.random() < 0.6 else "other"


def worse(kind: str, rng: random.Random) -> str:
    return "compact" if kind == "hard" else "strong" if kind == "easy" else in_force_choice(kind)


def promoted(trial: Callable[[str, random.Random], str], rounds: int, count: int, epsilon: float = EPSILON) -> float:
    verdicts = [judge(logged(count, seed, trial, epsilon)) for seed in range(rounds)]
    return sum(verdict is not None and verdict.promote for verdict in verdicts) / rounds


def test_a_truly_better_policy_is_promoted() -> None:
    assert promoted(better, rounds=10, count=4000) >= 0.9
    verdict = judge(logged(4000, 0, better))
    assert verdict is not None and "better than the policy in force" in verdict.reason
    assert verdict.metrics["success"] > verdict.metrics["success_in_force"] + 0.1


def test_a_worse_policy_is_not() -> None:
    assert promoted(worse, rounds=10, count=2000) == 0


@pytest.mark.parametrize("epsilon", [0.05, 0.3])
def test_of_policies_that_are_no_better_at_most_one_in_twenty_seems_to_be(epsilon: float) -> None:  # A/A
    """Also where luck would do it: by the lower bound alone, however few decisions told the two apart."""
    seems = 0
    for seed in range(100):
        records = logged(1000, seed, equal, epsilon)
        seems += advantage(records, on_trial, in_force, exchange_rate(records)).lower > 0
    assert seems <= 5
    assert promoted(equal, rounds=20, count=1500, epsilon=epsilon) <= 0.05


def test_the_same_policy_again_has_no_advantage() -> None:
    records = logged(1500, 0, lambda kind, rng: in_force_choice(kind))
    found = advantage(records, on_trial, in_force, exchange_rate(records))
    assert (found.mean, found.support) == (0.0, 0) and found.lower <= 0
    assert judge(records) is None  # nothing tells them apart: it waits


def test_a_policy_that_only_equals_one_pool_is_not_promoted() -> None:
    """A bandit that has learned to go always to the same place has learned nothing a setting would not say."""
    verdict = judge(logged(4000, 0, lambda kind, rng: "strong"))
    assert verdict is not None and not verdict.promote


def test_estimates_are_right_however_wrong_the_expectations_were() -> None:
    records = logged(20_000, 0, better, epsilon=0.3)
    rate = exchange_rate(records)
    assert rate == pytest.approx(0.2 / (0.9 * CENT))
    truth = 0.5 * TRUE["easy"]["compact"] + 0.3 * TRUE["tricky"]["strong"] + 0.2 * TRUE["hard"]["strong"]
    cost = 0.5 * COST["compact"] + 0.5 * COST["strong"]
    found = estimate(records, on_trial, rate)
    assert found.success == pytest.approx(truth, abs=0.02)
    assert found.cost == pytest.approx(cost, rel=0.05)
    assert found.utility == pytest.approx(truth - rate * cost, abs=4 * found.error)
    assert found.snips == pytest.approx(found.utility, abs=0.03)
    assert found.ips == pytest.approx(found.utility, abs=0.05)


def test_a_pool_that_could_not_take_a_request_is_replaced_in_a_single_pool_policy() -> None:
    record = logged(1, 0, better)[0]
    narrow = replace(record, scores={name: score for name, score in record.scores.items() if name != "other"})
    assert single("other")(narrow) == narrow.greedy
    assert single("other")(record) == "other"


def test_a_trial_that_nothing_can_be_learned_from_ends() -> None:
    records = logged(1000, 0, better, epsilon=0.0)
    assert judge(records) is None
    verdict = judge(records * (shadow.PATIENCE // len(records)))
    assert verdict is not None and not verdict.promote and "told the two policies apart" in verdict.reason


def test_nonsense_in_the_log_promotes_nothing() -> None:
    records = [replace(record, propensity=1e-320) for record in logged(1500, 0, better, epsilon=0.3)]
    with np.errstate(all="ignore"):
        verdict = judge(records)
    assert verdict is not None and not verdict.promote


def test_a_checked_answer_is_valued_by_what_becomes_of_it_in_the_end() -> None:
    record = replace(logged(1, 0, better, checked=True)[0], scores={"a": PoolScore(0.5, 1), "b": PoolScore(0.8, 9)})
    assert record.expected("a") == (pytest.approx(0.9), 1.0)
    assert record.expected("b") == (0.8, 9.0)
    assert replace(record, checked=False).expected("a") == (0.5, 1.0)
