"""From rollouts to training batches: which are kept, which are dropped and why, and where to go on after a restart.

Pure: the service feeds it messages and the clock, publishes what it returns, and stores its `state` in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contracts.messages import PolicyRef, Reason, Rollout
from learner.fairness import stragglers
from learner.gate import AdmissionGate, Outstanding, training_id, training_index
from learner.groups import Arrival, Drop, Group, TrainingGroup
from learner.lineage import Lineage


class Intake:
    """Assembles groups, checks staleness at consumption, keeps the position for the checkpoint.

    `position` is the first stream sequence that a resumed learner must read again; `consumed` holds the ids at or
    after it that are already trained or dropped, so that reading again trains nothing twice.
    """

    def __init__(
        self,
        gate: AdmissionGate,
        lineage: Lineage,
        *,
        max_staleness: int,
        token_budget: int,
        vocabulary: int,
        straggler_seconds: float = 0.0,
    ) -> None:
        self.gate = gate
        self.lineage = lineage
        self.max_staleness = max_staleness
        self.straggler_seconds = straggler_seconds  # how long a step waits for a group that it would make too stale
        self.token_budget = token_budget  # longest rollout that can be trained on
        self.vocabulary = vocabulary  # token ids are below it
        self.groups: dict[str, Group] = {}  # every group that is neither trained nor dropped, by task
        self.ready: list[Group] = []  # those of them that wait for a batch
        self.stragglers: list[str] = []  # what a batch that is there waits for, as of the last `take`
        self.last_sequence = 0
        self.consumed: dict[str, int] = {}  # rollout id -> sequence
        self.replay_until = 0  # sequences up to here may repeat what the checkpoint already covers

    def offer(self, rollout: Rollout, sequence: int, version: int, now: float) -> list[Drop]:
        """Take one rollout from the stream. A group becomes ready with its last rollout."""
        self.last_sequence = sequence
        task = rollout.task_id
        if rollout.id in self.consumed:
            replayed = sequence <= self.replay_until
            return [] if replayed else [Drop(task, (rollout.id,), Reason.DUPLICATE, "this rollout was consumed before")]
        arrival = Arrival(rollout, sequence)
        if task not in self.gate.outstanding:
            issued = (index := training_index(task)) is not None and index < self.gate.next_index
            reason, detail = (
                (Reason.LATE, f"task {task} was closed before")
                if issued
                else (Reason.UNKNOWN_TASK, f"no learner of this run published task {task}")
            )
            return [self._consume(task, [arrival], reason, detail)]
        self.gate.arrived(task)
        group = self.groups.setdefault(task, Group(task, rollout.group_size, now))
        if rollout.index in group.arrivals:
            return [Drop(task, (rollout.id,), Reason.DUPLICATE, "this rollout is already in its group")]
        drops = self._refuse(group, arrival, version)
        if not drops:
            group.arrivals[rollout.index] = arrival
        if len(group.arrivals) >= group.size and group not in self.ready:
            self.ready.append(group)
        return drops

    def _refuse(self, group: Group, arrival: Arrival, version: int) -> list[Drop]:
        """Drop what can never be trained; its group is complete without it."""
        rollout = arrival.rollout
        length = rollout.tokens.shape[0]
        if length > self.token_budget:
            reason, detail = Reason.OVER_BUDGET, f"{length} tokens, a forward pass may have {self.token_budget}"
        elif (largest := int(rollout.tokens.array().max())) >= self.vocabulary:
            reason, detail = Reason.FOREIGN_TOKENS, f"token {largest}, the model has {self.vocabulary}"
        elif rollout.reward is None:
            reason, detail = Reason.UNSCORED, f"the verifier said {rollout.outcome}"
        elif (lost := self._lost(rollout, version)) is not None:
            reason = Reason.LOST_POLICY
            detail = f"version {lost.version} of generation {lost.generation} is not an ancestor of these weights"
        else:
            return []
        group.size -= 1
        return [self._consume(group.task_id, [arrival], reason, detail)]

    def _lost(self, rollout: Rollout, version: int) -> PolicyRef | None:
        """A policy that sampled some of its tokens and that the weights do not descend from."""
        policies = (segment.policy for segment in rollout.segments)
        return next((policy for policy in policies if self.lineage.staleness(policy, version) is None), None)

    def expire(self, now: float, *, group_deadline: float, task_deadline: float) -> list[Drop]:
        """Close groups whose last rollout does not come, and give up tasks that nobody works on."""
        drops = []
        late = [g for g in self.groups.values() if g not in self.ready and now - g.first_at > group_deadline]
        for group in late:
            if len(group.arrivals) >= 2:
                self.ready.append(group)
            else:
                drops += self._close(group, f"{len(group.arrivals)} of {group.size} rollouts in {group_deadline:g} s")
        for task in self.gate.expired(now, task_deadline):
            detail = f"no rollout within {task_deadline:g} s although the queue is empty and no generator holds it"
            drops += self.give_up(task, detail)
        return drops

    def give_up(self, task: str, detail: str) -> list[Drop]:
        """Nobody will do this task. Nothing happens if it is not outstanding, or if a rollout of it has arrived."""
        entry = self.gate.outstanding.get(task)
        if entry is None or entry.arrived:
            return []
        self.gate.close(task)
        return [Drop(task, (), Reason.TASK_EXPIRED, detail)]

    def take(
        self, version: int, now: float = 0.0, in_hand: Mapping[str, int] | None = None
    ) -> tuple[list[TrainingGroup] | None, list[Drop]]:
        """The batch for the step from `version`, or None while there is none; and what was dropped.

        Groups are checked each time: one that has become too stale while it waited is dropped here, one that loses only
        some of its rollouts goes on with the rest. Those that would be too stale soonest come first, of equals the one
        issued first. `in_hand` says which tasks are being worked on, each with a version that none of its tokens is
        older than: the step waits for `stragglers` among them.
        """
        drops: list[Drop] = []
        usable: list[Group] = []
        for group in list(self.ready):
            drops += self._drop_stale(group, version)
            if len(group.arrivals) < 2:
                drops += self._close(group, f"{len(group.arrivals)} usable rollouts")
            else:
                usable.append(group)
        usable.sort(key=lambda group: (group.oldest, self.gate.outstanding[group.task_id].index))
        chosen = usable[: self.gate.groups_per_step]
        self.stragglers = []
        if len(chosen) < self.gate.groups_per_step:
            return None, drops
        self.stragglers = self._await(chosen[-1].oldest, version, now, in_hand or {})
        if self.stragglers:
            return None, drops
        batch = [self._training_group(group, version) for group in chosen]
        for training in batch:
            self._remember(self._remove(self.groups[training.task_id]))
            if training.zero_advantage:
                ids = tuple(rollout.id for rollout in training.rollouts)
                detail = f"all {len(ids)} rewards are {training.rewards[0]:g}"
                drops.append(Drop(training.task_id, ids, Reason.ZERO_ADVANTAGE, detail))
        self.gate.in_training = len(batch)
        self._forget()
        return batch, drops

    def _await(self, newest: int, version: int, now: float, in_hand: Mapping[str, int]) -> list[str]:
        """Tasks that the step from `version` waits for; `newest` is the newest version that its batch begins with."""
        begun = {}
        for task, floor in in_hand.items():
            entry, group = self.gate.outstanding.get(task), self.groups.get(task)
            held = now - entry.held_since if entry is not None and entry.held_since is not None else 0.0
            if entry is None or held >= self.straggler_seconds:
                continue  # it was closed just now, or had its time
            if group is None or not group.arrivals:
                begun[task] = floor
            elif group not in self.ready:
                begun[task] = group.oldest
        return stragglers(begun, newest, version, bound=self.max_staleness, per_step=self.gate.groups_per_step)

    def hold(self, now: float) -> None:
        """The step waits for the stragglers that the last `take` found: their time runs."""
        for task in self.stragglers:
            entry = self.gate.outstanding.get(task)  # it may have been given up since
            if entry is not None and entry.held_since is None:
                entry.held_since = now

    def _age(self, rollout: Rollout, version: int) -> int:
        age = self.lineage.staleness(rollout.oldest, version)
        assert age is not None, "rollouts outside the lineage are refused on arrival"
        return age

    def _drop_stale(self, group: Group, version: int) -> list[Drop]:
        drops = []
        for index, arrival in list(group.arrivals.items()):
            age = self._age(arrival.rollout, version)
            if age > self.max_staleness:
                detail = f"{age} versions old, the bound is {self.max_staleness}"
                drops.append(self._consume(group.task_id, [group.arrivals.pop(index)], Reason.STALE, detail))
        return drops

    def _training_group(self, group: Group, version: int) -> TrainingGroup:
        rollouts = tuple(arrival.rollout for _, arrival in sorted(group.arrivals.items()))
        ages = tuple(self._age(rollout, version) for rollout in rollouts)
        return TrainingGroup(group.task_id, rollouts, ages)

    def _close(self, group: Group, detail: str) -> list[Drop]:
        """Give up a group that cannot be compared with itself; nothing to say if its members were dropped before."""
        arrivals = self._remove(group)
        return [self._consume(group.task_id, arrivals, Reason.GROUP_INCOMPLETE, detail)] if arrivals else []

    def _remove(self, group: Group) -> list[Arrival]:
        del self.groups[group.task_id]
        if group in self.ready:
            self.ready.remove(group)
        self.gate.close(group.task_id)
        return list(group.arrivals.values())

    def _consume(self, task: str, arrivals: list[Arrival], reason: Reason, detail: str) -> Drop:
        self._remember(arrivals)
        return Drop(task, tuple(arrival.rollout.id for arrival in arrivals), reason, detail)

    def _remember(self, arrivals: list[Arrival]) -> None:
        self.consumed.update((arrival.rollout.id, arrival.sequence) for arrival in arrivals)

    def trained(self) -> None:
        """The batch last taken has become a version."""
        self.gate.in_training = 0

    @property
    def position(self) -> int:
        """First stream sequence a resumed learner reads again: that of the oldest rollout not yet consumed."""
        waiting = [arrival.sequence for group in self.groups.values() for arrival in group.arrivals.values()]
        return min(waiting, default=self.last_sequence + 1)

    def _forget(self) -> None:
        """Keep consumed ids that may be seen again: those at or after the position, and the newest few thousand."""
        position = self.position
        excess = len(self.consumed) - 8192
        if excess > 0:
            old = [rollout for rollout, sequence in self.consumed.items() if sequence < position][:excess]
            for rollout in old:
                del self.consumed[rollout]

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the intake, JSON-able: a copy. Rollouts not yet consumed are read again."""
        return {
            "next_index": self.gate.next_index,
            "outstanding": sorted(entry.index for entry in self.gate.outstanding.values()),
            "floors": {task: entry.floor for task, entry in self.gate.outstanding.items()},
            "position": self.position,
            "last_sequence": self.last_sequence,
            "consumed": dict(self.consumed),
            "lineage": self.lineage.starts,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's `state` (the lineage is the caller's: it has a new generation to add)."""
        self.gate.next_index = state["next_index"]
        floors = state.get("floors", {})  # a checkpoint without them is of an earlier release
        tasks = {training_id(index): index for index in state["outstanding"]}
        self.gate.outstanding = {task: Outstanding(index, floors.get(task, 0)) for task, index in tasks.items()}
        self.consumed = dict(state["consumed"])
        self.replay_until = state["last_sequence"]
        self.last_sequence = state["position"] - 1
