"""The arithmetic of sizing a fleet, and what a simulated generator says of its time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from infra.benchmarks.fleet import Occupancy
from infra.benchmarks.scale import (
    Measured,
    figures_of,
    generators_needed,
    measured,
    median_of,
    predicted_idle,
    quantile,
    report_of,
)
from infra.summary import summarise
from tests.unit.builders import rollout
from tests.unit.test_summary import generator, step


def test_a_median_gives_the_mean_that_was_wanted() -> None:
    random, median = Random(1), median_of(2.0, 0.5)
    assert fmean(median * random.lognormvariate(0.0, 0.5) for _ in range(20_000)) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(
    ("rate", "seconds", "slots", "needed"),
    [(20.0, 0.8, 2, 8.0), (20.0, 0.8, 1, 16.0), (5.0, 0.4, 4, 0.5)],
)
def test_generators_needed_by_littles_law(rate: float, seconds: float, slots: int, needed: float) -> None:
    assert generators_needed(rate, seconds, slots) == pytest.approx(needed)


@pytest.mark.parametrize(("generators", "idle"), [(1, 7 / 8), (4, 0.5), (8, 0.0), (32, 0.0)])
def test_a_learner_waits_for_what_is_missing(generators: int, idle: float) -> None:
    assert predicted_idle(generators, 8.0) == pytest.approx(idle)


def test_a_quantile_is_one_of_the_values() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.01, 0.5, 0.95, 1.0)] == [1.0, 2.0, 3.0, 3.0]


def test_the_age_of_a_task_counts_once_for_its_group() -> None:
    second = 10**9
    rollouts = [
        rollout(f"train-{task}", index, issued_ns=second, started_ns=(2 + 2 * task) * second)
        for task in range(2)
        for index in range(2)
    ]
    steps = [step(1, [each.id for each in rollouts], seconds={"wait_for_stragglers": 2.5})]
    records = [*((each, 0) for each in rollouts), (steps[0], 0)]
    summary = summarise([*records, (generator("simulated-1", wall=10.0, idle=5.0), 0)])
    found = measured(4, summary, rollouts, steps)
    assert (found.queue_age_mean, found.queue_age_p95) == (2.0, 3.0)
    assert found.generator_idle_ratio == 0.5 and found.straggler_ratio == 0.25
    assert found.steps_per_second == pytest.approx(1 / summary["training_seconds"])


def test_a_slot_that_is_not_in_use_is_idle() -> None:
    occupancy = Occupancy(slots=2)
    assert occupancy.seconds(5.0) == (0.0, 0.0)  # before the first task nothing is counted
    occupancy.change(1, 10.0)
    assert occupancy.seconds(14.0) == (4.0, 2.0)
    occupancy.change(1, 14.0)
    occupancy.change(-1, 16.0)
    occupancy.change(-1, 18.0)
    wall, busy = occupancy.seconds(20.0)
    assert wall == 10.0 and math.isclose(busy, (4 * 1 + 2 * 2 + 2 * 1) / 2)


def test_the_rule_and_the_fleets_are_in_the_figures() -> None:
    fleet = Measured(
        generators=4,
        learner_idle_ratio=0.5,
        straggler_ratio=0.0,
        generator_idle_ratio=0.0,
        staleness_mean=1.0,
        staleness_max=2,
        queue_age_mean=1.0,
        queue_age_p95=2.0,
        steps_per_second=1.25,
        learner_step_seconds=0.4,
        discarded={},
    )
    figures = figures_of([fleet, replace(fleet, generators=16, learner_idle_ratio=0.0)], 0.8)
    assert figures["generators_needed"] == pytest.approx(8 / 0.4 * 0.8 / 2)
    assert [each["predicted_learner_idle_ratio"] for each in figures["fleets"]] == pytest.approx([0.5, 0.0])
    report = report_of(figures)
    assert {len(row) for row in report.rows} == {len(report.columns)} and json.dumps(report.figures)
