"""What the generators say of themselves: who is there, and which tasks are in whose hands. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Mapping

from contracts.messages import GeneratorReport
from learner.gate import Outstanding


class Fleet:
    """The generators whose last report is not older than `silence` seconds; they may come and go."""

    def __init__(self, silence: float) -> None:
        self.silence = silence
        self._reports: dict[str, tuple[GeneratorReport, float]] = {}

    def report(self, report: GeneratorReport, now: float) -> None:
        """A generator has reported; those that are gone are forgotten. Who serves users does no task of ours."""
        if report.role != "train":
            return
        self._reports = {name: last for name, last in self._reports.items() if now - last[1] <= self.silence}
        self._reports[report.generator] = report, now

    def present(self, now: float) -> list[GeneratorReport]:
        """The last report of every generator that is there."""
        return [report for report, at in self._reports.values() if now - at <= self.silence]

    def floor(self, now: float) -> int:
        """No generator that is there samples with an older version; 0 while none is."""
        return min((report.version for report in self.present(now)), default=0)

    def in_hand(self, outstanding: Mapping[str, Outstanding], now: float) -> dict[str, int]:
        """Tasks that somebody works on, each with a version that none of its tokens is older than.

        Those that a generator names, and those that were taken from the queue too recently to be named. One that was
        taken and is named by nobody was in the hands of a generator that is gone, and will be sampled afresh.
        """
        named = {task: version for report in self.present(now) for task, version in report.tasks.items()}
        return {
            task: max(named.get(task, 0), entry.floor)
            for task, entry in outstanding.items()
            if task in named or (entry.taken_at is not None and now - entry.taken_at <= self.silence)
        }
