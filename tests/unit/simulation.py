"""A run as a discrete-event simulation: the real gate, intake and load controller between simulated clocks."""

from __future__ import annotations

import heapq
import itertools
import math
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

Service = Callable[[int, Random], float]


def lognormal(mean: float, sigma: float) -> Service:
    """Service times in seconds; `sigma` is the deviation of their logarithms."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda _, random: random.lognormvariate(mu, sigma)


@dataclass
class Result:
    """What a run came to. Idle is counted from the first batch on."""

    learner_idle: float = 0.0  # share of the time in which the learner did not train
    generator_idle: float = 0.0  # share of the slots' time in which they had no group
    staleness: list[int] = field(default_factory=list)  # of every trained group, versions, in order
    trained: list[int] = field(default_factory=list)  # task indices, in order
    stale: list[int] = field(default_factory=list)  # task indices of groups dropped because of their age
    targets: list[int] = field(default_factory=list)  # groups the gate allowed after each step
    straggling: float = 0.0  # share of the time in which a batch waited for stragglers

    @property
    def mean(self) -> float:
        """Mean staleness of the second half of the groups."""
        return fmean(self.staleness[len(self.staleness) // 2 :])


def simulate(
    service: Service,
    slots: Callable[[float], int],
    *,
    steps: int = 200,
    bound: int = 4,
    groups: int = 8,
    adaptive: bool = True,
    patience: float = 0.0,
    seed: int = 0,
) -> Result:
    """Train `steps` batches of `groups`, about one second each, with `slots(now)` generators that do a group at a time.

    `service(index, random)` is how long they need for a group. A generator that leaves finishes its group. Versions
    reach the generators 0.05 s late, and a group waits for the version it asks for.
    """
    random, result = Random(seed), Result()
    gate = AdmissionGate(bound, groups, steps)
    load = Load(groups, gate.limit)
    lineage = Lineage([(1, 0)])
    intake = Intake(gate, lineage, max_staleness=bound, token_budget=9, vocabulary=99, straggler_seconds=patience)
    events: list[tuple[float, int, str, int, int]] = []
    order, sequences = itertools.count(), itertools.count(1)
    queue: deque[tuple[int, int]] = deque()  # index, version asked for
    unready: list[tuple[int, int]] = []  # taken from the queue, their version has not come
    in_hand: dict[str, int] = {}
    now = began = trained_for = sampled_for = present = waited = 0.0
    version = loaded = spare = 0
    idle_since: float | None = 0.0  # None while training
    held_since: float | None = None

    def at(when: float, what: str, first: int = 0, second: int = 0) -> None:
        heapq.heappush(events, (when, next(order), what, first, second))

    def sample(index: int, when: float) -> None:
        nonlocal sampled_for
        in_hand[training_id(index)] = loaded
        seconds = service(index, random)
        sampled_for += seconds if result.trained else 0.0
        at(when + seconds, "sampled", index, loaded)

    def step(when: float) -> bool:
        nonlocal idle_since, held_since, spare, waited, began, trained_for
        batch, drops = intake.take(version, when, in_hand)
        result.stale += [training_index(drop.task_id) or 0 for drop in drops if drop.reason is Reason.STALE]
        if batch is None:
            if intake.stragglers and held_since is None:
                held_since = when
            intake.hold(when)
            return bool(drops)
        if not result.trained:
            began = when
        straggled = 0.0 if held_since is None else when - held_since
        waited = when - (idle_since or 0.0) - straggled
        result.straggling += straggled
        idle_since = held_since = None
        result.staleness += [max(group.staleness) for group in batch]
        result.trained += [training_index(group.task_id) or 0 for group in batch]
        spare, seconds = len(intake.ready), random.lognormvariate(0.0, 0.02)
        trained_for += seconds
        at(when + seconds, "trained")
        return True

    at(0.25, "tick")
    while version < steps:
        gate.target = load.target if adaptive else gate.limit
        queue += [(index, version) for index in gate.admit(version)]
        while queue and len(in_hand) < slots(now):
            unready.append(queue.popleft())
            in_hand[training_id(unready[-1][0])] = unready[-1][1]
        for index, _ in [task for task in unready if task[1] <= loaded]:
            sample(index, now)
        unready = [task for task in unready if task[1] > loaded]
        if idle_since is not None and step(now):
            continue
        before = now
        now, _, what, first, second = heapq.heappop(events)
        if result.trained:
            present += (now - before) * max(slots(now), len(in_hand))
        if what == "sampled":
            del in_hand[training_id(first)]
            for member in (0, 1):
                intake.offer(rollout(training_id(first), member, version=second), next(sequences), version, now)
        elif what == "trained":
            version, idle_since = version + 1, now
            intake.trained()
            result.targets.append(load.stepped(waited=waited, computed=1.0, spare=spare))
            at(now + 0.05, "loaded", version)
        elif what == "loaded":
            loaded = first
        else:
            at(now + 0.25, "tick")  # slots may have come
    result.straggling /= now - began
    result.learner_idle = 1 - trained_for / (now - began)
    result.generator_idle = 1 - sampled_for / max(present, 1e-9)
    return result
