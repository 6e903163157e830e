"""Which policies are ancestors of the current weights."""

import pytest

from learner.lineage import Lineage
from tests.unit.builders import policy

# generation 1 reached some version beyond 5, then generation 2 took over from checkpoint 5, then 3 from 8
RESTARTED = Lineage([(1, 0)]).extended(2, 5).extended(3, 8)


@pytest.mark.parametrize(
    ("generation", "version", "expected"),
    [
        (3, 10, 0),
        (3, 8, 2),
        (3, 7, None),  # generation 3 never had it
        (3, 11, None),  # not there yet
        (2, 8, 2),  # what generation 3 continued from
        (2, 9, None),  # trained by generation 2 after the checkpoint: lost
        (2, 5, 5),
        (1, 5, 5),
        (1, 6, None),
        (1, 0, 10),
        (4, 10, None),  # from a newer learner: this one is about to be fenced off
    ],
)
def test_staleness_counts_versions_along_the_surviving_line(generation, version, expected):
    assert RESTARTED.staleness(policy(version, generation), version=10) == expected


def test_version_zero_of_any_generation_is_the_same_start():
    fresh = Lineage([(1, 0), (2, 0)])
    assert fresh.staleness(policy(0, 1), 3) == 3
    assert fresh.staleness(policy(1, 1), 3) is None


@pytest.mark.parametrize(("version", "expected"), [(9, None), (10, 2), (11, None)])
def test_a_learner_that_left_no_checkpoint_started_where_the_next_one_does(version, expected):
    resumed = Lineage([(1, 0)]).extended(4, 10)
    for generation in (2, 3):
        assert resumed.staleness(policy(version, generation), 12) == expected
