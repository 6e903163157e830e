"""What every objective is computed from, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # e^20 is far outside every clip range, and its products stay finite in fp32


@dataclass(frozen=True)
class Inputs:
    """A micro-batch of B sequences of T completion tokens, all fp32 and finite where the mask is 1.

    Natural log-probs of the sampled tokens under three policies: `logprobs_BT` the current one (with gradient),
    `proximal_BT` the one at the start of the step, `behaviour_BT` the one that sampled. `mask_BT` is 1 where a token
    counts in the loss, 0 elsewhere; log-probs are 0 where it is 0.
    """

    logprobs_BT: Tensor
    proximal_BT: Tensor
    behaviour_BT: Tensor
    advantages_B: Tensor
    mask_BT: Tensor

    @classmethod
    def of(
        cls, logprobs_BT: Tensor, proximal_BT: Tensor, behaviour_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor
    ) -> Inputs:
        """Take tokens out of the mask for which one of the policies has no finite log-prob.

        Such a token lies outside the support of a policy that truncates (top-p, top-k): it has no importance ratio and
        contributes neither loss nor gradient. What a mean divides by is counted before, from the samples.
        """
        policies = (logprobs_BT, proximal_BT, behaviour_BT)
        usable_BT = mask_BT.bool()
        for policy_BT in policies:
            usable_BT = usable_BT & policy_BT.isfinite()
        current, proximal, behaviour = (torch.where(usable_BT, policy_BT.float(), 0.0) for policy_BT in policies)
        return cls(current, proximal.detach(), behaviour.detach(), advantages_B.float(), usable_BT.float())


class Objective(Protocol):
    """A policy-gradient loss, token by token."""

    needs_proximal: ClassVar[bool]  # whether `proximal_BT` is read: with several updates a step it costs a forward pass

    def token_loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss per token [B, T] before aggregation, and metrics as sums over the masked tokens."""
        ...


def ratio(numerator_BT: Tensor, denominator_BT: Tensor) -> Tensor:
    """exp(log numerator - log denominator), kept within e^±20."""
    return (numerator_BT - denominator_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clipped_surrogate(
    ratio_BT: Tensor, advantages_B1: Tensor, mask_BT: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """PPO's min(r A, clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347, equation 7).

    Returns it per token, and how many masked tokens it took the gradient from because the bound was the smaller.
    """
    free_BT = ratio_BT * advantages_B1
    bounded_BT = ratio_BT.clamp(1.0 - low, 1.0 + high) * advantages_B1
    clipped = ((bounded_BT < free_BT) * mask_BT).sum()
    return torch.minimum(free_BT, bounded_BT), clipped.detach()
