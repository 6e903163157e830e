"""Policies as folders that vLLM loads: the model's configuration and tokenizer, and safetensors of one policy."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from contracts.messages import PolicyRef
from generator.engines.base import EngineError
from generator.engines.decoder import fit
from infra import models

MEMORY = Path("/dev/shm")  # a file system in memory
PREFIX = "tailrace-vllm-"
LOCK = ".lock"
SHARD_BYTES = 1024**3  # as much is copied at once


def skeleton(folder: Path) -> PreTrainedModel:
    """The model of `folder` without memory for its parameters: names, shapes and configuration."""
    meta = torch.device("meta")
    with meta:
        return models.load_model(folder, dtype=torch.bfloat16, device=meta, weights=False)


class WeightFolders:
    """Writes policies into folders of their own, in memory where there is room for two, and deletes old ones.

    A folder that a killed generator left behind is deleted by the next one on the machine: its lock is free then.
    """

    def __init__(self, source: Path, model: PreTrainedModel) -> None:
        """`source` describes the model and is only read now, `model` is its `skeleton`."""
        self._files, self._model = models.bundle(source), model
        self._homes: dict[Path, object] = {}  # with the open file that holds the lock
        self._writing = threading.Lock()  # a thread that writes outlives the load that wanted it
        self._closed = False

    def write(self, policy: PolicyRef, weights: Mapping[str, Tensor]) -> Path:
        """The new folder of a policy. Blocks. Raises `EngineError` when the weights do not fit, and after `close`."""
        with self._writing:
            if self._closed:
                raise EngineError("the engine is closed")
            return self._write(policy, weights)

    def _write(self, policy: PolicyRef, weights: Mapping[str, Tensor]) -> Path:
        given = {id(parameter): tensor for parameter, tensor in fit(self._model, weights)}
        # Tied tensors under all of their names: an engine may keep them apart.
        named = {name: given[id(parameter)] for name, parameter in self._model.state_dict(keep_vars=True).items()}
        size = sum(tensor.nbytes for tensor in named.values())
        folder = self._home(size) / f"{policy.generation}.{policy.version}.{policy.digest[:8]}"
        shutil.rmtree(folder, ignore_errors=True)  # half-written, by a load that was cancelled
        models.unbundle(self._files, folder)
        for number, shard in enumerate(_shards(named)):
            save_file(shard, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        return folder

    def remove(self, folder: Path) -> None:
        """Delete one policy's folder."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Delete everything that was written. Blocks until what is being written is complete."""
        with self._writing:
            self._closed = True
            for home in self._homes:
                shutil.rmtree(home, ignore_errors=True)
            self._homes.clear()

    def _home(self, size: int) -> Path:
        temporary = Path(tempfile.gettempdir())
        roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size
        base = MEMORY if roomy else temporary
        for home in self._homes:
            if home.parent == base:
                return home
        _sweep(base)
        made = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}", dir=base))
        lock = (made / LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        home = made.rename(base / made.name.removeprefix("new-"))  # under this name it is locked from the beginning
        self._homes[home] = lock
        return home


def _sweep(base: Path) -> None:
    """Delete what generators that were killed have left."""
    for home in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (home / LOCK).open("r+") as lock:  # in use, or another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home)


def _shards(named: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Copies of the tensors, about `SHARD_BYTES` at a time: views of one buffer cannot be saved as they are."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named.items():
        shard[name] = tensor.detach().clone().contiguous()
        size += tensor.nbytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard
