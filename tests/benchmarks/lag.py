"""What staleness costs each objective: the tiny model learns to reverse six letters from data that are k versions old.

    python -m tests.benchmarks.lag [--objectives decoupled_ppo ppo …] [--lags 0 1 4 8 16] [--seeds 3] [--first-seed 1]

Every step trains the real trainer on 32 prompts × 8 completions that the policy of k steps ago sampled; the reward is
the share of right letters. Decoupled PPO at lag 4 learns as on-policy does, some steps later; PPO around the behaviour
policy does not. Single runs differ: a policy that never found one of the ten letters has an exact match of .53.
"""

from __future__ import annotations

import argparse
import json
import string
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean

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

# A narrow clip range makes it the range, not the learning rate, that limits a step: a policy held near one k versions
# old then moves k + 1 times more slowly. CISPO's weights are free below, as in its paper.
CLIP = {"eps_clip": 0.1, "eps_clip_high": 0.2}
OBJECTIVES = {
    "decoupled_ppo": ObjectiveSettings(name="decoupled_ppo", **CLIP),
    "tis": ObjectiveSettings(name="tis", **CLIP),
    "cispo": ObjectiveSettings(name="cispo", eps_clip=1.0, eps_clip_high=1.0),
    "ppo": ObjectiveSettings(name="ppo", **CLIP),
    "gspo": ObjectiveSettings(name="gspo", aggregation="sequence_mean", **CLIP),
    "reinforce": ObjectiveSettings(name="reinforce"),
}


@dataclass(frozen=True)
class Curve:
    """One run: mean training reward of every step, and greedy exact match on held-out prompts at its end."""

    rewards: list[float]
    exact: float  # share of prompts with every letter right


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


def run(objective: ObjectiveSettings, lag: int, seed: int, steps: int, optimizer: OptimizerSettings) -> Curve:
    """Train from scratch on data of fixed lag."""
    folder = models.resolve("tiny", seed=seed)
    settings = LearnerSettings(
        model="tiny",
        precision="fp32",
        minibatches=8,
        objective=objective,
        optimizer=optimizer,
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
    return Curve(rewards, float((sampler.rewards(texts, completions) == 1.0).float().mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 4, 8, 16])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    optimizer = OptimizerSettings(learning_rate=arguments.learning_rate, beta2=0.999)
    table: dict[str, dict[int, list[Curve]]] = {}
    print("greedy exact match / training reward of the last five steps, mean of the seeds")
    print("objective       " + "".join(f"  lag {lag:<7}" for lag in arguments.lags), flush=True)
    for name in arguments.objectives:
        print(f"{name:16}", end="", flush=True)
        table[name] = {}
        for lag in arguments.lags:
            seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
            runs = [run(OBJECTIVES[name], lag, seed, arguments.steps, optimizer) for seed in seeds]
            table[name][lag] = runs
            exact, reward = fmean(curve.exact for curve in runs), fmean(fmean(curve.rewards[-5:]) for curve in runs)
            print(f"  {exact:.2f} / {reward:.2f}", end="", flush=True)
        print(flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1, default=asdict))


if __name__ == "__main__":
    main()
