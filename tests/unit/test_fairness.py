"""Which unfinished groups a step waits for: those that it would make too stale."""

import pytest

from learner.fairness import stragglers


@pytest.mark.parametrize(
    ("begun", "newest", "version", "expected"),
    [
        ({}, 4, 4, []),
        ({"a": 3}, 4, 4, []),  # it can still be trained at 5
        ({"a": 2}, 4, 4, ["a"]),  # this is the last step that could
        ({"a": 2}, 2, 4, []),  # the batch is as old: waiting would only exchange one for the other
        ({"a": 1}, 4, 4, []),  # too old already
        ({"a": 3, "b": 3}, 4, 4, []),  # one step is left for two groups
        ({"a": 3, "b": 3, "c": 3}, 4, 4, ["a", "b", "c"]),  # and for three of them it is not enough
        ({"a": 2, "b": 3, "c": 3}, 4, 4, ["a", "b", "c"]),
        ({"a": 2, "b": 3}, 4, 4, ["a"]),
        ({"a": 3, "b": 3, "c": 3}, 3, 4, []),
    ],
)
def test_a_step_waits_where_it_would_leave_more_than_can_be_trained_in_time(begun, newest, version, expected):
    assert stragglers(begun, newest, version, bound=2, per_step=2) == expected


@pytest.mark.parametrize("begun", [{}, {"a": 7}, {"a": 6, "b": 7}])
def test_synchronous_steps_never_wait(begun):
    assert stragglers(begun, 7, 7, bound=0, per_step=1) == []
