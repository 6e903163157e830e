"""Wall time spent in a state that begins and ends."""

from __future__ import annotations

from collections.abc import Callable


class Intervals:
    """The sum of intervals, the one that is open included. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._closed = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        """From now on; no change where one is open."""
        if self._since is None:
            self._since = self._clock()

    def end(self) -> None:
        """Until now; no change where none is open."""
        if self._since is not None:
            self._closed += self._clock() - self._since
            self._since = None

    @property
    def seconds(self) -> float:
        return self._closed + (self._clock() - self._since if self._since is not None else 0.0)
