"""The admission gate: which prompts are under way, how far they are, and which are lost. Pure; time is passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Outstanding:
    """A task that is published and neither trained nor given up."""

    index: int  # position in the run's sequence of prompts; the task's seed follows from it
    floor: int = 0  # no token of its rollouts is older than this version
    sequence: int | None = None  # in the task stream; None until it is published
    taken_at: float | None = None  # when a generator was first seen to have taken it from the queue
    held_since: float | None = None  # when a step first waited for it
    suspect_since: float | None = None  # when there was first a reason to think that nobody works on it
    arrived: bool = False  # at least one rollout of it has come


class AdmissionGate:
    """Bounds mean staleness by bounding the groups under way: never more than `limit`, and no more than `target`.

    A group admitted while version v is the newest is trained at the latest as part of batch v + bound, if groups are
    trained in order, so at most (bound + 1) batches may be outstanding, the one being trained included. With bound 0
    nothing is admitted while a batch is trained: the synchronous barrier. (AReaL, arXiv 2505.24298, section 4.1, with
    the groups consumed so far cancelled on both sides, so that there is no counter a restart could get wrong.)
    """

    def __init__(self, bound: int, groups_per_step: int, steps: int) -> None:
        self.limit = (bound + 1) * groups_per_step
        self.target = self.limit  # groups; whoever watches the load may lower it
        self.groups_per_step = groups_per_step
        self.steps = steps
        self.next_index = 0
        self.outstanding: dict[str, Outstanding] = {}
        self.in_training = 0  # groups of the batch being trained: under way until the version they make exists

    def admit(self, version: int) -> list[int]:
        """Indices of prompts to publish now, in order; each is outstanding from here on."""
        needed = (self.steps - version) * self.groups_per_step
        capacity = min(self.target, self.limit, needed) - len(self.outstanding) - self.in_training
        return [self._issue(version) for _ in range(capacity)]

    def adopt(self, task: str, version: int) -> list[int]:
        """Indices to publish because a rollout shows that an earlier learner had published as far as `task`.

        Publishing them again is harmless, since task ids are the same, and skips no prompt. Empty for tasks already
        issued, and for ids too far ahead to have been issued by anyone.
        """
        index = training_index(task)
        if index is None or index >= self.next_index + self.limit:
            return []
        return [self._issue(version) for _ in range(index + 1 - self.next_index)]

    def _issue(self, version: int) -> int:
        index = self.next_index
        self.outstanding[training_id(index)] = Outstanding(index, version)
        self.next_index += 1
        return index

    def arrived(self, task: str) -> None:
        """A rollout of an outstanding task has come."""
        self.outstanding[task].arrived = True

    def published(self, task: str, sequence: int) -> None:
        """The task lies in the task stream at `sequence`."""
        if task in self.outstanding:
            self.outstanding[task].sequence = sequence

    def observe_taken(self, sequence: int, floor: int, now: float) -> None:
        """Tasks up to `sequence` have been taken from the queue; who takes one later samples with `floor` or newer."""
        for entry in self.outstanding.values():
            if entry.sequence is None or entry.sequence > sequence:
                entry.floor = max(entry.floor, floor)
            elif entry.taken_at is None:
                entry.taken_at = now

    def observe_queue(self, empty: bool, now: float) -> None:
        """`empty`: no task waits and no generator holds one, so what has not arrived is suspect; else nothing is.

        A task that still waits to be published, as while the queue is full, is not: nobody could have worked on it.
        """
        for entry in self.outstanding.values():
            if entry.arrived or entry.sequence is None or not empty:
                entry.suspect_since = None
            elif entry.suspect_since is None:
                entry.suspect_since = now

    def expired(self, now: float, deadline: float) -> list[str]:
        """Tasks that have been suspect for longer than `deadline` seconds; the caller closes them.

        However long a task waits or a generator works on it, it is not suspect: slow prompts are not dropped.
        """
        return [
            task
            for task, entry in self.outstanding.items()
            if entry.suspect_since is not None and now - entry.suspect_since > deadline
        ]

    def close(self, task: str) -> None:
        """The task was trained or given up: it makes room for another."""
        del self.outstanding[task]


def training_id(index: int) -> str:
    """The id of the training task at `index`: the same for every learner of the run."""
    return f"train-{index}"


def training_index(task: str) -> int | None:
    """The inverse of `training_id`; None for any other id."""
    prefix, _, number = task.partition("-")
    return int(number) if prefix == "train" and number.isascii() and number.isdecimal() and len(number) < 12 else None
