"""Learning from data of a fixed age: every step trains on what the policy of exactly k steps ago sampled.

The real trainer and the tiny model, 32 prompts × 8 completions a step; the task is to reverse six letters, the reward
the share of right ones.
"""

from __future__ import annotations

import string
from collections import deque
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from infra import models
from infra.sampling import distribution_logprobs
from infra.weights import unpack
from learner.advantages import group_advantages
from learner.packing import Sample
from learner.settings import LearnerSettings, ObjectiveSettings, OptimizerSettings, SamplingSettings
from learner.trainer import Trainer

LETTERS = 6
ALPHABET = string.ascii_lowercase[:10]
PROMPTS = 32
GROUP = 8
HELD_OUT = 200


class Sampler:
    """The plainest sampler: one batch, one key-value cache, no early end."""

    def __init__(self, folder: Path) -> None:
        self.model = models.load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
        self.tokenizer = models.load_tokenizer(folder)

    @torch.no_grad()
    def sample(self, texts: list[str], temperature: float, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Six tokens [B, 6] for every text, and their log-probs."""
        inputs = torch.tensor(self.tokenizer([f"{text}>" for text in texts]).input_ids)
        cache = DynamicCache(config=self.model.config)
        tokens, logprobs = [], []
        for _ in range(LETTERS):
            output = self.model(
                input_ids=inputs,
                attention_mask=torch.ones(len(texts), cache.get_seq_length() + inputs.shape[1], dtype=torch.long),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            last = output.logits[:, -1]
            distribution = distribution_logprobs(last, temperature)
            inputs = torch.multinomial(distribution.exp(), 1, generator=random)
            tokens.append(inputs)
            logprobs.append(distribution.gather(-1, inputs))
        return torch.cat(tokens, dim=-1), torch.cat(logprobs, dim=-1)

    def rewards(self, texts: list[str], completions: Tensor) -> Tensor:
        """Share of right letters [B]."""
        gold = torch.tensor(self.tokenizer([text[::-1] for text in texts]).input_ids)
        return (completions == gold).float().mean(-1)


def words(count: int, random: Random) -> list[str]:
    return ["".join(random.choices(ALPHABET, k=LETTERS)) for _ in range(count)]


def groups_of(sampler: Sampler, texts: list[str], random: torch.Generator) -> tuple[list[list[Sample]], float]:
    """A batch as the learner would assemble it, and its mean reward."""
    repeated = [text for text in texts for _ in range(GROUP)]
    completions, logprobs = sampler.sample(repeated, 1.0, random)
    rewards = sampler.rewards(repeated, completions)
    groups = []
    for start in range(0, len(repeated), GROUP):
        members = range(start, start + GROUP)
        advantages = group_advantages(rewards[start : start + GROUP].tolist(), "grpo")
        prompt = np.array(sampler.tokenizer(f"{repeated[start]}>").input_ids, np.int32)
        groups.append(
            [
                Sample(
                    rollout_id=str(row),
                    prompt=prompt,
                    completion=completions[row].numpy().astype(np.int32),
                    mask=np.ones(LETTERS, np.uint8),
                    behaviour_logprobs=logprobs[row].numpy(),
                    temperatures=np.ones(LETTERS, np.float32),
                    advantage=advantage,
                    top_p=1.0,
                    top_k=0,
                )
                for row, advantage in zip(members, advantages, strict=True)
            ]
        )
    return groups, float(rewards.mean())


def run(
    objective: ObjectiveSettings, lag: int, seed: int, steps: int, learning_rate: float
) -> tuple[list[float], float]:
    """Train from scratch: mean training reward of every step, and the share of held-out prompts with every letter
    right at the end, sampled greedily.
    """
    folder = models.resolve("tiny", seed=seed)
    settings = LearnerSettings(
        model="tiny",
        precision="fp32",
        minibatches=8,
        objective=objective,
        optimizer=OptimizerSettings(learning_rate=learning_rate, beta2=0.999),
        sampling=SamplingSettings(max_tokens=LETTERS),
        token_budget=1 << 14,
        threads=1,
    )
    trainer, sampler = Trainer(folder, settings, seed=seed), Sampler(folder)
    prompts, random = Random(seed), torch.Generator().manual_seed(seed)
    policies = deque([unpack(*trainer.weights())], maxlen=lag + 1)
    rewards = []
    for _ in range(steps):
        sampler.model.load_state_dict(policies[0], strict=False)  # the tied head has no bytes of its own
        groups, reward = groups_of(sampler, words(PROMPTS, prompts), random)
        trainer.step(groups)
        policies.append(unpack(*trainer.weights()))
        rewards.append(reward)
    sampler.model.load_state_dict(policies[-1], strict=False)  # the tied head has no bytes of its own
    texts = words(HELD_OUT, Random(f"held out {seed}"))
    completions, _ = sampler.sample(texts, 0.0, random)
    return rewards, float((sampler.rewards(texts, completions) == 1.0).float().mean())
