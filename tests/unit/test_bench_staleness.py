"""The staleness table: data really are as old as they should be, and what is made of the curves."""

from __future__ import annotations

import pytest

from infra.errors import UserError
from learner.benchmarks import lagged
from learner.benchmarks.staleness import OBJECTIVES, report_of, staleness_benchmark, summarise


def test_rollouts_are_exactly_as_old_as_the_lag_says() -> None:
    def rewards(lag: int, learning_rate: float) -> list[float]:
        return lagged.run(OBJECTIVES["decoupled_ppo"], lag, seed=1, steps=4, learning_rate=learning_rate)[0]

    unmoved = rewards(0, 1e-12)  # every rollout is version 0's
    assert rewards(3, 2e-3) == unmoved
    assert rewards(2, 2e-3)[:3] == unmoved[:3]
    assert rewards(0, 2e-3)[0] == unmoved[0] and rewards(0, 2e-3) != unmoved


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        ([([0.1, 0.9], 1.0), ([0.3, 0.9], 0.5)], {"exact_match": 0.75, "reward": 0.55, "steps_to_goal": 2}),
        ([([0.0] * 10 + [0.7] * 5, 0.0)], {"exact_match": 0.0, "reward": 0.7, "steps_to_goal": None}),
    ],
)
def test_a_cell_is_the_mean_of_its_runs(curves: list[tuple[list[float], float]], expected: dict[str, float]) -> None:
    assert summarise(curves) == pytest.approx(expected)


def test_figures_are_named_by_objective_and_lag() -> None:
    cell = summarise([([0.5, 0.9], 1.0)])
    report = report_of({("ppo", 0): cell, ("ppo", 4): cell}, ["ppo"], [0, 4], 2)
    assert report.figures == {"ppo": {"0": cell, "4": cell}}
    assert report.rows == [["ppo", "1.00 / 0.70 / 2", "1.00 / 0.70 / 2"]]
    assert report.chart.series == {"ppo": [cell["reward"]] * 2}


def test_an_unknown_objective_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"'dpo'.*decoupled_ppo"):
        staleness_benchmark(objectives=["dpo"])
