"""What a step reports stays a number, whatever a rollout claims."""

import math

import torch

from learner.metrics import Tally
from learner.objectives import Inputs


def test_metrics_are_finite_for_any_finite_logprob():
    """A report that is not finite could not be published, and the step would be repeated after every restart."""
    current, mask = torch.full((2, 3), -1.0), torch.ones(2, 3)
    claimed = torch.tensor([[-3e38, -1.0, 0.0], [-3e38, -3e38, -1.0]])
    tally = Tally()
    tally.start(current, claimed, mask)
    tally.current(Inputs.of(current, current, claimed, torch.ones(2), mask), mask.sum(), {})
    assert all(math.isfinite(value) for value in tally.result().values())
