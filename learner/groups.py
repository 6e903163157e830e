"""The rollouts of one prompt on their way to a batch, or out of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.messages import Reason, Rollout


@dataclass(frozen=True)
class Drop:
    """Rollouts that will not be trained on; published as `Discard`."""

    task_id: str
    rollout_ids: tuple[str, ...]
    reason: Reason
    detail: str


@dataclass(frozen=True)
class Arrival:
    """A rollout with its sequence in the stream."""

    rollout: Rollout
    sequence: int


@dataclass
class Group:
    """The rollouts of one task so far."""

    task_id: str
    size: int  # rollouts that can still be expected in all
    first_at: float  # when the first rollout arrived, seconds of the caller's clock
    arrivals: dict[int, Arrival] = field(default_factory=dict)  # by index in the group

    @property
    def oldest(self) -> int:
        """The version of the oldest token that has arrived. Raises `ValueError` before the first one."""
        return min(arrival.rollout.oldest.version for arrival in self.arrivals.values())


@dataclass(frozen=True)
class TrainingGroup:
    """Rollouts of one prompt that enter a batch together: at least two, all scored, none too stale."""

    task_id: str
    rollouts: tuple[Rollout, ...]
    staleness: tuple[int, ...]  # per rollout, versions

    @property
    def rewards(self) -> tuple[float, ...]:
        """Per rollout."""
        return tuple(rollout.reward for rollout in self.rollouts if rollout.reward is not None)

    @property
    def zero_advantage(self) -> bool:
        """All rewards are equal: the group counts towards the batch and gives no gradient."""
        return len(set(self.rewards)) == 1
