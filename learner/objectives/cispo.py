"""CISPO: REINFORCE with clipped importance weights, so that no token loses its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from learner.objectives.base import Inputs, ratio


@dataclass(frozen=True)
class CISPO:
    """L = -sg(clip(ρ, 1 - ε_low, 1 + ε_high)) A log π, with ρ = π/μ.

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5. With ε_low = 1 small weights stay as they are."""

    low: float
    high: float
    needs_proximal: ClassVar[bool] = False

    def token_loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_BT = ratio(inputs.logprobs_BT.detach(), inputs.behaviour_BT)
        weight_BT = ratio_BT.clamp(1.0 - self.low, 1.0 + self.high)
        clipped = ((weight_BT != ratio_BT) * inputs.mask_BT).sum()
        loss_BT = -weight_BT * inputs.advantages_B.unsqueeze(-1) * inputs.logprobs_BT * inputs.mask_BT
        return loss_BT, {"clip_fraction": clipped}
