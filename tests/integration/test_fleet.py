"""A simulated generator on a real server: what it publishes is what a learner gets from a real one."""

from __future__ import annotations

import asyncio

from contracts import subjects
from contracts.messages import GeneratorReport, PolicySegment, Purpose, Rollout, Sampling, Split, Task
from contracts.policies import TensorSpec
from infra.benchmarks.fleet import Shape, Simulated
from infra.bus import Bus
from infra.policies import PolicyStore
from infra.settings import RunSettings, ServiceSettings, Settings
from tests.integration.helpers import first


async def test_a_simulated_generator_follows_the_policy_and_answers_tasks(bus: Bus, run: str) -> None:
    settings = Settings(run=RunSettings(name=run), service=ServiceSettings(heartbeat_seconds=0.1))
    store = PolicyStore(bus, run)

    async def publish(version: int) -> None:
        data = memoryview(bytes([version]) * 100)
        tensors = [TensorSpec("weight", "uint8", [100], 0)]
        bundle = await store.put_bundle({"config.json": b"{}"})
        await store.publish(generation=1, version=version, data=data, tensors=tensors, bundle=bundle, parent=None)

    async def ask(index: int, version: int) -> None:
        task = Task(
            id=f"train-{index}", run=run, purpose=Purpose.TRAIN, environment="reverse-text", seed=index, group_size=3,
            sampling=Sampling(max_tokens=5), generation=1, min_version=version, issued_ns=1, split=Split.TRAIN,
        )  # fmt: skip
        await bus.publish(subjects.TASK, task, id=f"{run}.{task.id}", run=run, purpose=Purpose.TRAIN, pool="default")

    living = asyncio.create_task(Simulated("simulated-1", bus, settings, Shape(1, 2, 0.02, 0.5, 5)).live())
    try:
        await publish(0)
        await ask(0, 0)
        rollouts = await first(bus.read(subjects.ROLLOUT, kind=Rollout, consumer="test", run=run), 3)
        await ask(1, 1)  # has to wait for a version that is yet to come
        await publish(1)
        rollouts = await first(bus.read(subjects.ROLLOUT, kind=Rollout, consumer="test", run=run), 6)
        reports = bus.read(subjects.GENERATOR, kind=GeneratorReport, consumer="test", run=run)
        busy = [report.message for report in await first(reports, 3)][-1]
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
    found = [received.message for received in rollouts]
    assert sorted(rollout.id for rollout in found) == [f"train-{task}.{index}" for task in (0, 1) for index in range(3)]
    for rollout in found:
        assert [segment.policy.version for segment in rollout.segments] == [int(rollout.task_id[-1])]
        assert rollout.segments[0] == PolicySegment(8, rollout.oldest) and len(rollout.tokens.array()) == 13
    assert len({rollout.reward for rollout in found}) == 6
    assert busy.generator == "simulated-1" and 0.0 <= busy.idle_seconds <= busy.wall_seconds
