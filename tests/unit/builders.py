"""Messages for tests, with sensible fields that a test overrides."""

from __future__ import annotations

from typing import Any

import numpy as np

from contracts.messages import Finish, Outcome, PolicyRef, PolicySegment, Purpose, Rollout, Sampling, Split
from contracts.tensors import Tensor


def policy(version: int, generation: int = 1) -> PolicyRef:
    return PolicyRef(generation, version, f"{generation:032x}{version:032x}")


def rollout(task: str = "train-0", index: int = 0, **changes: Any) -> Rollout:
    """A rollout of 3 prompt and 2 sampled tokens; `version` and `generation` name its policy."""
    reference = policy(changes.pop("version", 0), changes.pop("generation", 1))
    length = changes.pop("length", 5)
    prompt = changes.pop("prompt_length", 3)
    mask = np.r_[np.zeros(prompt, np.uint8), np.ones(length - prompt, np.uint8)]
    fields: dict[str, Any] = {
        "id": f"{task}.{index}",
        "task_id": task,
        "index": index,
        "group_size": 2,
        "run": "test",
        "purpose": Purpose.TRAIN,
        "environment": "reverse-text",
        "split": Split.TRAIN,
        "item": "0123456789abcdef",
        "tokens": Tensor.of(np.arange(length, dtype=np.int32)),
        "loss_mask": Tensor.of(mask),
        "logprobs": Tensor.of(-0.5 * mask.astype(np.float32)),
        "temperatures": Tensor.of(mask.astype(np.float32)),
        "prompt_length": prompt,
        "segments": [PolicySegment(prompt, reference)],
        "sampling": Sampling(max_tokens=2),
        "finish": Finish.STOP,
        "outcome": Outcome.OK,
        "reward": float(index % 2),
        "reward_parts": {},
        "completion": "ab",
        "generator": "generator-1",
        "issued_ns": 1,
        "started_ns": 2,
        "finished_ns": 3,
    }
    return Rollout(**(fields | changes))
