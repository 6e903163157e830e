"""What a key has spent: by calendar month (UTC), with what is under way."""

from __future__ import annotations

import pytest

from router.ledger.spending import Spending, day_of, month_of

DAY = 86_400_000_000_000
START = 1_796_000_000_000_000_000  # 2026-11-30 00:53 UTC


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_days_and_months_are_those_of_utc() -> None:
    midnight = 1_796_083_200_000_000_000
    assert (day_of(midnight - 1), day_of(midnight)) == ("2026-11-30", "2026-12-01")
    assert (month_of(midnight - 1), month_of(midnight)) == ("2026-11", "2026-12")


def test_a_key_has_spent_what_ended_in_this_month(clock: Clock) -> None:
    spending = Spending(clock)
    spending.add("a", 5, START)
    spending.add("a", 7, START - 29 * DAY)
    spending.add("a", 11, START - 30 * DAY)  # October
    spending.add("b", 13, START)
    assert [spending.spent(key) for key in "abc"] == [12, 13, 0]


def test_budgets_start_anew_with_the_month_and_what_is_under_way_stays(clock: Clock) -> None:
    spending = Spending(clock)
    spending.add("a", 5, START)
    held = spending.reserve("a", 3)
    clock.now += DAY
    assert spending.spent("a") == 3
    spending.add("a", 4, clock.now)
    spending.add("a", 100, START)  # heard of late
    held.release()
    assert spending.spent("a") == 4


def test_parallel_requests_see_each_other(clock: Clock) -> None:
    spending, budget, price = Spending(clock), 100, 30
    admitted = []
    while spending.spent("a") + price <= budget:
        admitted.append(spending.reserve("a", price))
    assert len(admitted) == 3
    for each in admitted:
        spending.add("a", 10, START)
        each.release()
        each.release()  # harmless
    assert spending.spent("a") == 30


def test_what_is_set_aside_is_given_back_whatever_happens(clock: Clock) -> None:
    spending = Spending(clock)
    with pytest.raises(RuntimeError), spending.reserve("a", 3):
        raise RuntimeError
    assert spending.spent("a") == 0
