"""A serving generator as a process of its own, killed in the middle of an answer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from contracts.subjects import ROLLOUT, TASK
from infra import models
from router.pools.base import Fault, PoolError
from tests.acceptance.cluster import Cluster
from tests.integration.router.serving import body, pool, promote, publish

SERVE = {"GENERATOR__ROLE": "serve", "GENERATOR__PRECISION": "bf16"}
LONG = {"text": "hello>", "max_tokens": 240, "temperature": 0}  # greedily, this model never comes to an end


async def test_a_generator_that_is_killed_in_mid_answer_costs_that_answer_only(tmp_path: Path) -> None:
    models.make_tiny(tmp_path / "model", 0, width=1024)  # slow enough to be killed in the middle
    async with Cluster(tmp_path, "serving") as cluster:
        run, bus = cluster.run, cluster.bus
        await promote(bus, run, await publish(bus, run, 0, folder=tmp_path / "model"))
        cluster.start("generator-1", **SERVE)
        ours = pool(bus, run, first_token_seconds=60.0, next_token_seconds=1.0)
        killed = 0.0
        with pytest.raises(PoolError, match="no further token came in time") as error:
            async for _ in ours.stream(body(**LONG)):
                if not killed:
                    cluster.kill("generator-1")
                    killed = time.monotonic()
        assert time.monotonic() - killed < 20
        assert error.value.fault is Fault.TIMEOUT
        assert error.value.usage.prompt == 6 and 0 < error.value.usage.completion < 240
        await ours.close()
        assert not await bus.subjects(TASK.stream, TASK.filter(run=run)), "no other generator will answer it again"
        assert not await bus.subjects(ROLLOUT.stream, ROLLOUT.filter(run=run)), "half an answer is filed by nobody"
