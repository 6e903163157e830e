"""The learner's section of the run file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.settings import Section


class SamplingSettings(Section):
    """The distribution completions are sampled from; it travels in every task."""

    max_tokens: int = Field(16, ge=1, description="longest completion, tokens")
    temperature: float = Field(1.0, gt=0, lt=100, description="softmax temperature of training rollouts")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass; 1 = off")
    top_k: int = Field(0, ge=0, description="keep the k most likely tokens; 0 = off")
    stop: list[str] = Field(default=["\n"], description="a completion ends with any of these strings")


class ObjectiveSettings(Section):
    """The loss. Formulas and sources are in `learner/objectives`."""

    name: Literal["decoupled_ppo", "ppo", "tis", "cispo", "gspo", "reinforce"] = Field(
        "decoupled_ppo", description="which objective"
    )
    eps_clip: float = Field(0.2, gt=0, description="lower clip range of the ratio to the proximal policy")
    eps_clip_high: float = Field(0.2, gt=0, description="upper clip range")
    weight_clip: float = Field(
        2.0, gt=0, description="importance weights above it are rejected (decoupled PPO) or truncated (TIS)"
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean",
        description="mean over tokens, over sequences of token means (GRPO), or sum/(N*max_tokens) (Dr. GRPO)",
    )


class OptimizerSettings(Section):
    """AdamW on fp32 master weights."""

    learning_rate: float = Field(2e-5, gt=0, description="peak learning rate")
    warmup_steps: int = Field(2, ge=0, description="steps of linear warm-up")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW first moment decay")
    beta2: float = Field(0.99, ge=0, lt=1, description="AdamW second moment decay")
    weight_decay: float = Field(0.0, ge=0, description="AdamW decoupled weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradient norm is clipped to this")


class LoraSettings(Section):
    """Low-rank adapters: only they are trained, and what is published is the model with them merged in."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0 = the whole model is trained")
    alpha: int = Field(32, ge=1, description="adapters are scaled by alpha/rank")
    targets: list[str] = Field(
        default=[], description="linear layers that are adapted, such as q_proj; empty = all but the output head"
    )


class EvaluationSettings(Section):
    """Held-out items, sampled greedily before the first step and after the last one."""

    prompts: int = Field(0, ge=0, description="how many held-out prompts; 0 = no evaluation")
    deadline_seconds: float = Field(300.0, gt=0, description="an evaluation that takes longer is given up")


class LearnerSettings(Section):
    """Rollouts in, policy versions out."""

    model: str = Field("smollm2", description="smollm2, tiny, or a folder in Hugging Face layout")
    pool: str = Field("default", pattern=r"^[a-z0-9-]+$", description="pool of generators that gets the tasks")
    steps: int = Field(30, ge=0, description="optimizer steps until the run is complete")
    groups_per_step: int = Field(8, ge=1, description="prompts in a batch")
    group_size: int = Field(8, ge=2, description="completions per prompt")
    minibatches: int = Field(1, ge=1, description="optimizer updates per batch")
    max_staleness: int = Field(4, ge=0, description="oldest token of a consumed rollout, in versions; 0 = synchronous")
    advantage: Literal["grpo", "dr_grpo"] = Field("grpo", description="group-relative advantage, with or without 1/std")
    sampling: SamplingSettings = SamplingSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoraSettings = LoraSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    precision: Literal["bf16", "fp32"] = Field("bf16", description="autocast of the forward pass; masters stay fp32")
    token_budget: int = Field(
        4096,
        ge=16,
        description="tokens in one forward pass, gradients of several are accumulated; longer rollouts are refused",
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, about a third more computing"
    )
    ranks: int = Field(1, ge=1, description="processes, one per device, that share each step and the model's state")
    threads: int = Field(0, ge=0, description="CPU threads of torch in each rank; 0 = torch's choice")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, …; several ranks take one cuda device each")
    group_deadline: float = Field(60.0, gt=0, description="seconds from a group's first rollout until it is closed")
    straggler_seconds: float = Field(
        30.0, ge=0, description="longest wait of a step for a group that it would make too stale; then it is dropped"
    )
    task_deadline: float = Field(
        300.0, gt=0, description="seconds from the first sign that nobody works on a task until it is given up"
    )
    keep_versions: int = Field(4, ge=2, description="weight versions kept in the store")
    keyframe_every: int = Field(
        100,
        ge=1,
        le=1000,  # every version's message names its whole chain
        description="a version is stored whole at least that often; those between as patches of the one before",
    )
    checkpoint_every: int = Field(10, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="checkpoints kept on disk")

    def task_pools(self) -> set[str]:
        """See `Section.task_pools`."""
        return {self.pool}
