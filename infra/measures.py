"""The arithmetic behind a run's summary. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, stdev

from contracts.messages import PolicyRef

NORMAL_975 = 1.959964  # 97.5 % quantile of the standard normal distribution


def paired_interval(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[int, float, float, float] | None:
    """Items on both sides, mean gain, and the ends of its 95 % interval; None with fewer than two such items.

    The interval is that of the mean of the items' differences under the normal approximation, mean ± 1.96·s/√n, within
    [-1, 1].
    """
    gains = [after[item] - before[item] for item in sorted(before.keys() & after.keys())]
    if len(gains) < 2:
        return None
    mean = fmean(gains)
    half = NORMAL_975 * stdev(gains) / math.sqrt(len(gains))
    return len(gains), mean, max(mean - half, -1.0), min(mean + half, 1.0)


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of (start, end) intervals."""
    total, reached = 0, -1
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def age(policy: PolicyRef, generation: int, version: int, starts: Mapping[int, int]) -> int | None:
    """Versions from `policy` to `version` of learner `generation`; None if those weights do not descend from it.

    `starts` maps each learner generation to the version at which it took over.
    """
    limit = version
    for each in sorted((g for g in starts if g <= generation), reverse=True):
        if policy.generation == each:
            return version - policy.version if starts[each] <= policy.version <= limit else None
        limit = min(limit, starts[each])
    return None


def survives(policy: PolicyRef, starts: Mapping[int, int]) -> bool:
    """Whether the newest weights descend from `policy`: no later learner took over at an older version."""
    return all(policy.version <= start for generation, start in starts.items() if generation > policy.generation)
