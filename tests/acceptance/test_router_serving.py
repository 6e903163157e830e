"""From OpenAI's client through the router and the bus to a generator, each a process; and one is killed in between."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from contracts.messages import Rollout
from contracts.subjects import ROLLOUT, TASK
from infra import models
from infra.bootstrap import bootstrap
from infra.bus import Bus
from tests.acceptance.gateway import Router
from tests.integration.router.serving import promote, publish

RUN = "front"  # of `Router`
OURS = {"kind": "bus", "url": "", "model": "default", "window": 256, "first_token_seconds": 60, "next_token_seconds": 1}
SERVE = {
    "TAILRACE_GENERATOR__ROLE": "serve",
    "TAILRACE_GENERATOR__THREADS": "1",
    "TAILRACE_SERVICE__HEARTBEAT_SECONDS": "0.5",
}


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(tmp_path, {"ours": OURS | {"retries": 0}})
    yield made
    made.close()


@pytest.fixture
def generator(router: Router, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "generator.log").open("wb") as log:
        command = [sys.executable, "-m", "generator"]
        environment = router.environment() | SERVE
        made = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    yield made
    if made.poll() is None:
        os.killpg(made.pid, signal.SIGKILL)
    made.wait(10)


async def test_a_request_goes_all_the_way_and_a_killed_generator_costs_its_answer_only(
    router: Router, generator: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    models.make_tiny(tmp_path / "model", 0, width=1024)  # slow enough to be killed in the middle
    bus = await Bus.connect(router.server.settings, "onlooker")
    await bootstrap(bus, RUN, ["default"], create=True)
    await promote(bus, RUN, await publish(bus, RUN, 4, folder=tmp_path / "model"))
    try:
        client = router.client().with_options(timeout=90.0)
        parts = {"model": "ours", "messages": [{"role": "user", "content": "hello>"}], "temperature": 0}
        reply = await client.chat.completions.create(**parts, max_tokens=12, logprobs=True)  # type: ignore[call-overload]
        assert reply.usage.completion_tokens == 12 and reply.choices[0].finish_reason == "length"
        filed = [got.message async for got in bus.read(ROLLOUT, kind=Rollout, follow=False, consumer="t", run=RUN)]
        assert [(rollout.completion, rollout.oldest.version) for rollout in filed] == [
            (reply.choices[0].message.content, 4)
        ]
        told = [entry.logprob for entry in reply.choices[0].logprobs.content]
        assert told == pytest.approx(filed[0].logprobs.array()[filed[0].prompt_length :].tolist(), abs=1e-6)

        shown, killed = "", 0.0
        with pytest.raises(openai.APIError):
            stream = await client.chat.completions.create(**parts, max_tokens=240, stream=True)  # type: ignore[call-overload]
            async for chunk in stream:
                shown += chunk.choices[0].delta.content or ""
                if shown and not killed:
                    os.killpg(generator.pid, signal.SIGKILL)
                    killed = time.monotonic()
        assert time.monotonic() - killed < 20
        assert shown.startswith(reply.choices[0].message.content[:1]) and len(shown) < 240
        async with asyncio.timeout(20):
            while await bus.subjects(TASK.stream, TASK.filter(run=RUN)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # until it is withdrawn, so that no other generator answers it
        assert len([got async for got in bus.read(ROLLOUT, follow=False, consumer="t", run=RUN)]) == 1
    finally:
        await bus.close()
