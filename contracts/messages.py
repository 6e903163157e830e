"""The messages on the bus: one struct per message, one comment per wire field.

The comments are the descriptions in the JSON Schemas and the AsyncAPI document. Rules of evolution, checked against the
committed lock and golden messages: within a major version a field is never removed, renamed or retyped, and a new field
has a default. No number on the wire is NaN or infinite. Vocabularies (`purpose`, `outcome`, `finish`, `reason`,
`state`) are open strings: the constants below are what this version writes, readers accept others.

Here are tasks, rollouts and reports; policies, serving and routing have modules of their own. `MESSAGES` has them all.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from contracts.base import Digest, Message, Nat, PolicyRef, Positive, Token, TokenOrNone, require_finite
from contracts.errors import InvalidMessage
from contracts.policies import PolicyVersion, Promotion
from contracts.routing import Feedback, RouteDecision, RouteOutcome, RouteRequest
from contracts.serving import Cancel, Tokens
from contracts.tensors import ITEM_SIZES, Tensor


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
    PENDING = "pending"  # an answer to a user: nobody has judged it yet


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
    FOREIGN_TOKENS = "foreign_tokens"  # token ids that the learner's model does not have
    OVER_BUDGET = "over_budget"  # longer than one training micro-batch may be
    UNKNOWN_TASK = "unknown_task"  # no learner of this run published its task


class Sampling(msgspec.Struct, frozen=True):
    """How completions are sampled. The recorded log-probs are those of exactly this distribution."""

    max_tokens: Positive  # sampled tokens per completion, at most
    temperature: Annotated[float, Meta(ge=0, lt=100)] = 1.0  # 0 = greedy, recorded log-probs are then 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # nucleus mass, 1 = off
    top_k: Nat = 0  # how many of the likeliest tokens may be sampled, 0 = off
    stop: list[str] = []  # a completion ends with, and includes, the token that completes one of these


class Turn(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str  # system, user, assistant or tool
    content: str  # text; empty where an assistant only calls tools
    tool_calls: str = ""  # of an assistant: JSON array of OpenAI's tool calls; empty = none
    tool_call_id: str = ""  # of a tool's result: the call that it answers


class Task(Message, frozen=True, tag="task"):
    """One prompt to sample a group for: learner, router or analyzer -> generators."""

    id: str  # unique in the run and the same when published again
    run: Token  # run id, a token of the subject
    purpose: str  # Purpose
    environment: str  # registered environment, e.g. quick-facts, gym:basic_arithmetic, jsonl:/data/questions.jsonl
    seed: Nat  # with environment and split it determines the prompt and the answer
    group_size: Positive  # completions to sample
    sampling: Sampling  # how to sample them
    split: str = Split.TRAIN  # Split
    generation: Nat = 0  # learner generation that published the task
    min_version: Nat = 0  # a generator samples with this version of that generation, or newer, never older
    issued_ns: Nat = 0  # unix ns: first published
    turns: list[Turn] = []  # the conversation to go on with, for tasks from traffic; the seed is then the sampling's
    tools: str = ""  # JSON array of OpenAI's tool definitions, for the chat template; empty = none
    reply: TokenOrNone = ""  # token of the subject that the sampled tokens are streamed to; empty = nobody listens
    deadline_ns: Nat = 0  # unix ns after which nobody waits for the answer; 0 = without limit


class PolicySegment(msgspec.Struct, frozen=True):
    """A stretch of sampled tokens that one policy produced; it ends where the next one starts."""

    start: Nat  # index into `tokens` of the first token of the segment
    policy: PolicyRef  # the weights that sampled the segment


class Rollout(Message, frozen=True, tag="rollout"):
    """One sampled and scored sequence: generators -> learner, analyzer, downstream.

    One flat token sequence of length T: prompt, sampled tokens, later tool results, interleaved.
    """

    id: str  # {task_id}.{index}: the same when the task is done again
    task_id: str  # the task it answers
    index: Nat  # position in the group, 0 .. group_size - 1
    group_size: Positive  # completions of the task
    run: Token  # run id
    purpose: str  # Purpose
    environment: str  # of the task
    split: str  # Split
    item: str  # content hash of the prompt and its answer: pairs rollouts of different versions
    tokens: Tensor  # int32 [T]
    loss_mask: Tensor  # uint8 [T], 1 where the policy sampled the token
    logprobs: Tensor  # float32 [T], natural log under the distribution sampled (behaviour policy), 0 where not sampled
    temperatures: Tensor  # float32 [T], temperature the token was sampled at, 0 where not sampled
    prompt_length: Positive  # tokens before the first sampled one
    segments: list[PolicySegment]  # ascending by start; the first starts at prompt_length
    sampling: Sampling  # of the task
    finish: str  # Finish
    outcome: str  # Outcome
    reward: float | None  # None = the verifier gave no score, never a stand-in for 0
    reward_parts: dict[str, float]  # named components of the reward
    completion: str  # decoded sampled text, lone surrogates replaced
    generator: str  # instance that sampled it
    issued_ns: Nat  # unix ns: the task was first published
    started_ns: Nat  # unix ns: sampling began
    finished_ns: Nat  # unix ns: scored
    sanitised: bool = False  # True where text had to be changed to be valid UTF-8
    teacher_tokens: Tensor | None = None  # int32 [S], the self-distillation teacher's context, where asked for

    def check(self) -> None:
        where = f"rollout {self.id}"
        if self.index >= self.group_size or self.id != f"{self.task_id}.{self.index}":
            raise InvalidMessage(f"{where}: is not member {self.index} of {self.group_size} of task {self.task_id}")
        length = self.tokens.shape[0] if self.tokens.shape else 0
        _check_vector(where, "tokens", self.tokens, "int32", length)
        _check_vector(where, "loss_mask", self.loss_mask, "uint8", length)
        _check_vector(where, "logprobs", self.logprobs, "float32", length)
        _check_vector(where, "temperatures", self.temperatures, "float32", length)
        if not 1 <= self.prompt_length < length:
            raise InvalidMessage(f"{where}: prompt_length {self.prompt_length} is not inside 1..{length - 1}")
        starts = [segment.start for segment in self.segments]
        if not starts or starts[0] != self.prompt_length or starts != sorted(set(starts)) or starts[-1] >= length:
            raise InvalidMessage(f"{where}: policy segments {starts} do not cover {self.prompt_length}..{length}")
        # Reductions and comparisons written so that NaN fails them.
        if np.minimum.reduce(self.tokens.array()) < 0:
            raise InvalidMessage(f"{where}: token ids must be >= 0")
        if np.maximum.reduce(self.loss_mask.array()) > 1 or self.loss_mask.data.find(1) != self.prompt_length:
            raise InvalidMessage(f"{where}: the loss mask must be 0 or 1, and first 1 at {self.prompt_length}")
        logprobs = self.logprobs.array()
        if not (np.minimum.reduce(logprobs) > -np.inf and np.maximum.reduce(logprobs) <= 1e-3):
            raise InvalidMessage(f"{where}: log-probs must be finite and not above 0")
        temperatures = self.temperatures.array()
        if not (np.minimum.reduce(temperatures) >= 0 and np.maximum.reduce(temperatures) < np.inf):
            raise InvalidMessage(f"{where}: temperatures must be finite and not below 0")
        require_finite(f"{where}: reward", [*self.reward_parts.values(), self.reward or 0.0])
        if self.teacher_tokens is not None:
            context = self.teacher_tokens
            _check_vector(where, "teacher_tokens", context, "int32", context.shape[0] if context.shape else 0)
            if np.minimum.reduce(context.array(), initial=0) < 0:
                raise InvalidMessage(f"{where}: teacher token ids must be >= 0")

    @property
    def oldest(self) -> PolicyRef:
        """The policy of the oldest sampled token: staleness is counted from it."""
        return min(segment.policy for segment in self.segments)


def _check_vector(where: str, name: str, tensor: Tensor, dtype: str, length: int) -> None:
    if tensor.dtype != dtype or tensor.shape != [length] or len(tensor.data) != length * ITEM_SIZES[dtype]:
        tensor.check(f"{where}: {name}")
        raise InvalidMessage(f"{where}: {name} must be {dtype} [{length}], got {tensor.dtype} {tensor.shape}")


class Discard(Message, frozen=True, tag="discard"):
    """Rollouts, or a whole task, that became no gradient, and why: learner -> analyzer, downstream."""

    run: Token  # run id
    task_id: str  # the task the rollouts answer
    rollout_ids: list[str]  # empty when no rollout of the task ever arrived
    reason: str  # Reason
    detail: str  # one sentence with the figures behind the reason
    generation: Nat  # of the learner that decided
    version: Nat  # learner version at the decision
    at_ns: Nat  # unix ns


class BlobManifest(Message, frozen=True, tag="blob_manifest"):
    """Closes a chunked blob on its subject, after all of its chunks: whoever sees it can read all of it."""

    digest: Digest  # sha256 of the whole blob, lowercase hex; also the last token of the subject
    size: Nat  # bytes
    chunk_bytes: Positive  # size of every chunk but the last
    chunks: Nat  # distinct chunks; they precede this message in any order, some perhaps more than once

    def check(self) -> None:
        if self.chunks != -(-self.size // self.chunk_bytes):
            raise InvalidMessage(f"blob {self.digest}: {self.size} bytes are not {self.chunks} x {self.chunk_bytes}")


class Claim(Message, frozen=True, tag="claim"):
    """Stands on a subject in place of a message above the server's payload limit; the body is in the blob store."""

    schema: str  # schema id of the message behind it, e.g. rollout/1
    digest: Digest  # sha256 of its encoded bytes: the blob's name
    size: Nat  # bytes


class StepReport(Message, frozen=True, tag="step_report"):
    """What one optimizer step consumed and did: learner -> all."""

    run: Token  # run id
    policy: PolicyRef  # the policy the step produced
    step: Nat  # = policy.version
    rollout_ids: list[str]  # rollouts consumed, R of them
    staleness: list[int]  # [R] learner version at consumption minus version of the oldest token
    rewards: list[float]  # [R]
    groups: Nat  # groups consumed, those with zero advantage included
    zero_advantage_groups: Nat  # groups that gave no gradient
    tokens: Nat  # sampled tokens trained on
    loss: float  # of the objective, averaged as the objective defines
    grad_norm: float  # before clipping
    learning_rate: float  # of this step, warm-up included
    metrics: dict[str, float]  # objective's own: mismatch_kl, clip_fraction, effective_sample_size, ...
    seconds: dict[str, float]  # wall seconds of this step by state: wait_for_batch, wait_for_stragglers, train, ...
    wall_seconds: float  # since the first training task of this learner process
    idle_seconds: float  # of wall_seconds, not spent computing
    staleness_bound: Nat  # the setting in force
    outstanding: int  # tasks published and not yet trained or dropped
    at_ns: Nat  # unix ns
    target: Nat = 0  # groups the load controller lets be under way from this step on; 0 = not said

    def check(self) -> None:
        if not len(self.rollout_ids) == len(self.staleness) == len(self.rewards):
            raise InvalidMessage(f"step {self.step}: rollout_ids, staleness and rewards differ in length")
        measured = (self.loss, self.grad_norm, self.learning_rate, self.wall_seconds, self.idle_seconds)
        require_finite(f"step {self.step}", [*measured, *self.rewards, *self.metrics.values(), *self.seconds.values()])


class GeneratorReport(Message, frozen=True, tag="generator_report"):
    """How a generator spent its time; counters run from the start of the process: generators -> all."""

    run: Token  # run id
    generator: str  # instance
    generation: Nat  # of the loaded policy
    version: Nat  # of the loaded policy
    seconds: dict[str, float]  # wall seconds by state since the first training task, or request: busy, idle, load
    wall_seconds: float  # since the first training task, or request, of this process
    idle_seconds: float  # of wall_seconds, the engine had nothing to compute
    tokens: Nat  # sampled tokens so far
    rollouts: Nat  # published so far
    outcomes: dict[str, int]  # rollouts by Outcome; requests without an answer by cancelled, expired, refused, failed
    inflight: Nat  # completions being sampled now
    at_ns: Nat  # unix ns
    tasks: dict[str, Nat] = {}  # training tasks being worked on: id -> version loaded when sampling began
    role: str = "train"  # train = samples for the learner and for evaluation; serve = answers production requests

    def check(self) -> None:
        require_finite(f"generator {self.generator}", [self.wall_seconds, self.idle_seconds, *self.seconds.values()])


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """A service's sign of life, every few seconds: all services -> all."""

    run: Token  # run id
    service: str  # generator, learner, ...
    instance: str  # name of the process
    state: str  # starting, ready, draining, stopped
    detail: str  # one sentence for people
    started_ns: Nat  # unix ns: process start
    at_ns: Nat  # unix ns


class DeadLetter(Message, frozen=True, tag="dead_letter"):
    """A message that could not be used, kept for operators: any consumer -> operators."""

    stream: str  # where it lay
    subject: str  # it was published to
    sequence: Nat  # stream sequence
    consumer: str  # who gave up on it
    code: str  # machine-readable: malformed, invalid, unknown_version, max_deliveries, ...
    reason: str  # one sentence
    headers: dict[str, str]  # as received
    payload: bytes  # first bytes of the body
    size: Nat  # bytes of the whole body
    deliveries: Nat  # how often it was tried
    at_ns: Nat  # unix ns


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
    RouteRequest,
    RouteDecision,
    RouteOutcome,
    Feedback,
    Promotion,
    Tokens,
    Cancel,
)
