"""The messages on the bus: one struct per message, one comment per wire field.

Rules of evolution, checked against committed golden messages: within a major version a field is never removed, renamed
or retyped, and a new field has a default. Vocabularies (`purpose`, `outcome`, `finish`, `reason`, `state`) are open
strings: the constants below are what this version writes, readers accept others.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec
import numpy as np

from contracts.errors import InvalidMessage
from contracts.tensors import Tensor


class Purpose(StrEnum):
    """Why a task is sampled."""

    TRAIN = "train"
    EVAL = "eval"
    SERVE = "serve"


class Split(StrEnum):
    """Which side of an environment's content-hash split an item comes from; no item is on both."""

    TRAIN = "train"
    HELDOUT = "heldout"


class Outcome(StrEnum):
    """What the verifier said. Only `ok` and `wrong` are statements about the answer; the rest carry no reward or 0."""

    OK = "ok"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TRUNCATED = "truncated"
    VERIFIER_TIMEOUT = "verifier_timeout"
    VERIFIER_ERROR = "verifier_error"


class Finish(StrEnum):
    """Why sampling of a completion ended."""

    STOP = "stop"  # a stop string or the end-of-sequence token
    LENGTH = "length"  # max_tokens or the engine's context window


class Reason(StrEnum):
    """Why a task's rollouts did not become a gradient."""

    STALE = "stale"  # older than the staleness bound at consumption
    LOST_POLICY = "lost_policy"  # sampled by a version that a restarted learner no longer has
    UNSCORED = "unscored"  # the verifier gave no reward
    ZERO_ADVANTAGE = "zero_advantage"  # every reward of the group is the same; the group counts towards its batch
    GROUP_INCOMPLETE = "group_incomplete"  # the group's deadline passed with fewer than two scored rollouts
    TASK_EXPIRED = "task_expired"  # no rollout arrived within the task's deadline
    LATE = "late"  # arrived after its group was closed
    DUPLICATE = "duplicate"  # this rollout id was consumed before
    OVER_BUDGET = "over_budget"  # longer than one training micro-batch may be
    UNKNOWN_TASK = "unknown_task"  # no learner of this run published its task


class Message(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """Base of every message: a map with `type` (wire tag), `v` (major version) and the fields below."""

    MAJOR: ClassVar[int] = 1

    v: int = 1  # major version; equals the version in the subject

    def check(self) -> None:
        """Raise `InvalidMessage` where the fields contradict each other."""


class PolicyRef(msgspec.Struct, frozen=True, order=True):
    """Which weights: no two different contents ever share a reference."""

    generation: int  # how often a learner has started on this run; older generations are refused
    version: int  # optimizer steps since the run's first policy
    digest: str  # sha256 of the weight bytes, lowercase hex


class Sampling(msgspec.Struct, frozen=True):
    """How completions are sampled. The recorded log-probs are those of exactly this distribution."""

    max_tokens: int  # sampled tokens per completion, at most
    temperature: float = 1.0  # 0 = greedy, recorded log-probs are then 0
    top_p: float = 1.0  # nucleus mass, 1 = off
    top_k: int = 0  # 0 = off
    stop: list[str] = []  # a completion ends with the token that completes one of these strings
    # the token that completes a stop string is part of the completion: the policy chose it


class Task(Message, frozen=True, tag="task"):
    """One prompt to sample a group for: learner, router or analyzer -> generators."""

    id: str  # unique in the run and the same when published again
    run: str  # run id, [a-z0-9-]+
    purpose: str  # Purpose
    environment: str  # registered environment, e.g. quick-facts, gym:basic_arithmetic, jsonl:/data/questions.jsonl
    seed: int  # >= 0; with environment and split it determines the prompt and the answer
    group_size: int  # completions to sample, >= 1
    sampling: Sampling
    split: str = Split.TRAIN  # Split
    generation: int = 0  # learner generation that published the task
    min_version: int = 0  # a generator samples with this version of that generation, or newer, never older
    issued_ns: int = 0  # unix time in ns when first published

    def check(self) -> None:
        if self.group_size < 1 or self.seed < 0 or self.sampling.max_tokens < 1:
            raise InvalidMessage(f"task {self.id}: group_size and max_tokens must be >= 1 and seed >= 0")
        if not (0.0 <= self.sampling.temperature < 100.0 and 0.0 < self.sampling.top_p <= 1.0):
            raise InvalidMessage(f"task {self.id}: temperature must be in [0, 100) and top_p in (0, 1]")
        if self.sampling.top_k < 0:
            raise InvalidMessage(f"task {self.id}: top_k must be >= 0")


class PolicySegment(msgspec.Struct, frozen=True):
    """A stretch of sampled tokens that one policy produced; it ends where the next one starts."""

    start: int  # index into `tokens` of the first token of the segment
    policy: PolicyRef


class Rollout(Message, frozen=True, tag="rollout"):
    """One sampled and scored sequence: generators -> learner, analyzer, downstream.

    One flat token sequence of length T: prompt, sampled tokens, later tool results, interleaved.
    """

    id: str  # {task_id}.{index}: the same when the task is done again
    task_id: str
    index: int  # position in the group, 0 .. group_size - 1
    group_size: int
    run: str
    purpose: str  # Purpose
    environment: str
    split: str  # Split
    item: str  # content hash of the prompt and its answer: pairs rollouts of different versions
    tokens: Tensor  # int32 [T]
    loss_mask: Tensor  # uint8 [T], 1 where the policy sampled the token
    logprobs: Tensor  # float32 [T], natural log under the distribution sampled (behaviour policy), 0 where not sampled
    temperatures: Tensor  # float32 [T], temperature the token was sampled at, 0 where not sampled
    prompt_length: int  # tokens before the first sampled one
    segments: list[PolicySegment]  # ascending by start; the first starts at prompt_length
    sampling: Sampling
    finish: str  # Finish
    outcome: str  # Outcome
    reward: float | None  # None = the verifier gave no score, never a stand-in for 0
    reward_parts: dict[str, float]  # named components of the reward
    completion: str  # decoded sampled text, lone surrogates replaced
    generator: str  # instance that sampled it
    issued_ns: int  # unix ns: the task was first published
    started_ns: int  # unix ns: sampling began
    finished_ns: int  # unix ns: scored
    sanitised: bool = False  # True where text had to be changed to be valid UTF-8
    teacher_tokens: Tensor | None = None  # int32 [S], the self-distillation teacher's context, where asked for

    def check(self) -> None:
        where = f"rollout {self.id}"
        length = self.tokens.shape[0] if len(self.tokens.shape) == 1 else -1
        expected = (("tokens", "int32"), ("loss_mask", "uint8"), ("logprobs", "float32"), ("temperatures", "float32"))
        for name, dtype in expected:
            tensor: Tensor = getattr(self, name)
            tensor.check(f"{where}: {name}")
            if tensor.dtype != dtype or tensor.shape != [length]:
                raise InvalidMessage(f"{where}: {name} must be {dtype} [{length}], got {tensor.dtype} {tensor.shape}")
        if not 1 <= self.prompt_length < length:
            raise InvalidMessage(f"{where}: prompt_length {self.prompt_length} is not inside 1..{length - 1}")
        starts = [segment.start for segment in self.segments]
        if not starts or starts[0] != self.prompt_length or starts != sorted(set(starts)) or starts[-1] >= length:
            raise InvalidMessage(f"{where}: policy segments {starts} do not cover {self.prompt_length}..{length}")
        if not (0 <= self.index < self.group_size):
            raise InvalidMessage(f"{where}: index {self.index} is outside a group of {self.group_size}")
        logprobs = self.logprobs.array()
        if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
            raise InvalidMessage(f"{where}: log-probs must be finite and not above 0")
        if not np.isfinite(self.temperatures.array()).all():
            raise InvalidMessage(f"{where}: temperatures must be finite")
        if self.tokens.array().min() < 0 or self.loss_mask.array().max() > 1:
            raise InvalidMessage(f"{where}: token ids must be >= 0 and the loss mask 0 or 1")
        if self.loss_mask.array()[: self.prompt_length].any():
            raise InvalidMessage(f"{where}: the loss mask covers prompt tokens")
        numbers = [*self.reward_parts.values(), *([] if self.reward is None else [self.reward])]
        if not np.isfinite(numbers).all():
            raise InvalidMessage(f"{where}: rewards must be finite")

    @property
    def oldest(self) -> PolicyRef:
        """The policy of the oldest sampled token: staleness is counted from it."""
        return min(segment.policy for segment in self.segments)


class Discard(Message, frozen=True, tag="discard"):
    """Rollouts, or a whole task, that became no gradient, and why: learner -> analyzer, downstream."""

    run: str
    task_id: str
    rollout_ids: list[str]  # empty when no rollout of the task ever arrived
    reason: str  # Reason
    detail: str  # one sentence with the figures behind the reason
    generation: int  # of the learner that decided
    version: int  # learner version at the decision
    at_ns: int  # unix ns


class TensorSpec(msgspec.Struct, frozen=True):
    """Where one tensor lies in a policy's bytes."""

    name: str  # the model's state-dict key
    dtype: str  # see contracts.tensors.ITEM_SIZES
    shape: list[int]
    offset: int  # bytes from the start; tensors are laid out back to back, in order


class BlobManifest(Message, frozen=True, tag="blob_manifest"):
    """Closes a chunked blob on its subject, after all of its chunks: whoever sees it can read all of it."""

    digest: str  # sha256 of the whole blob, lowercase hex; also the last token of the subject
    size: int  # bytes
    chunk_bytes: int  # size of every chunk but the last
    chunks: int  # how many chunk messages precede this one


class Claim(Message, frozen=True, tag="claim"):
    """Stands on a subject in place of a message above the server's payload limit; the body is in the blob store."""

    schema: str  # schema id of the message behind it, e.g. rollout/1
    digest: str  # sha256 of its encoded bytes: the blob's name
    size: int  # bytes


class PolicyVersion(Message, frozen=True, tag="policy_version"):
    """A policy that can be loaded now: learner -> generators, router, analyzer. Published after its weights."""

    run: str
    policy: PolicyRef
    tensors: list[TensorSpec]  # the layout of the weight blob named by policy.digest
    size: int  # bytes of the weight blob
    bundle: str  # digest of the blob with config and tokenizer: generators need nothing but the bus
    parent: PolicyRef | None  # the policy it was trained from; None for a generation's first
    published_ns: int  # unix ns

    def check(self) -> None:
        if any(spec.offset < 0 or spec.offset > self.size for spec in self.tensors):
            raise InvalidMessage(f"policy {self.policy.version}: a tensor lies outside the {self.size} weight bytes")


class StepReport(Message, frozen=True, tag="step_report"):
    """What one optimizer step consumed and did: learner -> all."""

    run: str
    policy: PolicyRef  # the policy the step produced
    step: int  # = policy.version
    rollout_ids: list[str]  # rollouts consumed, R of them
    staleness: list[int]  # [R] learner version at consumption minus version of the oldest token
    rewards: list[float]  # [R]
    groups: int  # groups consumed, those with zero advantage included
    zero_advantage_groups: int  # groups that gave no gradient
    tokens: int  # sampled tokens trained on
    loss: float
    grad_norm: float  # before clipping
    learning_rate: float
    metrics: dict[str, float]  # objective's own: mismatch_kl, clip_fraction, effective_sample_size, ...
    seconds: dict[str, float]  # wall seconds of this step by state: wait_for_batch, train, publish, checkpoint
    wall_seconds: float  # since the first training task of this learner process
    idle_seconds: float  # of wall_seconds, not spent computing
    staleness_bound: int  # the setting in force
    outstanding: int  # tasks published and not yet trained or dropped
    at_ns: int  # unix ns


class GeneratorReport(Message, frozen=True, tag="generator_report"):
    """How a generator spent its time; counters run from the start of the process: generators -> all."""

    run: str
    generator: str  # instance
    generation: int  # of the loaded policy
    version: int  # of the loaded policy
    seconds: dict[str, float]  # wall seconds by state since the first training task: busy, idle, load
    wall_seconds: float  # since the first training task of this process
    idle_seconds: float  # of wall_seconds, the engine had nothing to compute
    tokens: int  # sampled tokens so far
    rollouts: int  # published so far
    outcomes: dict[str, int]  # rollouts by Outcome
    inflight: int  # completions being sampled now
    at_ns: int  # unix ns


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """A service's sign of life, every few seconds: all services -> all."""

    run: str
    service: str  # generator, learner, ...
    instance: str
    state: str  # starting, ready, draining, stopped
    detail: str  # one sentence for people
    started_ns: int  # unix ns: process start
    at_ns: int  # unix ns


class DeadLetter(Message, frozen=True, tag="dead_letter"):
    """A message that could not be used, kept for operators: any consumer -> operators."""

    stream: str  # where it lay
    subject: str
    sequence: int  # stream sequence
    consumer: str  # who gave up on it
    code: str  # machine-readable: malformed, invalid, unknown_version, max_deliveries, ...
    reason: str  # one sentence
    headers: dict[str, str]  # as received
    payload: bytes  # first bytes of the body
    size: int  # bytes of the whole body
    deliveries: int  # how often it was tried
    at_ns: int  # unix ns


MESSAGES: tuple[type[Message], ...] = (
    Task,
    Rollout,
    Discard,
    BlobManifest,
    Claim,
    PolicyVersion,
    StepReport,
    GeneratorReport,
    Heartbeat,
    DeadLetter,
)
