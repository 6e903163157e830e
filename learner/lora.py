"""Low-rank adapters beside frozen linear layers (Hu et al., arXiv 2106.09685), through `peft`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from infra.errors import UserError
from learner.settings import LoraSettings

ADAPTER = "default"  # peft's name for the only adapter
BASE = ".base_layer."  # what peft puts between the name of an adapted layer and that of its parameter


def add_adapters(model: Any, settings: LoraSettings, *, seed: int) -> None:
    """Freeze the model and put adapters beside its linear layers: ΔW = α/r B A, with B = 0 at first.

    The model computes what it did before. Raises `UserError` when a target is not the name of a linear layer; the
    output head is none, because it may share its matrix with the embedding.
    """
    from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    unknown = [target for target in settings.targets if target not in kinds]
    if unknown:
        raise UserError(f"learner.lora.targets: the model has no layer {unknown[0]!r}; it has {', '.join(kinds)}")
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=settings.targets or kinds,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in layers.values()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    model.eval()


def merged_state(model: Any, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every tensor of the state dict that the model has without adapters, ΔW added where there are.

    Tensors under several names come once, under the first. `whole` makes a full tensor from a rank's part. The model
    stays as it is.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        layer, adapted, parameter = name.partition(BASE)
        if id(tensor) in seen or ".lora_" in name:
            continue
        seen.add(id(tensor))
        value = whole(tensor)
        if adapted and parameter == "weight":
            value = value + _delta(model.get_submodule(layer), whole)
        yield (f"{layer}.{parameter}" if adapted else name), value


def _delta(layer: Any, whole: Callable[[Tensor], Tensor]) -> Tensor:
    """ΔW in the layout of the layer's weight: GPT-2 keeps its weights as [in, out]."""
    delta = whole(layer.lora_B[ADAPTER].weight) @ whole(layer.lora_A[ADAPTER].weight) * layer.scaling[ADAPTER]
    return delta.T if layer.fan_in_fan_out else delta


def identity(folder: Path, settings: LoraSettings) -> dict[str, Tensor]:
    """What adapters mean nothing without: sha256 of the weight files beside which they are trained, and α.

    Empty without adapters. Reads all of the weights.
    """
    if not settings.rank:
        return {}
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return {
        "lora.base": torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8),
        "lora.alpha": torch.tensor(settings.alpha),
    }
