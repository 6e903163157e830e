"""Whole processes with vLLM as the engine, killed where it hurts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from contracts import subjects
from tests.acceptance.cluster import Cluster
from tests.acceptance.conftest import cluster  # noqa: F401  (the fixture)
from tests.acceptance.test_faults import assert_sound, dead_letters, messages
from tests.vllm.subject import descendants, engine_core

START_SECONDS = 150.0  # of a vLLM engine, on a machine that is busy

VLLM = {
    "GENERATOR__ENGINE": "vllm",
    "GENERATOR__MAX_REQUESTS": 32,
    "GENERATOR__VLLM__ENFORCE_EAGER": True,
    "GENERATOR__VLLM__KV_CACHE_GIB": 0.5,
    "LEARNER__STEPS": 12,
    "LEARNER__SAMPLING__MAX_TOKENS": 64,
    "LEARNER__SAMPLING__STOP": "[]",
}


async def test_a_run_goes_on_when_its_engine_is_killed_and_nothing_outlives_a_generator(
    cluster: Callable[..., Cluster],  # noqa: F811
) -> None:
    async with cluster(**VLLM) as c:
        c.start("learner")
        c.start("generator-1")
        pid = c.processes["generator-1"].pid
        await c.until_logged("generator-1", "not ready", detail="vLLM is starting", seconds=START_SECONDS)
        await c.until_logged("learner", "step", version=2, seconds=START_SECONDS)
        os.kill(engine_core(pid), signal.SIGKILL)
        assert await c.finish(seconds=START_SECONDS) == 0
        assert len(c.logged("generator-1", "ready")) == 2, "it took no work while its engine was down"
        assert len(c.logged("generator-1", "started")) == 1, "the generator itself went on"
        summary = await c.summary()
        assert_sound(summary, steps=12)
        assert summary["rollouts_trained"] == 12 * 4 * 4
        assert summary["dead_letters"] == {} and await dead_letters(c) == []
        rollouts = await messages(c, subjects.ROLLOUT, run=c.run, purpose="train")
        assert any(len(rollout.segments) > 1 for rollout in rollouts), "policies changed in flight"

        children = descendants(pid)
        assert [command for command in children.values() if command.startswith("VLLM::")]
        os.kill(pid, signal.SIGKILL)  # it alone, not its group
        c.processes["generator-1"].wait(10)
        await c.until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "its children end")
