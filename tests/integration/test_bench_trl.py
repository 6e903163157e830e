"""TRL's side of the comparison, with the real TRL and a tiny model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from generator.benchmarks.trl import Job, Opponent
from infra.errors import UserError

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="pip install -e '.[bench]'")

TINY = Job(
    steps=3, device_batch=4, bf16=False, environment="reverse-text", model="tiny", groups_per_step=2, group_size=4,
    max_tokens=6, learning_rate=2e-3,
)  # fmt: skip


async def test_trl_trains_as_many_steps_as_it_is_told_and_waits(tmp_path: Path) -> None:
    async with Opponent.started(TINY, tmp_path / "log") as opponent:
        first = await opponent.train(1)
        then = await opponent.train(2)
    assert len(first) == 1 and len(then) == 2
    assert all(seconds > 0 and 0 <= reward <= 1 for seconds, reward in first + then)


async def test_what_trl_dies_of_is_said(tmp_path: Path) -> None:
    broken = Job(steps=1, device_batch=4, bf16=False, model=str(tmp_path / "missing"))
    async with Opponent.started(broken, tmp_path / "log") as opponent:
        with pytest.raises(UserError, match="missing"):
            await opponent.train(1)
