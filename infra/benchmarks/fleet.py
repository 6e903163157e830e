"""Simulated generators: everything of a generator but the model. They pull real tasks, follow the run's policies, and
publish real rollouts and reports; instead of sampling they wait.

    python -m infra.benchmarks.fleet GENERATORS SLOTS MEDIAN SIGMA TOKENS

One process holds all of them, each with a connection of its own. Settings come from the environment, as for a service.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import aclosing
from random import Random

import msgspec
import numpy as np

from contracts import subjects
from contracts.messages import (
    Finish,
    GeneratorReport,
    Outcome,
    PolicyRef,
    PolicySegment,
    PolicyVersion,
    Purpose,
    Rollout,
    Task,
)
from contracts.tensors import Tensor
from infra import telemetry
from infra.bus import Bus, Received
from infra.policies import PolicyStore
from infra.settings import Settings, load
from infra.work import work

PROMPT = 8  # tokens
VOCABULARY = 40  # token ids below it are known to the tiny model
POOL = "default"


class Shape(msgspec.Struct, frozen=True):
    """What the generators are like."""

    generators: int
    slots: int  # groups that one generator works on at once
    median: float  # seconds for a group, lognormal
    sigma: float
    tokens: int  # sampled per completion


class Occupancy:
    """How much of its slots a generator uses. The clock is passed in; what is not in use is idle."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.started: float | None = None
        self.used = 0  # slots
        self._busy = 0.0  # slot seconds until `_since`
        self._since = 0.0

    def change(self, by: int, now: float) -> None:
        """Slots were taken, or given back."""
        if self.started is None:
            self.started = self._since = now
        self._busy += self.used * (now - self._since)
        self.used, self._since = self.used + by, now

    def seconds(self, now: float) -> tuple[float, float]:
        """Wall seconds since the first task, and how much of them the average slot was in use."""
        if self.started is None:
            return 0.0, 0.0
        return now - self.started, (self._busy + self.used * (now - self._since)) / self.slots


class Simulated:
    """One generator without a model."""

    def __init__(self, name: str, bus: Bus, settings: Settings, shape: Shape) -> None:
        self.name = name
        self.bus = bus
        self.run = settings.run.name
        self.interval = settings.service.heartbeat_seconds
        self.shape = shape
        self.policy: PolicyRef | None = None
        self.moved = asyncio.Condition()  # notified when the policy has changed
        self.occupancy = Occupancy(shape.slots)
        self.rollouts = 0
        self.tasks: dict[str, int] = {}

    async def live(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._report())
            group.create_task(
                work(
                    self.bus,
                    subjects.TASK_WORKERS,
                    self._handle,
                    slots=self.shape.slots,
                    stopping=asyncio.Event(),
                    drain=0.0,
                    run=self.run,
                    purpose=Purpose.TRAIN.value,
                    pool=POOL,
                )
            )

    async def _follow(self) -> None:
        """A generator would fetch the weights here; the announcement alone says which version it would have."""
        versions = PolicyStore(self.bus, self.run).follow(self.name)
        async with aclosing(versions):
            async for version in versions:
                await self._load(version)

    async def _load(self, version: PolicyVersion) -> None:
        async with self.moved:
            self.policy = version.policy
            self.moved.notify_all()

    async def _handle(self, received: Received[Task]) -> None:
        task = received.message
        self.occupancy.change(1, time.monotonic())
        try:
            first = await self._policy_for(task)
            self.tasks[task.id] = first.version
            started_ns = time.time_ns()
            random = Random(f"fleet {task.seed}")
            await asyncio.sleep(random.lognormvariate(0.0, self.shape.sigma) * self.shape.median)
            assert self.policy is not None
            rollouts = {
                f"{task.run}.{task.id}.{index}": self._rollout(task, index, first, self.policy, started_ns, random)
                for index in range(task.group_size)
            }
        finally:
            self.tasks.pop(task.id, None)
            self.occupancy.change(-1, time.monotonic())
        await self.bus.publish_all(subjects.ROLLOUT, rollouts, run=task.run, purpose=task.purpose)
        self.rollouts += len(rollouts)

    async def _policy_for(self, task: Task) -> PolicyRef:
        """The policy at hand, once it is one that the task allows."""
        async with self.moved:
            await self.moved.wait_for(
                lambda: (
                    self.policy is not None
                    and (self.policy.generation, self.policy.version) >= (task.generation, task.min_version)
                )
            )
        assert self.policy is not None
        return self.policy

    def _rollout(
        self, task: Task, index: int, first: PolicyRef, last: PolicyRef, started_ns: int, random: Random
    ) -> Rollout:
        """Random tokens with a random reward. A policy that came in between sampled the second half."""
        count = self.shape.tokens
        numbers = np.random.default_rng(random.getrandbits(32))
        segments = [PolicySegment(PROMPT, first)]
        if last != first:
            segments.append(PolicySegment(PROMPT + count // 2, last))
        sampled = (np.arange(PROMPT + count) >= PROMPT).astype(np.float32)
        return Rollout(
            id=f"{task.id}.{index}",
            task_id=task.id,
            index=index,
            group_size=task.group_size,
            run=task.run,
            purpose=task.purpose,
            environment=task.environment,
            split=task.split,
            item=f"{task.seed % 2**64:016x}",
            tokens=Tensor.of(numbers.integers(0, VOCABULARY, PROMPT + count, dtype=np.int32)),
            loss_mask=Tensor.of(sampled.astype(np.uint8)),
            logprobs=Tensor.of((-np.log(VOCABULARY) * sampled).astype(np.float32)),
            temperatures=Tensor.of(task.sampling.temperature * sampled),
            prompt_length=PROMPT,
            segments=segments,
            sampling=task.sampling,
            finish=Finish.LENGTH,
            outcome=Outcome.OK,
            reward=(reward := random.random()),
            reward_parts={"simulated": reward},
            completion="",
            generator=self.name,
            issued_ns=task.issued_ns,
            started_ns=started_ns,
            finished_ns=time.time_ns(),
        )

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            if self.policy is None:
                continue
            wall, busy = self.occupancy.seconds(time.monotonic())
            report = GeneratorReport(
                run=self.run,
                generator=self.name,
                generation=self.policy.generation,
                version=self.policy.version,
                seconds={"busy": busy, "load": 0.0, "idle": wall - busy},
                wall_seconds=wall,
                idle_seconds=wall - busy,
                tokens=self.rollouts * self.shape.tokens,
                rollouts=self.rollouts,
                outcomes={Outcome.OK.value: self.rollouts},
                inflight=self.occupancy.used,
                at_ns=time.time_ns(),
                tasks=dict(self.tasks),
            )
            await self.bus.publish(subjects.GENERATOR, report, id=f"{self.name}.{report.at_ns}", run=self.run)


async def main(settings: Settings, shape: Shape) -> None:
    """Connect all of them and let them work until the process is stopped."""
    names = [f"simulated-{number}" for number in range(1, shape.generators + 1)]
    buses = [await Bus.connect(settings.nats, name) for name in names]
    async with asyncio.TaskGroup() as group:
        for name, bus in zip(names, buses, strict=True):
            group.create_task(Simulated(name, bus, settings, shape).live())


if __name__ == "__main__":
    run_file = load()
    telemetry.setup_logging(run_file.telemetry.log_level, {"service": "fleet"})
    fields = [field.type(value) for field, value in zip(msgspec.structs.fields(Shape), sys.argv[1:], strict=True)]
    asyncio.run(main(run_file, Shape(*fields)))
