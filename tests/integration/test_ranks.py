"""Two ranks compute what one does: a real follower process, gloo, and a tiny model that is sharded over both."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from infra import models
from learner.packing import Sample
from learner.ranks import Leader
from learner.settings import LearnerSettings, LoraSettings, ObjectiveSettings
from learner.trainer import StepStats, Trainer
from tests.unit.test_trainer import ARCHITECTURES, make_groups, make_settings

SEED = 3


@contextmanager
def trainer_of_two(folder: Path, settings: LearnerSettings) -> Iterator[Trainer]:
    """A trainer whose second rank is a process of its own."""
    leader, port = Leader.listening(2)
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    follower = subprocess.Popen([sys.executable, "-m", "learner"], env=os.environ | place)
    try:
        yield Trainer(folder, settings, seed=SEED, ranks=leader)
        leader.close()
        assert follower.wait(20) == 0
    finally:
        follower.kill()
        follower.wait()


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def figures(stats: StepStats) -> dict[str, float]:
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, "tokens": stats.tokens} | stats.metrics


# Nothing to do for the second rank, for both, and a gradient that is not finite although that of one rank is.
ODD: list[list[list[Sample]]] = [
    make_groups(4)[:1],
    [],
    [*make_groups(5)[:3], [Sample(**(vars(sample) | {"advantage": math.inf})) for sample in make_groups(5)[3]]],
]

CASES: dict[str, dict[str, Any]] = {
    "several updates, several passes": {"minibatches": 2, "token_budget": 40},
    "adapters, recomputed activations, sequence ratios": {
        "lora": LoraSettings(rank=4),
        "gradient_checkpointing": True,
        "objective": ObjectiveSettings(name="gspo", aggregation="sequence_mean"),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_take_the_steps_of_one_and_either_goes_on_where_the_other_stopped(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "llama"
    models.unbundle(models.bundle(models.resolve("tiny")), folder)
    torch.manual_seed(SEED)
    # Without biases: that of the keys has the gradient 0, and AdamW would make steps out of rounding.
    ARCHITECTURES["grouped queries, tied embeddings"]().save_pretrained(folder)
    settings = make_settings(**CASES[case], ranks=2, model=str(folder))
    alone = Trainer(folder, settings, seed=SEED)
    alone.step(make_groups(0))
    start = alone.state()
    with trainer_of_two(folder, settings) as two:
        two.load_state(start)
        for batch in (make_groups(1), *ODD, make_groups(2)):
            found, expected = figures(two.step(batch)), figures(alone.step(batch))
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5, nan_ok=True), name
        state = two.state()
        assert_close(state, alone.state())
        (data, tensors), (expected_data, expected_tensors) = two.weights(), alone.weights()
        assert tensors == expected_tensors
        assert torch.frombuffer(data, dtype=torch.float32).allclose(
            torch.frombuffer(expected_data, dtype=torch.float32), rtol=1e-5, atol=1e-5
        )
    resumed = Trainer(folder, settings, seed=99)
    resumed.load_state(state)
    resumed.step(make_groups(3))
    alone.step(make_groups(3))
    assert_close(resumed.state(), alone.state())


def test_the_leader_hears_of_a_failure_while_it_waits_for_a_rank() -> None:
    """Otherwise the event loop would wait with it, and nobody would learn why the rank does not come."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    leader = Leader(store, 2)

    def wait_for_a_rank() -> None:
        with suppress(dist.DistStoreError):
            store.wait(["a rank that does not come"], timedelta(seconds=2))

    waiting = threading.Thread(target=wait_for_a_rank)
    waiting.start()
    time.sleep(0.2)
    assert leader.failure() is None
    assert waiting.is_alive()
    waiting.join(10)
