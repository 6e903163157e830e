"""Where a process's wall time goes. The clock is passed in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Wall seconds since `start`, split into named states; what is not marked busy is idle.

    Idle means: of wall time since the first training task, seconds not spent computing.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.started: float | None = None
        self.busy_seconds = 0.0
        self.lap_busy_seconds = 0.0  # since the last lap
        self._lap_start = 0.0
        self._lap: defaultdict[str, float] = defaultdict(float)

    def start(self) -> None:
        """The first training task is out; later calls change nothing."""
        if self.started is None:
            self.started = self._lap_start = self.clock()

    @property
    def wall(self) -> float:
        """Seconds since `start`, 0 before it."""
        return 0.0 if self.started is None else self.clock() - self.started

    @property
    def idle_seconds(self) -> float:
        """Seconds of `wall` not spent computing."""
        return max(self.wall - self.busy_seconds, 0.0)

    @contextmanager
    def busy(self, state: str) -> Iterator[None]:
        """Computing."""
        before = self.clock()
        with self.idle(state):
            yield
        self.busy_seconds += self.clock() - before
        self.lap_busy_seconds += self.clock() - before

    @contextmanager
    def idle(self, state: str) -> Iterator[None]:
        """Waiting for something that has a name."""
        before = self.clock()
        try:
            yield
        finally:
            self._lap[state] += self.clock() - before

    def lap(self) -> dict[str, float]:
        """Seconds by state since the last lap; what no state accounts for is `wait_for_batch`."""
        now = self.clock()
        seconds = dict(self._lap)
        seconds["wait_for_batch"] = max(now - self._lap_start - sum(seconds.values()), 0.0)
        self._lap.clear()
        self._lap_start = now
        self.lap_busy_seconds = 0.0
        return seconds
