"""What the learner tells about its work: one report per step, one message per drop."""

from __future__ import annotations

import time

from contracts.messages import Discard, PolicyRef, StepReport
from learner import instruments
from learner.groups import Drop, TrainingGroup
from learner.settings import LearnerSettings
from learner.stopwatch import Stopwatch
from learner.trainer import StepStats


def step_report(
    run: str,
    policy: PolicyRef,
    batch: list[TrainingGroup],
    stats: StepStats,
    stopwatch: Stopwatch,
    settings: LearnerSettings,
    *,
    outstanding: int,
    target: int,
) -> StepReport:
    """The report of the step that made `policy`; ends the stopwatch's lap."""
    return StepReport(
        run=run,
        policy=policy,
        step=policy.version,
        rollout_ids=[rollout.id for group in batch for rollout in group.rollouts],
        staleness=[age for group in batch for age in group.staleness],
        rewards=[reward for group in batch for reward in group.rewards],
        groups=len(batch),
        zero_advantage_groups=sum(group.zero_advantage for group in batch),
        tokens=stats.tokens,
        loss=stats.loss,
        grad_norm=stats.grad_norm,
        learning_rate=stats.learning_rate,
        metrics=stats.metrics,
        seconds=stopwatch.lap(),
        wall_seconds=stopwatch.wall,
        idle_seconds=stopwatch.idle_seconds,
        staleness_bound=settings.max_staleness,
        outstanding=outstanding,
        target=target,
        at_ns=time.time_ns(),
    )


def record_step(report: StepReport) -> None:
    """The step in the process's metrics."""
    for age in report.staleness:
        instruments.staleness(age)
    instruments.target(report.target)
    instruments.idle(report.idle_seconds / max(report.wall_seconds, 1e-9))


def discard(run: str, drop: Drop, *, generation: int, version: int) -> Discard:
    """The message for a drop; counts it in the process's metrics."""
    instruments.discarded(max(len(drop.rollout_ids), 1), drop.reason)
    return Discard(
        run=run,
        task_id=drop.task_id,
        rollout_ids=list(drop.rollout_ids),
        reason=drop.reason,
        detail=drop.detail,
        generation=generation,
        version=version,
        at_ns=time.time_ns(),
    )
