"""The losses, one per file behind one interface, and how token losses become one number.

Throughout: π is the current policy, π_prox the one at the start of the step, μ the behaviour policy that sampled;
r = π/π_prox, w = π_prox/μ, ρ = π/μ; A is the advantage; sg stops the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from learner.objectives.base import Inputs, Objective
from learner.objectives.cispo import CISPO
from learner.objectives.decoupled_ppo import DecoupledPPO
from learner.objectives.gspo import GSPO
from learner.objectives.ppo import PPO
from learner.objectives.reinforce import Reinforce
from learner.objectives.tis import TIS
from learner.settings import ObjectiveSettings

__all__ = ["Inputs", "Objective", "objective", "sequence_weights"]

OBJECTIVES: dict[str, Callable[[ObjectiveSettings], Objective]] = {
    "decoupled_ppo": lambda s: DecoupledPPO(s.eps_clip, s.eps_clip_high, s.weight_clip),
    "ppo": lambda s: PPO(s.eps_clip, s.eps_clip_high),
    "tis": lambda s: TIS(s.eps_clip, s.eps_clip_high, s.weight_clip),
    "cispo": lambda s: CISPO(s.eps_clip, s.eps_clip_high),
    "gspo": lambda s: GSPO(s.eps_clip, s.eps_clip_high),
    "reinforce": lambda s: Reinforce(),
}


def objective(settings: ObjectiveSettings) -> Objective:
    """The objective that the settings name."""
    return OBJECTIVES[settings.name](settings)


def sequence_weights(lengths: Sequence[int], aggregation: str, max_tokens: int) -> list[float]:
    """What each sequence's token losses are multiplied by before they are summed; one weight per sequence.

    `lengths` are the sampled tokens of *every* sequence of the minibatch, so that micro-batches of any shape add up to
    the same loss and gradient. `token_mean`: 1/Σ lengths. `sequence_mean`: 1/(N length), GRPO's mean of token means.
    `constant`: 1/(N max_tokens), Dr. GRPO's sum over a constant.
    """
    count = len(lengths)
    if aggregation == "sequence_mean":
        return [1.0 / (count * max(length, 1)) for length in lengths]
    total = sum(lengths) if aggregation == "token_mean" else count * max_tokens
    return [1.0 / max(total, 1)] * count
