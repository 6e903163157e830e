"""A generator's own decisions, with a real engine on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import torch

from contracts.messages import PolicyRef, Purpose, Sampling, Task
from contracts.subjects import KV_LEASES
from generator.engines import EngineError
from generator.engines.torch_engine import TorchEngine
from generator.loading import Loader
from generator.service import Generator
from generator.settings import GeneratorSettings
from infra import models, weights
from infra.bus import Bus
from infra.grading import Grader
from infra.policies import PolicyStore
from infra.sandbox import Limits, Sandbox
from infra.service import Service
from infra.settings import RunSettings, Settings
from infra.work import Retry
from tests.integration.test_publisher import limited


class Failing(TorchEngine):
    """An engine that fails at loads of version 1, as one does that has to be started again."""

    failures = 1  # still to come

    async def load(self, policy: PolicyRef, weights: dict[str, torch.Tensor]) -> float:
        if policy.version == 1 and self.failures:
            self.failures -= 1
            raise EngineError("the engine was stopped")
        return await super().load(policy, weights)


async def publish(store: PolicyStore, folder: Path, version: int) -> None:
    """The model's own weights, under another version each time."""
    model = models.load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    data, tensors = weights.pack(model.state_dict())
    bundle = await store.put_bundle(models.bundle(folder))
    await store.publish(generation=1, version=version, data=data, tensors=tensors, bundle=bundle, parent=None)


@asynccontextmanager
async def following(bus: Bus, run: str, engine_type: type[TorchEngine], folder: Path) -> AsyncIterator[Generator]:
    """A generator that follows policies and takes no tasks."""
    settings, tokenizer = GeneratorSettings(), models.load_tokenizer(folder)
    model = models.load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    engine = engine_type(model, tokenizer, max_requests=settings.max_requests)
    grader = Grader(Sandbox(1, Limits()), 1.0)  # never started: nothing is graded
    service = Service("generator", "generator-1", Settings(run=RunSettings(name=run)), bus, asyncio.Event())
    store = PolicyStore(bus, run)
    generator = Generator(service, settings, Loader(engine, store, models.bundle(folder)), tokenizer, grader, {})
    async with aclosing(store.follow("generator-1")) as versions:
        task = asyncio.create_task(generator.loader.follow(await anext(versions), versions))
        try:
            yield generator
        finally:
            task.cancel()
            await asyncio.wait({task})
            await engine.close()
    assert task.cancelled(), task.exception()


async def until_loaded(generator: Generator, version: int) -> None:
    def has() -> bool:
        return generator.engine.policy is not None and generator.engine.policy.version == version

    async with asyncio.timeout(20), generator.loader.loaded:
        await generator.loader.loaded.wait_for(has)


@pytest.mark.parametrize("case", ["the engine fails", "the bucket for readers is full"])
async def test_a_policy_that_could_not_be_loaded_is_tried_again(
    bus: Bus, run: str, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """No newer one may ever come: the learner may wait for what is to be sampled with this one."""
    monkeypatch.setattr("generator.loading.POLICY_RETRY_SECONDS", 0.05)
    folder, learner = models.resolve("tiny"), PolicyStore(bus, run)
    await publish(learner, folder, 0)
    failing = case == "the engine fails"
    async with following(bus, run, Failing if failing else TorchEngine, folder) as generator:
        await until_loaded(generator, 0)
        if failing:
            await publish(learner, folder, 1)
        else:
            bucket = f"KV_{KV_LEASES}"
            used = (await bus.stream_info(bucket)).state.bytes
            async with limited(bus, bucket, max_bytes=used + 10, discard="new"):
                await publish(learner, folder, 1)
                await asyncio.sleep(0.5)
                assert generator.engine.policy is not None and generator.engine.policy.version == 0
        await until_loaded(generator, 1)


async def test_a_generator_that_can_load_nothing_leaves_its_tasks_to_others(
    bus: Bus, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds may be all that the learner waits for."""
    monkeypatch.setattr("generator.loading.POLICY_RETRY_SECONDS", 0.05)
    monkeypatch.setattr("generator.loading.STUCK_SECONDS", 0.3)
    folder, learner = models.resolve("tiny"), PolicyStore(bus, run)
    await publish(learner, folder, 0)
    task = Task(
        id="train-0", run=run, purpose=Purpose.TRAIN, environment="reverse-text", seed=1, group_size=2,
        sampling=Sampling(max_tokens=2), generation=1, min_version=1,
    )  # fmt: skip
    async with following(bus, run, Failing, folder) as generator:
        assert isinstance(generator.engine, Failing)
        generator.engine.failures = 1 << 30
        await until_loaded(generator, 0)
        assert generator._slots(Purpose.TRAIN) > 0
        waiting = asyncio.create_task(generator._wait_for_policy(task))
        await asyncio.sleep(0.5)
        assert not waiting.done(), "that there is no policy yet is nobody's fault"
        await publish(learner, folder, 1)
        with pytest.raises(Retry):
            await asyncio.wait_for(waiting, 20)
        assert generator._slots(Purpose.TRAIN) == 0
        generator.engine.failures = 0
        await until_loaded(generator, 1)
        assert generator._slots(Purpose.TRAIN) > 0
