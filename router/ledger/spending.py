"""What each key has spent this month, and what is under way. Pure: the clock is passed in."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Self

NS = 1_000_000_000


def month_of(at_ns: int) -> str:
    """The calendar month (UTC) of a unix time in ns, e.g. 2026-11: budgets start anew with it."""
    return day_of(at_ns)[:7]


def day_of(at_ns: int) -> str:
    """The day (UTC) of a unix time in ns, e.g. 2026-11-30."""
    return time.strftime("%Y-%m-%d", time.gmtime(at_ns // NS))


class Reservation:
    """Money set aside for a request under way, until `release` or the end of the `with` block."""

    def __init__(self, spending: Spending, key: str, amount: int) -> None:
        self._spending, self.key, self.amount = spending, key, amount

    def release(self) -> None:
        """Give it back; what the request has cost is spent by then. A second time is harmless."""
        self._spending.reserved[self.key] -= self.amount
        self.amount = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Spending:
    """Picodollars by key. `clock` gives unix ns."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._month = month_of(clock())
        self._spent: defaultdict[str, int] = defaultdict(int)
        self.reserved: defaultdict[str, int] = defaultdict(int)

    def add(self, key: str, amount: int, at_ns: int) -> None:
        """Count what a request that ended at `at_ns` has cost; other months than this one do not matter."""
        self._turn()
        if month_of(at_ns) == self._month:
            self._spent[key] += amount

    def spent(self, key: str) -> int:
        """Spent this month, and set aside for requests under way."""
        self._turn()
        return self._spent[key] + self.reserved[key]

    def reserve(self, key: str, amount: int) -> Reservation:
        """Set aside what a request is expected to cost, so that those beside it see it as spent."""
        self.reserved[key] += amount
        return Reservation(self, key, amount)

    def _turn(self) -> None:
        if (month := month_of(self._clock())) != self._month:
            self._month = month
            self._spent.clear()
