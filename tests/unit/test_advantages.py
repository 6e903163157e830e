"""Advantages are relative to the group."""

from __future__ import annotations

import numpy as np
import pytest

from learner.advantages import group_advantages


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.2, 0.9, -3.0, 7.5, 0.2]])
def test_the_formulas(rewards: list[float]) -> None:
    centred = np.array(rewards) - np.mean(rewards)
    assert group_advantages(rewards, "dr_grpo") == pytest.approx(centred)
    assert group_advantages(rewards, "grpo") == pytest.approx(centred / (np.std(rewards, ddof=1) + 1e-6))


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("rewards", [[], [0.3], [0.1] * 7, [1.0] * 8])
def test_equal_rewards_teach_exactly_nothing(kind: str, rewards: list[float]) -> None:
    assert group_advantages(rewards, kind) == [0.0] * len(rewards)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_its_rewards(kind: str) -> None:
    rewards = [0.5, 0.1, 0.9, 0.3]
    advantages = group_advantages(rewards, kind)  # type: ignore[arg-type]
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    assert np.argsort(advantages).tolist() == np.argsort(rewards).tolist()
