"""PPO with the behaviour policy as its old policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from learner.objectives.base import Inputs, clipped_surrogate, ratio


@dataclass(frozen=True)
class PPO:
    """L = -min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A), with ρ = π/μ (arXiv 1707.06347, equation 7).

    The trust region lies around the policy that sampled: with old data most tokens leave it before they teach anything.
    """

    low: float
    high: float
    needs_proximal: ClassVar[bool] = False

    def token_loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        surrogate_BT, clipped = clipped_surrogate(
            ratio(inputs.logprobs_BT, inputs.behaviour_BT),
            inputs.advantages_B.unsqueeze(-1),
            inputs.mask_BT,
            self.low,
            self.high,
        )
        return -surrogate_BT * inputs.mask_BT, {"clip_fraction": clipped}
