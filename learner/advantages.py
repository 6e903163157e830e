"""Group-relative advantages: how much better a completion did than its peers on the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

EPSILON = 1e-6  # keeps 1/std bounded where all rewards of a group are almost the same


def group_advantages(rewards: Sequence[float], kind: Literal["grpo", "dr_grpo"]) -> list[float]:
    """One advantage per reward of a group.

    `grpo`: (R - mean) / (std + 1e-6) with the unbiased standard deviation (DeepSeekMath, arXiv 2402.03300, section
    4.1.2). `dr_grpo`: R - mean, without the division, which favours prompts that are almost always or almost never
    solved (arXiv 2503.20783, section 3.2). Equal rewards, or a single one, give exact zeros.
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    scale = stdev(rewards) + EPSILON if kind == "grpo" else 1.0
    return [(reward - mean) / scale for reward in rewards]
