"""A generator's own decisions, with a real engine on a real server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
import torch

from contracts.messages import PolicyRef
from generator.engines import EngineError
from generator.engines.torch_engine import TorchEngine
from generator.service import Generator
from generator.settings import GeneratorSettings
from infra import models, weights
from infra.bus import Bus
from infra.grading import Grader
from infra.policies import PolicyStore
from infra.sandbox import Limits, Sandbox
from infra.service import Service
from infra.settings import RunSettings, Settings


class Failing(TorchEngine):
    """An engine that fails at the first load of version 1, as one does that has to be started again."""

    failed = False

    async def load(self, policy: PolicyRef, weights: dict[str, torch.Tensor]) -> float:
        if policy.version == 1 and not self.failed:
            self.failed = True
            raise EngineError("the engine was stopped")
        return await super().load(policy, weights)


async def test_a_policy_that_an_engine_failed_to_load_is_tried_again(
    bus: Bus, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No newer one may ever come: the learner may wait for what is to be sampled with this one."""
    monkeypatch.setattr("generator.service.POLICY_RETRY_SECONDS", 0.05)
    folder = models.resolve("tiny")
    model = models.load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    data, tensors = weights.pack(model.state_dict())
    learner, store = PolicyStore(bus, run), PolicyStore(bus, run)

    async def publish(version: int) -> None:
        bundle = await learner.put_bundle(models.bundle(folder))
        await learner.publish(
            generation=1, version=version, data=data, tensors=tensors, bundle=bundle, parent=None
        )  # fmt: skip

    settings = GeneratorSettings()
    tokenizer = models.load_tokenizer(folder)
    engine = Failing(model, tokenizer, max_requests=settings.max_requests)
    grader = Grader(Sandbox(1, Limits()), 1.0)  # never started: nothing is graded
    service = Service("generator", "generator-1", Settings(run=RunSettings(name=run)), bus, asyncio.Event())
    generator = Generator(service, settings, store, engine, tokenizer, grader, {})
    await publish(0)
    async with aclosing(store.follow("generator-1")) as versions:
        following = asyncio.create_task(generator.follow(await anext(versions), versions))
        try:
            async with asyncio.timeout(20), generator.loaded:
                await generator.loaded.wait_for(lambda: engine.policy is not None)
                await publish(1)
                await generator.loaded.wait_for(lambda: engine.policy is not None and engine.policy.version == 1)
            assert engine.failed
        finally:
            following.cancel()
            await asyncio.wait({following})
            await engine.close()
