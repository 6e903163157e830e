"""From sampled tokens to a `Rollout`. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from contracts.messages import Finish, PolicyRef, PolicySegment, Rollout, Task
from contracts.tensors import Tensor
from generator.engines import SampledToken
from infra.grading import Grade


@dataclass
class Completion:
    """One member of a group while it is sampled."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policies: list[tuple[int, PolicyRef]] = field(default_factory=list)  # each with the first token it sampled
    finish: Finish | None = None

    def add(self, sampled: SampledToken) -> None:
        """Append the next token."""
        if not self.policies or self.policies[-1][1] != sampled.policy:
            self.policies.append((len(self.tokens), sampled.policy))
        self.tokens.append(sampled.token)
        self.logprobs.append(sampled.logprob)
        self.finish = sampled.finish

    def segments(self, prompt_length: int) -> list[PolicySegment]:
        """Where the policy changed, as positions in prompt + completion."""
        return [PolicySegment(prompt_length + position, policy) for position, policy in self.policies]


def sampling_seed(task: Task) -> int:
    """The seed a task is sampled with: the same whenever and wherever the task is done."""
    return int.from_bytes(hashlib.sha256(f"{task.run}.{task.id}".encode()).digest()[:6])


def clean_text(text: str) -> tuple[str, bool]:
    """Text that msgpack and every log can carry, and whether it had to be changed: lone surrogates become U+FFFD."""
    clean = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return clean, clean != text


def rollout_of(
    task: Task,
    item: str,
    index: int,
    prompt: list[int],
    completion: Completion,
    text: str,
    grade: Grade,
    *,
    generator: str,
    started_ns: int,
    finished_ns: int,
) -> Rollout:
    """The message for completion `index` of `task`: prompt and completion as one sequence of T tokens.

    `item` is the content hash of what was asked.
    """
    text, changed = clean_text(text)
    assert completion.finish is not None, "only finished completions become rollouts"
    before, sampled = len(prompt), len(completion.tokens)
    temperatures = np.zeros(before + sampled, np.float32)
    temperatures[before:] = task.sampling.temperature
    return Rollout(
        id=f"{task.id}.{index}",
        task_id=task.id,
        index=index,
        group_size=task.group_size,
        run=task.run,
        purpose=task.purpose,
        environment=task.environment,
        split=task.split,
        item=item,
        tokens=Tensor.of(np.array([*prompt, *completion.tokens], np.int32)),
        loss_mask=Tensor.of(np.repeat(np.array([0, 1], np.uint8), [before, sampled])),
        logprobs=Tensor.of(np.concatenate([np.zeros(before, np.float32), np.array(completion.logprobs, np.float32)])),
        temperatures=Tensor.of(temperatures),
        prompt_length=before,
        segments=completion.segments(before),
        sampling=task.sampling,
        finish=completion.finish,
        outcome=grade.outcome,
        reward=grade.reward,
        reward_parts=grade.parts,
        completion=text,
        generator=generator,
        issued_ns=task.issued_ns,
        started_ns=started_ns,
        finished_ns=finished_ns,
        sanitised=changed,
    )
