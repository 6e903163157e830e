"""Asynchronous and synchronous runs side by side: what is computed from their records. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from contracts.messages import GeneratorReport, StepReport

WARM_UP = 5  # first steps, left out: processes start, caches and the pipeline fill
SMOOTHED = 5  # steps in the mean that counts as a reward that was reached
LAST = 10  # steps at the end whose mean is a run's reward
REACHED = 0.9  # of the reward that both runs of a pair reached
# 97.5 % quantiles of Student's t by degrees of freedom; beyond them the normal distribution's is close
STUDENT_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL_975 = 1.96


@dataclass(frozen=True)
class Measured:
    """One run: times and counts after the warm-up, rewards from the first step on."""

    steps: int
    rollouts: int  # trained
    seconds: float
    learner_idle_ratio: float
    generator_idle_ratio: float
    learner_step_seconds: float  # the learner computed so long for one step
    generator_step_seconds: float  # the generators computed so long for as many rollouts as a step takes
    staleness_mean: float
    staleness_max: int
    discarded: Mapping[str, int]  # rollouts by reason
    rewards: Sequence[float]  # mean of each step's batch
    reached_at: Sequence[float]  # seconds from the first training task at which each step was done
    summary_idle_ratios: Mapping[str, float]  # of learner and generators with the warm-up, as summary.json has them
    mismatches: Sequence[str]  # where the services' word and the records differ

    @property
    def throughput(self) -> float:
        """Trained rollouts per second."""
        return self.rollouts / self.seconds

    @property
    def overlapped_fraction(self) -> float:
        """Of the throughput that the slower side alone would allow: the asynchronous ideal."""
        return max(self.learner_step_seconds, self.generator_step_seconds) * self.steps / self.seconds

    @property
    def alternating_fraction(self) -> float:
        """Of the throughput if the sides took turns and nothing else took time: the synchronous ideal."""
        return (self.learner_step_seconds + self.generator_step_seconds) * self.steps / self.seconds

    @property
    def bottleneck_idle_ratio(self) -> float:
        """Idle share of the side that computes longer for a step."""
        learner = self.learner_step_seconds >= self.generator_step_seconds
        return self.learner_idle_ratio if learner else self.generator_idle_ratio

    @property
    def imbalance(self) -> float:
        """By how much the slower side computes longer for a step than the other, as a share."""
        slower, faster = sorted((self.learner_step_seconds, self.generator_step_seconds), reverse=True)
        return slower / faster - 1.0


def measured(summary: Mapping[str, Any], steps: Sequence[StepReport], reports: Sequence[GeneratorReport]) -> Measured:
    """A run's figures from its summary and all reports of its steps and generators; more than `WARM_UP` steps."""
    begin, end = steps[WARM_UP - 1], steps[-1]
    counted = steps[WARM_UP:]
    seconds = end.wall_seconds - begin.wall_seconds
    idle = end.idle_seconds - begin.idle_seconds
    wall, unused, sampled = (
        after - before for before, after in zip(_until(reports, begin.at_ns), _until(reports, end.at_ns), strict=True)
    )
    trained = sum(len(step.rollout_ids) for step in counted)
    return Measured(
        steps=len(counted),
        rollouts=trained,
        seconds=seconds,
        learner_idle_ratio=idle / seconds,
        generator_idle_ratio=unused / wall,
        learner_step_seconds=(seconds - idle) / len(counted),
        generator_step_seconds=(wall - unused) / sampled * trained / len(counted),
        staleness_mean=summary["staleness_mean"],
        staleness_max=summary["staleness_max"],
        discarded=summary["rollouts_discarded"],
        rewards=summary["reward_per_step"][: len(steps)],
        reached_at=[step.wall_seconds for step in steps],
        summary_idle_ratios={side: summary[f"{side}_idle_ratio"] for side in ("learner", "generator")},
        mismatches=summary["mismatches"],
    )


def _until(reports: Sequence[GeneratorReport], at_ns: int) -> tuple[float, float, int]:
    """Wall and idle seconds and rollouts of all generators, as they last reported them by then."""
    last = {report.generator: report for report in reports if report.at_ns <= at_ns}.values()
    return (
        sum(report.wall_seconds for report in last),
        sum(report.idle_seconds for report in last),
        sum(report.rollouts for report in last),
    )


def smoothed(rewards: Sequence[float], window: int = SMOOTHED) -> list[float]:
    """Mean of each step and those before it, `window` together; the first full window is the first value."""
    return [fmean(rewards[end - window : end]) for end in range(window, len(rewards) + 1)]


def seconds_to(reward: float, run: Measured) -> float | None:
    """Seconds until the smoothed reward was first reached; None where it was not."""
    reached = (step for step, value in enumerate(smoothed(run.rewards), SMOOTHED - 1) if value >= reward)
    step = next(reached, None)
    return None if step is None else run.reached_at[step]


@dataclass(frozen=True)
class Pair:
    """The same settings and seed, asynchronous and synchronous."""

    sigma: float
    seed: int
    asynchronous: Measured
    synchronous: Measured

    @property
    def target_reward(self) -> float | None:
        """The smoothed reward whose time is compared: nine tenths of what both reached."""
        best = [max(smoothed(run.rewards), default=None) for run in (self.asynchronous, self.synchronous)]
        return None if None in best else REACHED * min(value for value in best if value is not None)

    @property
    def time_to_reward_ratio(self) -> float | None:
        """Synchronous / asynchronous seconds to the target reward."""
        if self.target_reward is None:
            return None
        times = [seconds_to(self.target_reward, run) for run in (self.synchronous, self.asynchronous)]
        return times[0] / times[1] if times[0] and times[1] else None

    @property
    def reward_gap(self) -> float:
        """Asynchronous - synchronous mean reward of the last steps."""
        return fmean(self.asynchronous.rewards[-LAST:]) - fmean(self.synchronous.rewards[-LAST:])


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of their mean by Student's t; None with fewer than two."""
    if len(values) < 2:
        return None
    quantile = STUDENT_975[len(values) - 2] if len(values) - 2 < len(STUDENT_975) else NORMAL_975
    half = quantile * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def load_of(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Means over pairs of what the sides did with their time, by name."""
    asynchronous, synchronous = [pair.asynchronous for pair in pairs], [pair.synchronous for pair in pairs]
    return {
        "learner_idle_ratio": fmean(run.learner_idle_ratio for run in asynchronous),
        "generator_idle_ratio": fmean(run.generator_idle_ratio for run in asynchronous),
        "bottleneck_idle_ratio": fmean(run.bottleneck_idle_ratio for run in asynchronous),
        "sync_learner_idle_ratio": fmean(run.learner_idle_ratio for run in synchronous),
        "sync_generator_idle_ratio": fmean(run.generator_idle_ratio for run in synchronous),
        "throughput_ratio": fmean(pair.asynchronous.throughput / pair.synchronous.throughput for pair in pairs),
        "ideal_fraction": fmean(run.overlapped_fraction for run in asynchronous),
        "sync_ideal_fraction": fmean(run.alternating_fraction for run in synchronous),
        "imbalance": fmean(run.imbalance for run in asynchronous),
        "staleness_mean": fmean(run.staleness_mean for run in asynchronous),
        "staleness_max": max(run.staleness_max for run in asynchronous),
    }


def learning_of(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Means over pairs of what was learned and how soon, by name."""
    times = [ratio for pair in pairs if (ratio := pair.time_to_reward_ratio) is not None]
    gaps = [pair.reward_gap for pair in pairs]
    return {
        "time_to_reward_ratio": fmean(times) if times else None,
        "reward": fmean(fmean(pair.asynchronous.rewards[-LAST:]) for pair in pairs),
        "sync_reward": fmean(fmean(pair.synchronous.rewards[-LAST:]) for pair in pairs),
        "reward_gap": fmean(gaps),
        "reward_gap_interval": interval(gaps),
    }
