"""What a step's tokens say about how far the policies have drifted apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from learner.objectives import Inputs
from learner.objectives.base import LOG_RATIO_BOUND, ratio


class Tally:
    """Sums over the scored tokens of a step, kept as tensors: nothing waits for the device until `result`.

    `result` gives means over tokens: `mismatch_kl`, the estimate mean(ρ - 1 - log ρ) of KL(μ‖π) (Schulman's k3) and
    `effective_sample_size`, (Σρ)²/(n Σρ²), both of the policy at the step's start; `ratio_mean` and `ratio_max` of the
    current policy over μ; `entropy`, minus the mean log-prob of the sampled tokens; `non_finite_tokens`, a count; and
    the objective's own.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = defaultdict(float)
        self._start: dict[str, Tensor | float] = defaultdict(float)
        self._largest = torch.tensor(0.0)

    def start(self, start_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor) -> None:
        """Add tokens scored by the policy of the step's start."""
        inputs = Inputs.of(start_BT, start_BT, behaviour_BT, start_BT[:, 0], mask_BT)
        log_BT = (inputs.proximal_BT - inputs.behaviour_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio_BT = ratio(inputs.proximal_BT, inputs.behaviour_BT) * inputs.mask_BT
        self._start["tokens"] += inputs.mask_BT.sum()
        self._start["ratio"] += ratio_BT.sum()
        self._start["square"] += ratio_BT.square().sum()
        self._start["kl"] += (ratio_BT - (1.0 + log_BT) * inputs.mask_BT).sum()

    def current(self, inputs: Inputs, sampled: Tensor, objective_sums: dict[str, Tensor]) -> None:
        """Add tokens scored by the current policy, `sampled` of them before the unusable ones left the mask."""
        current_BT = inputs.logprobs_BT.detach()
        ratio_BT = ratio(current_BT, inputs.behaviour_BT) * inputs.mask_BT
        tokens = inputs.mask_BT.sum()
        self._sums["tokens"] += tokens
        self._sums["non_finite_tokens"] += sampled - tokens
        self._sums["ratio_mean"] += ratio_BT.sum()
        self._sums["entropy"] += -current_BT.sum()
        self._largest = torch.maximum(self._largest.to(ratio_BT.device), ratio_BT.max())
        for name, value in objective_sums.items():
            self._sums[name] += value

    @classmethod
    def sum(cls, tallies: Iterable[Tally]) -> Tally:
        """The tally of all the tokens that were added to any of them."""
        total = cls()
        for tally in tallies:
            for name, value in tally._sums.items():
                total._sums[name] += float(value)
            for name, value in tally._start.items():
                total._start[name] += float(value)
            total._largest = torch.maximum(total._largest, tally._largest.cpu())
        return total

    def result(self) -> dict[str, float]:
        """All metrics; empty when nothing was scored."""
        sums = {name: float(value) for name, value in self._sums.items()}
        start = {name: float(value) for name, value in self._start.items()}
        tokens = sums.pop("tokens", 0.0)
        if not tokens:
            return {}
        non_finite = sums.pop("non_finite_tokens")
        metrics = {name: value / tokens for name, value in sums.items()}
        metrics |= {"ratio_max": float(self._largest), "non_finite_tokens": non_finite}
        if start.get("tokens"):
            metrics["mismatch_kl"] = start["kl"] / start["tokens"]
            metrics["effective_sample_size"] = start["ratio"] ** 2 / (start["tokens"] * start["square"])
        return metrics
