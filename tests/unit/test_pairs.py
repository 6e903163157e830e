"""What asynchronous and synchronous runs are compared by, on runs made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from infra.benchmarks.async_sync import SIGMAS, Found, figures_of, report_of
from infra.benchmarks.pairs import (
    WARM_UP,
    Measured,
    Pair,
    interval,
    learning_of,
    load_of,
    measured,
    seconds_to,
    smoothed,
)
from infra.benchmarks.report import publish
from infra.summary import summarise
from tests.unit.test_summary import generator, step

RUN = Measured(
    steps=20,
    rollouts=200,
    seconds=20.0,
    learner_idle_ratio=0.1,
    generator_idle_ratio=0.2,
    learner_step_seconds=0.9,
    generator_step_seconds=0.8,
    staleness_mean=1.5,
    staleness_max=3,
    discarded={},
    rewards=[step / 20 for step in range(20)],
    reached_at=[float(step + 1) for step in range(20)],
    summary_idle_ratios={},
    mismatches=[],
)
SLOW = replace(RUN, seconds=40.0, reached_at=[2.0 * at for at in RUN.reached_at], staleness_max=0, staleness_mean=0.0)


@pytest.mark.parametrize(
    ("learner", "sampling", "seconds", "overlapped", "alternating", "imbalance"),
    [
        (0.9, 0.9, 20.0, 0.9, 1.8, 0.0),  # asynchronous, balanced: nearly twice what turns would allow
        (0.5, 0.25, 10.0, 1.0, 1.5, 1.0),  # the learner never waits
        (0.4, 0.6, 24.0, 0.5, 10 / 12, 0.5),  # synchronous: close to the ideal of taking turns
    ],
)
def test_a_run_is_held_against_both_ideals(
    learner: float, sampling: float, seconds: float, overlapped: float, alternating: float, imbalance: float
) -> None:
    run = replace(RUN, learner_step_seconds=learner, generator_step_seconds=sampling, seconds=seconds)
    assert run.overlapped_fraction == pytest.approx(overlapped)
    assert run.alternating_fraction == pytest.approx(alternating)
    assert run.imbalance == pytest.approx(imbalance)


def test_the_bottleneck_is_the_side_that_computes_longer() -> None:
    assert RUN.bottleneck_idle_ratio == 0.1
    assert replace(RUN, generator_step_seconds=1.0).bottleneck_idle_ratio == 0.2


def test_what_counts_is_what_came_after_the_warm_up() -> None:
    steps = [
        step(
            version, [f"train-{version}.{index}" for index in range(2)], wall_seconds=wall, idle_seconds=idle, at_ns=at
        )
        for version, (wall, idle, at) in enumerate(
            [
                *((float(each), 1.0, each) for each in range(1, WARM_UP)),
                (10.0, 4.0, 10),
                (14.0, 5.0, 14),
                (18.0, 5.0, 18),
            ],
            start=1,
        )
    ]
    reports = [
        msgspec.structs.replace(generator("generator-1", wall=wall, idle=idle), rollouts=rollouts, at_ns=at)
        for wall, idle, rollouts, at in [
            (9.0, 3.0, 20, 9),
            (11.0, 3.5, 24, 11),
            (17.0, 5.0, 44, 17),
            (21.0, 9.0, 44, 21),
        ]
    ]
    summary = summarise([*((each, 0) for each in steps), (reports[-1], 0)])
    run = measured(summary, steps, reports)
    assert (run.steps, run.rollouts, run.seconds) == (2, 4, 8.0)
    assert run.learner_idle_ratio == pytest.approx(1.0 / 8.0)
    assert run.learner_step_seconds == pytest.approx(7.0 / 2)
    assert run.generator_idle_ratio == pytest.approx(2.0 / 8.0)  # the reports of 9 and 17 ns
    assert run.generator_step_seconds == pytest.approx(6.0 / 24 * 2)  # surplus rollouts are no cost of a step
    assert run.reached_at[-3:] == [10.0, 14.0, 18.0] and len(run.rewards) == WARM_UP + 2


def test_a_reward_counts_when_its_mean_over_some_steps_does() -> None:
    assert smoothed([0.0, 1.0, 2.0, 3.0], window=2) == [0.5, 1.5, 2.5]
    spike = replace(RUN, rewards=[0.0] * 5 + [1.0] + [0.0] * 14)
    assert seconds_to(1.0, spike) is None
    assert seconds_to(0.2, spike) == 6.0
    assert seconds_to(0.0, spike) == 5.0  # the first full window


def test_a_pair_is_compared_at_a_reward_that_both_reached() -> None:
    pair = Pair(0.5, 1, RUN, SLOW)
    assert pair.target_reward == pytest.approx(0.9 * fmean(RUN.rewards[-5:]))
    assert pair.time_to_reward_ratio == pytest.approx(2.0)
    assert pair.reward_gap == pytest.approx(0.0)
    better = replace(SLOW, rewards=[reward + 0.1 for reward in RUN.rewards])
    assert Pair(0.5, 1, RUN, better).reward_gap == pytest.approx(-0.1)


def test_runs_too_short_to_smooth_have_no_time_to_reward() -> None:
    short = replace(RUN, rewards=[0.5] * 3)
    assert Pair(0.5, 1, short, SLOW).time_to_reward_ratio is None
    assert learning_of([Pair(0.5, 1, short, SLOW)])["time_to_reward_ratio"] is None


def test_the_interval_is_as_wide_as_few_values_make_it() -> None:
    assert interval([0.1]) is None
    low, high = interval([0.0, 0.1, 0.2]) or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(0.1)
    assert (high - low) / 2 == pytest.approx(4.303 * 0.1 / 3**0.5)


def test_means_over_pairs_have_the_names_that_were_promised() -> None:
    pairs = [Pair(0.5, 1, RUN, SLOW), Pair(1.0, 1, replace(RUN, seconds=10.0), SLOW)]
    found = load_of(pairs) | learning_of(pairs)
    assert found["throughput_ratio"] == pytest.approx((2.0 + 4.0) / 2)
    assert found["ideal_fraction"] == pytest.approx((0.9 + 1.8) / 2)
    assert (found["learner_idle_ratio"], found["generator_idle_ratio"]) == pytest.approx((0.1, 0.2))
    assert found["staleness_max"] == 3
    assert {"sync_learner_idle_ratio", "sync_generator_idle_ratio", "time_to_reward_ratio", "reward_gap"} <= set(found)


def test_the_report_can_be_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = [Pair(sigma, seed, RUN, SLOW) for seed in (1, 2) for sigma in SIGMAS]
    learning = [Pair(1.0, seed, RUN, replace(SLOW, rewards=[0.9 * each for each in RUN.rewards])) for seed in (1, 2)]
    found = Found(load, learning, {"slots": 64, "sync_threads": 2})
    publish(report_of(figures_of(found, 0.05)), json_file=tmp_path / "found.json", plot_file=None)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["throughput_ratio"] == found["by_sigma"]["1"]["throughput_ratio"] == 2.0
    assert found["reward_gap"] == pytest.approx(0.1 * fmean(RUN.rewards[-10:]))
    assert [pair["seed"] for pair in found["load_pairs"]] == [1, 1, 2, 2]
    assert found["learning_pairs"][0]["asynchronous"]["rewards"] == list(RUN.rewards)
    header, _, *lines = capsys.readouterr().out.strip().split("\n\n")[0].split("\n")
    assert header.count("|") == 5 and all(line.count("|") == 5 for line in lines)
