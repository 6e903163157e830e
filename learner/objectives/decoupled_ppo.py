"""Decoupled PPO: clip around the proximal policy, correct for the behaviour policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from learner.objectives.base import Inputs, clipped_surrogate, ratio


@dataclass(frozen=True)
class DecoupledPPO:
    """L = -w min(r A, clip(r, 1 - ε_low, 1 + ε_high) A), with r = π/π_prox and w = π_prox/μ.

    arXiv 2110.00641, equation 5, and AReaL, arXiv 2505.24298, equation 5: the trust region lies around the policy of
    the step's start, however old the data are. A token with w above `weight_clip` is rejected.
    """

    low: float
    high: float
    weight_clip: float
    needs_proximal: ClassVar[bool] = True

    def token_loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        weight_BT = ratio(inputs.proximal_BT, inputs.behaviour_BT)
        kept_BT = weight_BT <= self.weight_clip
        surrogate_BT, clipped = clipped_surrogate(
            ratio(inputs.logprobs_BT, inputs.proximal_BT),
            inputs.advantages_B.unsqueeze(-1),
            inputs.mask_BT,
            self.low,
            self.high,
        )
        rejected = (~kept_BT * inputs.mask_BT).sum()
        loss_BT = -(weight_BT * kept_BT) * surrogate_BT * inputs.mask_BT
        return loss_BT, {"clip_fraction": clipped, "rejected_fraction": rejected}
