"""What a step reports stays a number, whatever a rollout claims."""

import math

import pytest
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


def test_tallies_of_parts_add_up_to_that_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    behaviour, current = -torch.rand(6, 4, generator=generator), -torch.rand(6, 4, generator=generator)
    mask = torch.rand(6, 4, generator=generator) < 0.7

    def tally_of(*parts: slice) -> Tally:
        tally = Tally()
        for part in parts:
            inputs = Inputs.of(current[part], current[part], behaviour[part], torch.ones(6)[part], mask[part])
            tally.start(current[part], behaviour[part], mask[part])
            tally.current(inputs, mask[part].sum(), {"clip_fraction": mask[part].sum() / 3})
        return tally

    whole = tally_of(slice(0, 6)).result()
    split = Tally.sum([tally_of(slice(0, 1), slice(1, 4)), tally_of(slice(4, 6)), Tally()]).result()
    assert split == pytest.approx(whole, rel=1e-5)
    assert split.keys() == whole.keys()
