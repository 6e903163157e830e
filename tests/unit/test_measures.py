"""The arithmetic of the summary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.measures import age, covered, paired_interval, survives
from tests.unit.builders import policy


def test_paired_interval_by_hand() -> None:
    before = {"a": 0.0, "b": 0.0, "c": 1.0, "d": 0.0, "only before": 1.0}
    after = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0, "only after": 0.0}
    found = paired_interval(before, after)
    assert found is not None
    items, mean, low, high = found
    # differences 1 1 0 0: mean .5, s = .57735, s/√4 = .288675
    assert (items, mean) == (4, 0.5)
    assert low == pytest.approx(0.5 - 1.959964 * 0.288675, abs=1e-5)
    assert high == 1.0, "no gain is larger"


@pytest.mark.parametrize("items", [{}, {"a": 1.0}])
def test_no_interval_without_two_items(items: dict[str, float]) -> None:
    assert paired_interval(items, items) is None


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1]))))
def test_covered_counts_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    assert covered(intervals) == len({moment for start, end in intervals for moment in range(start, end)})


# Learner 2 took over at version 3, learner 3 at version 3 again, learner 4 at version 2.
STARTS = {1: 0, 2: 3, 3: 3, 4: 2}


@pytest.mark.parametrize(
    ("sampled", "generation", "version", "expected"),
    [
        (policy(2, 1), 1, 4, 2),
        (policy(4, 1), 1, 4, 0),
        (policy(5, 1), 1, 4, None),  # from the future
        (policy(3, 1), 2, 5, 2),
        (policy(4, 1), 2, 5, None),  # learner 2 never had that version of learner 1
        (policy(4, 2), 3, 4, None),
        (policy(3, 2), 3, 4, 1),
        (policy(2, 1), 4, 3, 1),
        (policy(3, 1), 4, 3, None),
        (policy(3, 3), 4, 3, None),
        (policy(1, 7), 4, 3, None),  # a generation nobody knows
    ],
)
def test_age(sampled, generation: int, version: int, expected: int | None) -> None:  # type: ignore[no-untyped-def]
    assert age(sampled, generation, version, STARTS) == expected


@pytest.mark.parametrize(
    ("version", "generation", "expected"),
    [(2, 1, True), (3, 1, False), (3, 2, False), (3, 3, False), (2, 4, True), (9, 4, True)],
)
def test_survives(version: int, generation: int, expected: bool) -> None:
    assert survives(policy(version, generation), STARTS) is expected
