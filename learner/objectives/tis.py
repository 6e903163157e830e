"""Truncated importance sampling: PPO, times the truncated weight of the proximal policy over the behaviour policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from learner.objectives.base import Inputs, clipped_surrogate, ratio


@dataclass(frozen=True)
class TIS:
    """L = -min(w, C) min(r A, clip(r, 1 - ε_low, 1 + ε_high) A), with r = π/π_prox, w = π_prox/μ, C = `weight_clip`.

    The truncation is IMPALA's (arXiv 1802.01561, section 4.1): a bias towards μ buys bounded variance, and no token is
    lost.
    """

    low: float
    high: float
    weight_clip: float
    needs_proximal: ClassVar[bool] = True

    def token_loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        weight_BT = ratio(inputs.proximal_BT, inputs.behaviour_BT)
        surrogate_BT, clipped = clipped_surrogate(
            ratio(inputs.logprobs_BT, inputs.proximal_BT),
            inputs.advantages_B.unsqueeze(-1),
            inputs.mask_BT,
            self.low,
            self.high,
        )
        truncated = ((weight_BT > self.weight_clip) * inputs.mask_BT).sum()
        loss_BT = -weight_BT.clamp(max=self.weight_clip) * surrogate_BT * inputs.mask_BT
        return loss_BT, {"clip_fraction": clipped, "truncated_fraction": truncated}
