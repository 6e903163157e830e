"""Consecutive versions of SmolLM2 as reinforcement learning makes them: real optimizer steps on sampled completions.

Two things decide how many bf16 weights a step changes, and neither shows in the first steps from a published model. Its
weights lie in the middle of what rounds to them, so each gets a remainder here, uniform within its rounding interval,
as hundreds of steps leave it. And AdamW's first updates are as large as the learning rate in every weight: the first
`SETTLE` steps are taken, and not measured.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import torch
from transformers import PreTrainedModel

from contracts.policies import TensorSpec
from infra import models, patches
from infra.sampling import sample
from learner.packing import Sample
from learner.settings import LearnerSettings, OptimizerSettings
from learner.trainer import Trainer

SETTLE = 4
PROMPTS, GROUP, TOKENS = 2, 4, 4
Weights = tuple[memoryview, list[TensorSpec]]


def sizes(folder: Path, learning_rate: float, batches: list[list[list[Sample]]]) -> tuple[list[float], list[Weights]]:
    """Bytes of each measured step's patch as a share of all weights, and the last three versions."""
    settings = LearnerSettings(optimizer=OptimizerSettings(learning_rate=learning_rate), threads=1)
    trainer = Trainer(folder, settings, seed=1)
    trainer.load_state(_with_remainders(trainer.state()))
    shares: list[float] = []
    versions: list[Weights] = []
    for number, batch in enumerate(batches):
        trainer.step(batch)
        if number + 2 < SETTLE:
            continue
        versions = [*versions[-2:], trainer.weights()]
        if number >= SETTLE:
            (old, specs), (new, _) = versions[-2:]
            shares.append(len(patches.diff(old, new, specs)) / len(new))
    return shares, versions


def sampled(folder: Path, steps: int) -> list[list[list[Sample]]]:
    """Batches for `SETTLE` steps and `steps` more, sampled by the published model; different prompts in each."""
    random, drawn = Random(1), torch.Generator().manual_seed(1)
    model = models.load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = models.load_tokenizer(folder)
    batches = []
    for _ in range(SETTLE + steps):
        texts = [f"What is {random.randint(10, 99)} plus {random.randint(10, 99)}? Answer:" for _ in range(PROMPTS)]
        batches.append(_batch(model, torch.tensor(tokenizer(texts).input_ids), drawn))
    return batches


def _with_remainders(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Master weights that round to the same bf16 weights, anywhere within their rounding interval."""
    random = torch.Generator().manual_seed(2)
    for name, tensor in state.items():
        if name.startswith("model."):
            exponents = torch.frexp(tensor).exponent  # 8 bits of significand: the last one is worth 2^(exponent - 8)
            offsets = (torch.rand(tensor.shape, generator=random) - 0.5) * 0.998
            tensor += torch.where(tensor == 0, 0.0, torch.ldexp(offsets, exponents - 8))
    return state


def _batch(model: PreTrainedModel, prompts: torch.Tensor, drawn: torch.Generator) -> list[list[Sample]]:
    """Groups of completions with their true log-probs; half of each group is called better than the other."""
    prompts = prompts.repeat_interleave(GROUP, 0)
    tokens, logprobs = prompts, []
    for _ in range(TOKENS):
        with torch.no_grad():
            last = model(tokens).logits[:, -1]
        uniforms = torch.rand(len(tokens), generator=drawn, dtype=torch.float64).tolist()
        chosen, logprob = sample(last, uniforms, 1.0)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        logprobs.append(logprob)
    behaviour = torch.stack(logprobs, dim=1).numpy()
    length = prompts.shape[1]
    samples = [
        Sample(
            rollout_id=str(row),
            prompt=prompts[row].numpy().astype(np.int32),
            completion=tokens[row, length:].numpy().astype(np.int32),
            mask=np.ones(TOKENS, np.uint8),
            behaviour_logprobs=behaviour[row],
            temperatures=np.ones(TOKENS, np.float32),
            advantage=1.0 if row % 2 else -1.0,
            top_p=1.0,
            top_k=0,
        )
        for row in range(len(tokens))
    ]
    return [samples[start : start + GROUP] for start in range(0, len(samples), GROUP)]
