"""A learner of several processes is one learner: it ends as a whole, and comes back as a whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.acceptance.test_faults import assert_sound

RANKS = {"LEARNER__RANKS": 2}


def children(pid: int) -> list[int]:
    """Processes that `pid` has started, or that one of them has."""
    try:
        own = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # gone meanwhile
        return []
    return own + [grandchild for child in own for grandchild in children(child)]


def alive(pid: int) -> bool:
    """Whether the process computes: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_learner_of_two_ranks_ends_comes_back_and_drains_as_a_whole(cluster):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "learner"]
    async with cluster(LEARNER__STEPS=1000, **RANKS) as c:
        c.start("generator-1")
        c.start("learner")
        await c.until_logged("learner", "checkpoint", version=2)
        (follower,) = children(c.processes["learner"].pid)
        os.kill(follower, signal.SIGKILL)
        assert await c.finish(seconds=30) == 1, "the run is not done: a supervisor starts it again"

        c.start("learner")
        await c.until(lambda: len(c.logged("learner", "ready")) == 2, "the learner is back")
        assert c.logged("learner", "resumed")[-1]["version"] >= 2
        (follower,) = children(c.processes["learner"].pid)
        os.kill(follower, signal.SIGTERM)  # a terminal and torchrun send it to every rank
        c.kill("learner", signal.SIGTERM)
        assert await c.finish(seconds=30) == 0
        assert not alive(follower)
        saved = c.logged("learner", "checkpoint")[-1]["version"]

        c.start("learner", arguments=torchrun, LEARNER__STEPS=saved + 2)
        await c.until_logged("learner", "resumed", version=saved)
        ranks = children(c.processes["learner"].pid)
        assert await c.finish() == 0
        assert not any(map(alive, ranks)), "no rank outlives the run"
        summary = await c.summary()
        assert_sound(summary, steps=saved + 2)
        assert summary["rollouts_trained"] == (saved + 2) * 4 * 4
