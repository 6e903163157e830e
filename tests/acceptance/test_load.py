"""Load and fairness: slow prompts are trained, generators may be gone or frozen, and the server's disk may be slow."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from contracts import subjects
from contracts.messages import Reason
from tests.acceptance.test_faults import assert_sound, messages

STEPS, GROUPS, SIZE = 10, 4, 4  # see tests.acceptance.cluster


async def test_slow_prompts_are_trained_as_often_as_fast_ones(cluster):
    """Tools whose latency varies more than tenfold between prompts, and steps much shorter than the slow ones take."""
    async with cluster(
        RUN__ENVIRONMENT="tools:0.1:1.3:reverse-text", LEARNER__STEPS=STEPS, GENERATOR__MAX_REQUESTS=64
    ) as c:
        c.start("generator-1")
        c.start("learner")
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=STEPS)
        assert summary["rollouts_trained"] == STEPS * GROUPS * SIZE
        assert [d for d in await messages(c, subjects.DISCARD, run=c.run) if d.reason == Reason.STALE] == []
        steps = await messages(c, subjects.STEP, run=c.run)
        trained = {rollout.partition(".")[0] for step in steps for rollout in step.rollout_ids}
        assert trained == {f"train-{index}" for index in range(STEPS * GROUPS)}, (
            "each prompt that was issued, slow or not"
        )
        assert sum(step.seconds.get("wait_for_stragglers", 0.0) for step in steps) > 0.0
        assert summary["mismatches"] == [], "waiting for stragglers is idle like any other wait"


async def test_without_generators_the_learner_waits_and_burns_nothing(cluster):
    async with cluster(LEARNER__STEPS=1000, LEARNER__TASK_DEADLINE=2) as c:
        c.start("learner")
        c.start("generator-1")
        await c.until_logged("learner", "step", version=2)
        c.kill("generator-1", signal.SIGTERM)
        assert await c.finish("generator-1", seconds=30) == 0
        log = c.directory / "learner.log"
        await c.until(lambda: time.time() - log.stat().st_mtime > 2, "it has used up what was under way")
        before = len(c.logged("learner", "step"))
        burnt = cpu_seconds(c.processes["learner"].pid)
        await asyncio.sleep(4)
        assert cpu_seconds(c.processes["learner"].pid) - burnt < 0.8, "a fifth of a core would be waiting in a loop"
        c.start("generator-2")
        await c.until(lambda: len(c.logged("learner", "step")) > before + 3, "the run goes on")
        c.kill("learner", signal.SIGTERM)
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=summary["steps"])
        assert summary["tasks_expired"] == 0, "tasks that wait for a generator are not lost"


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_learner_resumes_while_the_generators_are_frozen(cluster):
    """Neither waits for the other for good: neither for tasks in frozen hands nor for a policy that nobody fetches."""
    async with cluster(LEARNER__STEPS=8) as c:
        c.start("generator-1")
        c.start("generator-2")
        c.start("learner")
        await c.until_logged("learner", "step", version=3)
        c.kill("generator-1", signal.SIGSTOP)
        c.kill("generator-2", signal.SIGSTOP)
        c.kill("learner")
        c.start("learner")
        await c.until_logged("learner", "resumed")
        await c.until(lambda: len(c.logged("learner", "ready")) == 2, "the learner is ready without them")
        await asyncio.sleep(3)
        assert c.processes["learner"].poll() is None
        c.kill("generator-1", signal.SIGCONT)
        c.kill("generator-2", signal.SIGCONT)
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=8)
        assert summary["rollouts_trained"] == 8 * GROUPS * SIZE


async def test_a_slow_disk_on_the_server_slows_the_run_and_loses_nothing(cluster):
    """The server stands still four fifths of the time, for seconds in mid-run, as when its disk is the bottleneck."""
    async with cluster(LEARNER__STEPS=12) as c:
        c.start("generator-1")
        c.start("learner")
        await c.until_logged("learner", "step", version=2)
        for _ in range(12):
            os.kill(c.server.pid, signal.SIGSTOP)
            await asyncio.sleep(0.4)
            os.kill(c.server.pid, signal.SIGCONT)
            await asyncio.sleep(0.1)
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=12)
        assert summary["rollouts_trained"] == 12 * GROUPS * SIZE, "every group is complete"
        assert summary["dead_letters"] == {} and summary["tasks_expired"] == 0
