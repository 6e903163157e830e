"""A verifier that always fails: what it should have judged is dropped by name, and other prompts take its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from contracts.messages import Reason
from tests.acceptance.cluster import Cluster


async def test_groups_that_nobody_can_score_are_replaced(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """Synchronous, one group a step: with such a group closed nothing else is under way that could wake anybody."""
    questions = tmp_path / "questions.jsonl"
    verifiers = {"exact": range(10), "gym:no-such-task": range(10, 40)}
    questions.write_text(
        "".join(
            json.dumps({"prompt": f"{number}>", "answer": "a", "verifier": verifier}) + "\n"
            for verifier, numbers in verifiers.items()
            for number in numbers
        )
    )
    async with cluster(
        RUN__ENVIRONMENT=f"jsonl:{questions}", LEARNER__MAX_STALENESS=0, LEARNER__GROUPS_PER_STEP=1, LEARNER__STEPS=6
    ) as c:
        c.start("learner")
        c.start("generator-1")
        assert await c.finish(seconds=60) == 0
        summary = await c.summary()
        assert summary["steps"] == 6
        assert summary["rollouts_discarded"][Reason.UNSCORED] > 0
        assert summary["tasks_expired"] == 0, "nobody had to wait for a deadline"
