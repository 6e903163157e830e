"""Whether a compact model is worth asking first. Pure."""

from __future__ import annotations


def pass_rate(p_pass: float, precision: float, recall: float) -> float:
    """P(verifier accepts) for answers that are right with probability `p_pass`.

    precision = P(right | accepted), recall = P(accepted | right), so P(accepted) = recall · p_pass / precision.
    """
    return min(1.0, recall * p_pass / precision) if precision > 0 else 1.0


def worth_trying(
    p_pass: float, cost_compact: int, cost_strong: int, precision: float = 1.0, recall: float = 1.0
) -> bool:
    """Whether compact, then strong where the verifier refuses, is expected to cost less than strong at once.

    `p_pass`: P(the compact answer is right); costs in picodollars of one call each. An answer that is wrongly refused
    (recall below 1) pays for both calls; one wrongly accepted (precision below 1) saves a call and loses an answer,
    which is for the policy's tolerance to judge, not for this.
    """
    return cost_compact + (1.0 - pass_rate(p_pass, precision, recall)) * cost_strong < cost_strong
