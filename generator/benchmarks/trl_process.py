"""TRL's GRPOTrainer in a process of its own: `python -m generator.benchmarks.trl_process SETTINGS`.

SETTINGS is a `Job` as JSON. The process trains as many steps as each line on standard input says, then waits for the
next line; it writes one JSON line a step to standard output: `{"seconds": …, "reward": …}`. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from contracts.messages import Split
from generator.benchmarks.trl import CORES, Job
from generator.environments import environment
from infra import models
from infra.grading.verifiers import VERIFIERS


class Metered(TrainerCallback):
    """Waits for permission before a step, and times it."""

    def __init__(self, allowed: Callable[[], int], say: Callable[[float], None]) -> None:
        self._allowed = allowed
        self._say = say
        self._left = 0
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Sampling belongs to the step: the trainer does it from here on."""
        while not self._left:
            self._left = self._allowed()
        self._left -= 1
        self._started = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimizer has stepped."""
        self._say(time.monotonic() - self._started)


def rows(job: Job) -> list[dict[str, Any]]:
    """The prompts of our own run, in its order, with what judges their answers."""
    made = environment(job.environment)
    items = [made.item((job.seed << 40) + index, Split.TRAIN) for index in range(job.steps * job.groups_per_step)]
    return [{"prompt": item.prompt, "expected": item.expected, "verifier": item.verifier} for item in items]


def trainer_of(job: Job, folder: str, reward: Callable[..., list[float]], callback: Metered) -> GRPOTrainer:
    """TRL's trainer with the objective, batch, precision and data order of our run."""
    path = models.resolve(job.model, seed=job.seed)
    tokenizer = models.load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    # TRL stops at, and counts as an end, whatever the model says ends a text.
    ends = [token for token in range(len(tokenizer)) if job.stop in tokenizer.decode([token])]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]
    config = GRPOConfig(
        output_dir=str(Path(folder) / "trl"),
        use_cpu=True,
        bf16=job.bf16,
        per_device_train_batch_size=job.device_batch,
        gradient_accumulation_steps=job.batch // job.device_batch,
        gradient_checkpointing=False,
        num_generations=job.group_size,
        max_completion_length=job.max_tokens,
        temperature=job.temperature,
        top_k=0,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=job.eps_clip,
        epsilon_high=job.eps_clip,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=job.beta1,
        adam_beta2=job.beta2,
        weight_decay=0.0,
        max_grad_norm=job.max_grad_norm,
        max_steps=job.steps,
        shuffle_dataset=False,
        seed=job.seed,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    # With its own fingerprint: the one that is computed cannot pickle tables of every pyarrow.
    tasks = Dataset(pyarrow.Table.from_pylist(rows(job)), fingerprint=f"{job.environment}-{job.seed}")
    return GRPOTrainer(
        model=model,
        args=config,
        train_dataset=tasks,
        processing_class=tokenizer,
        reward_funcs=reward,
        callbacks=[callback],
    )


def main() -> None:
    """Train what the arguments and the input say."""
    job = Job(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TRL prints goes to the log
    torch.set_num_threads(CORES)
    rewards: list[float] = []

    def reward(completions: list[str], expected: list[Any], verifier: list[str], **_: Any) -> list[float]:
        judged = zip(completions, expected, verifier, strict=True)
        given = [VERIFIERS[name](completion, gold)["reward"] for completion, gold, name in judged]
        rewards.extend(given)
        return given

    def say(seconds: float) -> None:
        answers.write(json.dumps({"seconds": seconds, "reward": sum(rewards) / len(rewards)}) + "\n")
        answers.flush()
        rewards.clear()

    def allowed() -> int:
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)  # nobody listens any more
        return int(line)

    with tempfile.TemporaryDirectory(prefix="tailrace-trl-") as folder:
        trainer_of(job, folder, reward, Metered(allowed, say)).train()


if __name__ == "__main__":
    main()
