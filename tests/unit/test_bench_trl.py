"""The comparison with TRL: what is computed from the curves, and that both sides train the same."""

from __future__ import annotations

import sys

import pytest

from generator.benchmarks import trl
from generator.benchmarks.trl import Job, Step, figures, report_of, seconds_to
from infra.benchmarks.cluster import variables
from infra.errors import UserError
from infra.settings import load


def curve(seconds: float, rewards: list[float]) -> list[Step]:
    return [Step(seconds * number, reward) for number, reward in enumerate(rewards, 1)]


@pytest.mark.parametrize(
    ("rewards", "level", "seconds"),
    [
        ([0, 0, 0, 0, 1, 1, 1], 0.4, 12.0),
        ([1, 1, 1, 1, 1], 1.0, 10.0),
        ([1, 1, 1, 1], 0.5, None),  # too short for a mean
        ([0.1] * 20, 0.4, None),
    ],
)
def test_a_level_counts_as_reached_by_the_mean_of_the_last_steps(
    rewards: list[float], level: float, seconds: float | None
) -> None:
    assert seconds_to(level, curve(2.0, rewards)) == seconds


def test_ratios() -> None:
    rising = [0.0] * 5 + [1.0] * 5
    found = figures(curve(40.0, rising), [curve(5.0, rising), curve(10.0, rising)], batch=64, level=0.4)
    assert found["trl_rollouts_per_second"] == pytest.approx(64 / 40)
    assert found["rollouts_ratio"] == pytest.approx((40 / 5 + 40 / 10) / 2)
    assert found["time_to_accuracy_ratio"] == pytest.approx(7 * 40 / (7 * 7.5))
    assert "5.3 times as long" in report_of(found).notes[1]


def test_a_level_that_one_side_misses_gives_no_ratio() -> None:
    found = figures(curve(40.0, [0.0] * 6), [curve(5.0, [1.0] * 6)], batch=64, level=0.4)
    assert found["time_to_accuracy_ratio"] is None and found["seconds_to_level"] == 25.0
    report = report_of(found)
    assert report.rows[1][-1] == "-" and report.notes[1].startswith("TRL did not")


def test_our_settings_are_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(steps=3, device_batch=8, bf16=True)
    for name, value in variables(job.settings()).items():
        monkeypatch.setenv(name, value)
    learner = load().section("learner")
    assert (learner.steps, learner.groups_per_step * learner.group_size) == (3, job.batch)
    assert learner.sampling.stop == [job.stop] and learner.sampling.max_tokens == job.max_tokens
    assert learner.optimizer.learning_rate == job.learning_rate and learner.precision == "bf16"


def test_without_trl_a_person_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[bench\]'"):
        trl.trl_benchmark()


def test_a_device_batch_that_does_not_divide_the_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "find_spec", lambda _: sys)
    with pytest.raises(UserError, match="24"):
        trl.trl_benchmark(device_batch=24)
