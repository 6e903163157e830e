"""REINFORCE: the vanilla policy gradient, without any correction for who sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from learner.objectives.base import Inputs


@dataclass(frozen=True)
class Reinforce:
    """L = -A log π (Williams, 1992): right for on-policy data only."""

    needs_proximal: ClassVar[bool] = False

    def token_loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -inputs.advantages_B.unsqueeze(-1) * inputs.logprobs_BT * inputs.mask_BT, {}
