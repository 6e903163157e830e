"""A serving generator in this process, and the pool that asks it, for tests of both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from contracts.messages import PolicyVersion
from generator.engines.torch_engine import TorchEngine
from generator.loading import Loader, sample
from generator.serving import Server
from generator.settings import GeneratorSettings
from infra import models, weights
from infra.bus import Bus
from infra.policies import PolicyStore
from infra.service import Service
from infra.settings import RunSettings, ServiceSettings, load
from router.pools.bus import BusPool
from router.settings import PoolSettings


async def publish(bus: Bus, run: str, version: int, *, seed: int = 0, folder: Path | None = None) -> PolicyVersion:
    """A tiny model with weights of its own for each seed, or the one in `folder`, as that version."""
    folder = folder or models.resolve("tiny", seed=seed)
    store = PolicyStore(bus, run)
    model = models.load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    data, tensors = weights.pack(model.state_dict())
    bundle = await store.put_bundle(models.bundle(folder))
    return await store.publish(generation=1, version=version, data=data, tensors=tensors, bundle=bundle, parent=None)


class Slow(TorchEngine):
    """Samples a token in 12 ms, so that something can happen meanwhile."""

    def _step(self) -> None:
        time.sleep(0.012)
        super()._step()


def slow_engine(settings: GeneratorSettings, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Slow:
    """In place of `make_engine`."""
    model = models.load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"), weights=False)
    return Slow(model, tokenizer, max_requests=settings.max_requests)


async def promote(bus: Bus, run: str, version: PolicyVersion, *, override: bool = False) -> None:
    """Let it serve."""
    await PolicyStore(bus, run).production.promote(version, decided_by="test", reason="", override=override)


@asynccontextmanager
async def serving_generator(
    bus: Bus, run: str, name: str = "generator-serve-1", **settings: Any
) -> AsyncIterator[Server]:
    """One that is ready, until the end of the block."""
    loaded = load().model_copy(
        update={
            "run": RunSettings(name=run),
            "service": ServiceSettings(heartbeat_seconds=0.5, drain_seconds=1.0),
        }
    )
    section = loaded.section("generator").model_copy(update={"role": "serve", "max_requests": 8, **settings})
    service = Service("generator", name, loaded.model_copy(update={"generator": section}), bus, asyncio.Event())
    made: list[Server] = []
    policies = PolicyStore(bus, run)

    def make(loader: Loader, tokenizer: PreTrainedTokenizerFast) -> Server:
        made.append(Server(service, section, loader, tokenizer))
        return made[0]

    async def main(service: Service) -> None:
        await sample(service, policies, policies.production.follow(name), make)

    running = asyncio.create_task(service.run(main))
    try:
        async with asyncio.timeout(120):
            while not service.health.is_ready:
                await asyncio.sleep(0.02)
                if running.done():
                    running.result()
        yield made[0]
    finally:
        service.stopping.set()
        await asyncio.wait({running}, timeout=20)
        running.result()


def pool(bus: Bus, run: str, **settings: Any) -> BusPool:
    """The generators as the router sees them."""
    defaults: dict[str, Any] = {"kind": "bus", "first_token_seconds": 10.0, "next_token_seconds": 5.0, "window": 256}
    return BusPool("ours", PoolSettings(**(defaults | settings)), bus, run)


def body(text: str = "abc>", **parameters: Any) -> dict[str, Any]:
    """A chat request; with its seed, an answer is not empty by chance."""
    return {"model": "ours", "messages": [{"role": "user", "content": text}], "max_tokens": 24, "seed": 1, **parameters}
