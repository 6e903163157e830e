"""A run as a discrete-event simulation: the real gate, intake and load controller between simulated clocks."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

from contracts.messages import Reason
from learner.gate import AdmissionGate, training_id, training_index
from learner.intake import Intake
from learner.lineage import Lineage
from learner.load import Load
from tests.unit.builders import rollout


@dataclass
class Result:
    """What a run of `simulate` came to. Idle counts from the first batch on."""

    learner_idle: float  # share of its time in which the learner did not train
    generator_idle: float  # share of their time in which generators had no group
    staleness: list[int]  # of every trained group, versions
    trained: list[int]  # task indices
    stale: list[int]  # task indices of groups dropped because of their age
    targets: list[int] = field(default_factory=list)  # groups the gate allowed, by step
    straggling: float = 0.0  # seconds in which a batch waited for stragglers

    @property
    def mean(self) -> float:
        """Staleness of a trained group in the second half of the run."""
        return fmean(self.staleness[len(self.staleness) // 2 :])


def simulate(
    service: Callable[[int, Random], float],
    *,
    generators: int,
    step_seconds: float = 1.0,
    steps: int = 300,
    bound: int = 4,
    groups: int = 8,
    adaptive: bool = True,
    patience: float = 0.0,
    presence: Callable[[float], int] | None = None,
    publish_seconds: float = 0.05,
    seed: int = 0,
) -> Result:
    """Train `steps` batches; `service(index, random)` are the seconds that one of `generators` slots needs for a group.

    `presence(now)` says how many of the slots are there at a time; a group that has begun is finished.
    """
    random = Random(seed)
    gate = AdmissionGate(bound, groups, steps)
    load = Load(groups, gate.limit)
    intake = Intake(
        gate, Lineage([(1, 0)]), max_staleness=bound, token_budget=100, vocabulary=1000, straggler_seconds=patience
    )
    events: list[tuple[float, int, str, tuple[int, ...]]] = []
    order, sequences = itertools.count(), itertools.count(1)
    queue: deque[tuple[int, int]] = deque()  # index and the version that it asks for
    held: list[tuple[int, int]] = []  # taken, and waiting for that version
    in_hand: dict[str, int] = {}
    available = presence or (lambda _: generators)
    now, version, loaded, training, taken = 0.0, 0, 0, False, 0
    waiting_since, straggling_since, waited, began = 0.0, None, 0.0, None
    busy_generators, busy_learner, present, spare = 0.0, 0.0, 0.0, 0
    result = Result(0, 0, [], [], [])

    def at(when: float, what: str, *arguments: int) -> None:
        heapq.heappush(events, (when, next(order), what, arguments))

    if presence is not None:
        at(1.0, "tick")
    while version < steps:
        if adaptive:
            gate.target = load.target
        for index in gate.admit(version):
            queue.append((index, version))
            gate.published(training_id(index), index + 1)
        while queue and len(in_hand) < available(now):
            index, needed = queue.popleft()
            held.append((index, needed))
            in_hand[training_id(index)], taken = needed, index
        for index, _ in [task for task in held if task[1] <= loaded]:
            in_hand[training_id(index)] = loaded
            seconds = service(index, random)
            if began is not None:
                busy_generators += seconds
            at(now + seconds, "done", index, loaded)
        held = [task for task in held if task[1] > loaded]
        gate.observe_taken(taken + 1, loaded, now)
        if not training:
            batch, drops = intake.take(version, now, in_hand)
            result.stale += [
                training_index(d.task_id) for d in drops if d.reason == Reason.STALE and d.rollout_ids[0].endswith(".0")
            ]
            if drops and batch is None:
                continue
            if batch is not None:
                if straggling_since is not None:
                    result.straggling += now - straggling_since
                    waited -= now - straggling_since
                    straggling_since = None
                waited += now - waiting_since
                began = now if began is None else began
                result.staleness += [max(g.staleness) for g in batch]
                result.trained += [training_index(g.task_id) for g in batch]
                training, spare = True, len(intake.ready)
                seconds = step_seconds * random.lognormvariate(0, 0.02)
                busy_learner += seconds
                at(now + seconds, "stepped")
                continue
            if intake.stragglers and straggling_since is None:
                straggling_since = now
                at(now + patience + 1e-6, "tick")
        before = now
        now, _, what, arguments = heapq.heappop(events)
        if began is not None:
            present += (now - before) * max(available(now), len(in_hand))
        if what == "done":
            index, sampled_by = arguments
            del in_hand[training_id(index)]
            for member in (0, 1):
                sampled = rollout(training_id(index), member, version=sampled_by)
                intake.offer(sampled, next(sequences), version, now)
        elif what == "stepped":
            training, version = False, version + 1
            intake.trained()
            load.stepped(waited=waited, computed=step_seconds, spare=spare)
            result.targets.append(load.target)
            waiting_since, waited = now, 0.0
            at(now + publish_seconds, "loaded", version)
        elif what == "loaded":
            loaded = max(loaded, arguments[0])
        elif presence is not None and not straggling_since:
            at(now + 1.0, "tick")
    result.learner_idle = 1 - busy_learner / (now - began)
    result.generator_idle = 1 - busy_generators / present
    return result
