"""Activations that are recomputed give the same gradient and are not kept."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from infra.errors import UserError
from learner.forward import Batch, completion_logprobs
from learner.layers import recompute_activations
from learner.packing import MicroBatch
from learner.trainer import Trainer
from tests.unit.test_trainer import ARCHITECTURES, CPU, assert_same, load, make_groups, make_settings


def run(model: Any, batch: Batch) -> tuple[dict[str, Tensor], int]:
    """The gradient of some loss, and how many bytes the graph kept for it."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = completion_logprobs(model, batch).square().sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "tiny"])
def test_the_gradient_is_that_of_kept_activations(architecture: str, precision: torch.dtype, tiny_folder: Path) -> None:
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = load(tiny_folder) if architecture == "tiny" else ARCHITECTURES[architecture]().eval()
        if recompute:
            recompute_activations(model)
        reduced = precision is torch.bfloat16
        with torch.autocast("cpu", precision) if reduced else nullcontext():
            results.append(run(model, Batch.of(MicroBatch(make_groups()), CPU)))
    (expected, much), (found, little) = results
    assert_same(found, expected)
    assert little < 0.7 * much, "bytes, the weights included, which a graph keeps either way"


def test_attention_is_computed_twice_in_the_same_way(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    """Prompts below, whole sequences above the length from which another attention is used."""
    monkeypatch.setattr("learner.layers.SHORT_ATTENTION", 9)
    gradients = []
    for recompute in (False, True):
        model = load(tiny_folder)
        if recompute:
            recompute_activations(model)
        gradients.append(run(model, Batch.of(MicroBatch(make_groups()), CPU))[0])
    assert_same(*gradients)


def test_a_step_is_the_same(tiny_folder: Path) -> None:
    plain, recomputed = (
        Trainer(tiny_folder, make_settings(gradient_checkpointing=on, minibatches=2), seed=1) for on in (False, True)
    )
    for seed in range(2):
        expected, found = plain.step(make_groups(seed)), recomputed.step(make_groups(seed))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def test_a_model_that_does_not_name_its_layers_is_refused() -> None:
    model = ARCHITECTURES["sliding window"]()
    model._no_split_modules = None
    with pytest.raises(UserError, match="does not name its decoder layers"):
        recompute_activations(model)
