"""Requests over the bus, sampled by vLLM: read along, and given up."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

from generator.settings import VllmSettings
from infra import models
from infra.bootstrap import bootstrap
from infra.bus import Bus
from infra.server import EmbeddedServer
from tests.integration.helpers import until
from tests.integration.router.serving import pool, promote, publish, serving_generator

RUN = "serving"
SETTINGS = {
    "engine": "vllm",
    "threads": 1,
    "max_requests": 4,
    "vllm": VllmSettings(kv_cache_gib=0.5, enforce_eager=True, max_model_len=1024),
}


async def test_an_answer_is_read_along_and_giving_it_up_frees_its_slot(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    server.start()
    bus = await Bus.connect(server.settings, "test")
    await bootstrap(bus, RUN, ["default"], create=True)
    await promote(bus, RUN, await publish(bus, RUN, 0, folder=models.resolve("smollm2")))
    ours = pool(bus, RUN, window=1024, first_token_seconds=60.0, next_token_seconds=30.0)
    body = {"messages": [{"role": "user", "content": "Write about cats, with emojis."}], "temperature": 0}
    try:
        async with serving_generator(bus, RUN, **SETTINGS) as generator:
            chunks = [chunk async for chunk in ours.stream(body | {"max_tokens": 60})]
            text = "".join(chunk.text for chunk in chunks)
            assert len([chunk for chunk in chunks if chunk.text]) > 10 and "\ufffd" not in text
            assert chunks[-1].policy is not None and chunks[-1].policy[:2] == (1, 0)
            assert text == (await ours.complete(body | {"max_tokens": 60})).text
            async with aclosing(ours.stream(body | {"max_tokens": 900})) as long:
                await anext(long)
            assert await until(lambda: generator.engine.stats.inflight, expected=False, seconds=5) is False
            assert generator.reports.outcomes["cancelled"] == 1
    finally:
        await ours.close()
        await bus.close()
        server.stop()
