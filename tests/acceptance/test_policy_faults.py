"""Real processes lose a patch or fall far behind: the run completes, within its bound, and trains nothing twice."""

from __future__ import annotations

import signal

from contracts import subjects
from contracts.messages import Purpose
from infra.blobs import BlobStore
from infra.policies import PolicyStore
from tests.acceptance.cluster import Cluster
from tests.acceptance.test_faults import assert_sound, messages

PATCHED = {"LEARNER__PRECISION": "bf16", "LEARNER__OPTIMIZER__LEARNING_RATE": "1e-5"}  # small steps: small patches


def version_of(c: Cluster, instance: str) -> int:
    return max((line["version"] for line in c.logged(instance, "policy loaded")), default=-1)


async def test_a_patch_that_is_lost_from_the_store_holds_nobody_up(cluster):
    """Staleness 0: nothing is sampled, hence nothing trained, until the only generator has the newest version."""
    async with cluster(**PATCHED, LEARNER__MAX_STALENESS=0, LEARNER__STEPS=10) as c:
        c.start("learner")
        c.start("generator-1")
        await c.until_logged("generator-1", "policy loaded", version=3)
        c.kill("generator-1", signal.SIGTERM)
        assert await c.finish("generator-1", seconds=30) == 0
        head = await PolicyStore(c.bus, c.run).head()
        assert head.patches, "a patch is what gets lost"
        await BlobStore(c.bus.connection, subjects.WEIGHTS, c.run).delete(head.patches[-1].digest)
        c.start("generator-2")
        await c.until_logged("generator-2", "policy not loaded")
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=10)
        assert summary["weights_patches"] > 3
        assert summary["rollouts_trained"] == 10 * 4 * 4
        assert summary["tasks_expired"] == 0


async def test_a_generator_more_than_ten_versions_behind_catches_up(cluster):
    """It sleeps, another one works on; when it wakes it loads the newest version and takes part again."""
    async with cluster(**PATCHED, LEARNER__STEPS=1000, LEARNER__GROUP_DEADLINE=2) as c:
        c.start("learner")
        c.start("generator-2")
        c.start("generator-1")
        await c.until_logged("generator-2", "policy loaded", version=2)
        await c.until_logged("generator-1", "ready")
        c.kill("generator-2", signal.SIGSTOP)
        slept_at = version_of(c, "generator-2")
        await c.until_logged("learner", "step", version=slept_at + 14, seconds=90)
        c.kill("generator-2", signal.SIGCONT)
        await c.until(lambda: version_of(c, "generator-2") > slept_at + 10, "the sleeper catches up")
        awake = version_of(c, "generator-2")
        await c.until(lambda: version_of(c, "generator-2") > awake + 2, "it follows again")
        c.kill("learner", signal.SIGTERM)
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=summary["steps"])
        assert summary["weights_patches"] > summary["weights_keyframes"]
        rollouts = await messages(c, subjects.ROLLOUT, run=c.run, purpose=Purpose.TRAIN)
        assert any(r.generator == "generator-2" and r.oldest.version >= awake for r in rollouts), "it samples again"
