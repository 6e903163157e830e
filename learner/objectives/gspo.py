"""GSPO: PPO on the ratio of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from learner.objectives.base import LOG_RATIO_BOUND, Inputs, clipped_surrogate


@dataclass(frozen=True)
class GSPO:
    """L = -min(s A, clip(s, 1 - ε_low, 1 + ε_high) A), with s = exp(mean over the sequence's tokens of log π/μ).

    arXiv 2507.18071, equations 5 and 7. Every token of a sequence carries the sequence's loss, so that the mean over
    its tokens gives it back; use `sequence_mean`, and clip ranges of about 4e-4, for the paper's setting.
    """

    low: float
    high: float
    needs_proximal: ClassVar[bool] = False

    def token_loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio_BT = (inputs.logprobs_BT - inputs.behaviour_BT) * inputs.mask_BT
        lengths_B1 = inputs.mask_BT.sum(-1, keepdim=True).clamp(min=1.0)
        mean_B1 = log_ratio_BT.sum(-1, keepdim=True) / lengths_B1
        ratio_BT = mean_B1.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().expand_as(inputs.mask_BT)
        surrogate_BT, clipped = clipped_surrogate(
            ratio_BT, inputs.advantages_B.unsqueeze(-1), inputs.mask_BT, self.low, self.high
        )
        return -surrogate_BT * inputs.mask_BT, {"clip_fraction": clipped}
