"""The catalogue of subjects, streams and durable consumers, as data.

Streams and consumers are created from it, the AsyncAPI document and the reference are generated from it, and services
build subject names through it: nothing else spells a subject.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from contracts import messages as m

TOKEN = re.compile(r"[a-z0-9-]+")

MIB = 1024 * 1024
HOUR = 3600.0


@dataclass(frozen=True)
class Stream:
    """A JetStream stream. Sizes in bytes, times in seconds; `discard="new"` pushes back on the publisher when full."""

    name: str
    subjects: tuple[str, ...]
    retention: Literal["limits", "workqueue"]
    discard: Literal["new", "old"]
    max_bytes: int
    max_age: float
    description: str
    duplicate_window: float = 600.0
    max_per_subject: int = -1


@dataclass(frozen=True)
class Channel:
    """A subject template: its stream, its contract, who publishes and who consumes.

    Without a stream it is a core NATS subject: what is published there reaches whoever listens now, at most once.
    """

    name: str
    template: str
    stream: str  # empty = core NATS
    message: type[m.Message]
    publishers: tuple[str, ...]
    consumers: tuple[str, ...]
    description: str

    @property
    def stored(self) -> bool:
        """Whether a stream keeps what is published here."""
        return bool(self.stream)

    def subject(self, **tokens: str) -> str:
        """Fill the template. Raises `ValueError` on a token that is missing, unknown or not `[a-z0-9-]+`."""
        missing = [name for name in self.parameters if name not in tokens]
        if missing:
            raise ValueError(f"{self.name}: no value for {', '.join(missing)} in {self.template}")
        return self.filter(**tokens)

    def filter(self, **tokens: str) -> str:
        """The template with `*` for every token not given: what a consumer filters by. Raises `ValueError` likewise."""
        for name, value in tokens.items():
            if name not in self.parameters:
                raise ValueError(f"{self.name}: there is no {name} in {self.template}")
            if not TOKEN.fullmatch(value):
                raise ValueError(f"{self.name}: {name}={value!r} is not a subject token of lower-case [a-z0-9-]")
        return self.template.format(**{name: tokens.get(name, "*") for name in self.parameters})

    @property
    def parameters(self) -> list[str]:
        """Names of the template's tokens, in order."""
        return re.findall(r"{(\w+)}", self.template)


@dataclass(frozen=True)
class Durable:
    """A durable pull consumer that bootstrap creates per run; one work-queue subject has exactly one."""

    template: str
    channel: Channel
    ack_wait: float = 30.0  # seconds; workers extend it with in_progress every third of it
    max_deliver: int = 5  # a handler that fails at this delivery, or later, makes the message a dead letter
    max_ack_pending: int = 1024  # bounds what all workers together hold

    def name(self, **tokens: str) -> str:
        """The consumer's name, e.g. `demo-train-default`."""
        return self.template.format(**tokens)


STREAMS: tuple[Stream, ...] = (
    Stream(
        "TASKS", ("tailrace.v1.*.task.>",), "workqueue", "new", 64 * MIB, 24 * HOUR,
        "Prompts waiting for a generator. Full means back-pressure on who publishes.",
    ),
    Stream(
        "ROLLOUTS", ("tailrace.v1.*.rollout.>",), "limits", "old", 4096 * MIB, 24 * HOUR,
        "Sampled and scored sequences, for any number of readers.",
    ),
    Stream(
        "EVENTS", ("tailrace.v1.*.discard", "tailrace.v1.*.step", "tailrace.v1.*.generator", "tailrace.v1.*.heartbeat"),
        "limits", "old", 512 * MIB, 24 * HOUR,
        "Reports of the services: steps, discards, generator time, heartbeats.",
    ),
    Stream(
        "POLICY", ("tailrace.v1.*.policy.>",), "limits", "old", 64 * MIB, 7 * 24 * HOUR,
        "Which policy versions exist.",
    ),
    Stream(
        "WEIGHTS", ("tailrace.v1.*.weights.*",), "limits", "new", 32 * 1024 * MIB, 7 * 24 * HOUR,
        "Weights, whole or as patches, and bundles: chunks, manifest last. Old versions are purged by the learner.",
    ),
    Stream(
        "BLOBS", ("tailrace.v1.*.blob.*",), "limits", "old", 4096 * MIB, 24 * HOUR,
        "Bodies of messages above the server's payload limit, in chunks, manifest last.",
    ),
    Stream(
        "ROUTES", ("tailrace.v1.*.route.*", "tailrace.v1.*.feedback"), "limits", "old", 1024 * MIB, 7 * 24 * HOUR,
        "Where requests were sent, what they cost, and what was said about the answers.",
    ),
    Stream(
        "DLQ", ("tailrace.v1.dlq.letter.*",), "limits", "old", 256 * MIB, 7 * 24 * HOUR,
        "Messages that could not be used, with the reason.",
    ),
)  # fmt: skip

SERVICES = ("learner", "generator", "router", "analyzer")

TASK = Channel(
    "task", "tailrace.v1.{run}.task.{purpose}.{pool}", "TASKS", m.Task,
    ("learner", "router", "analyzer"), ("generator",), "One prompt to sample a group for.",
)  # fmt: skip
ROLLOUT = Channel(
    "rollout", "tailrace.v1.{run}.rollout.{purpose}", "ROLLOUTS", m.Rollout,
    ("generator",), ("learner", "analyzer", "downstream"), "One sampled and scored sequence.",
)  # fmt: skip
DISCARD = Channel(
    "discard", "tailrace.v1.{run}.discard", "EVENTS", m.Discard,
    ("learner",), ("analyzer", "downstream"), "Rollouts that became no gradient, and why.",
)  # fmt: skip
STEP = Channel(
    "step", "tailrace.v1.{run}.step", "EVENTS", m.StepReport,
    ("learner",), ("all",), "What one optimizer step consumed and did.",
)  # fmt: skip
GENERATOR = Channel(
    "generator", "tailrace.v1.{run}.generator", "EVENTS", m.GeneratorReport,
    ("generator",), ("all",), "How a generator spent its time.",
)  # fmt: skip
HEARTBEAT = Channel(
    "heartbeat", "tailrace.v1.{run}.heartbeat", "EVENTS", m.Heartbeat,
    SERVICES, ("all",), "A service's sign of life.",
)  # fmt: skip
POLICY_PUBLISHED = Channel(
    "policy.published", "tailrace.v1.{run}.policy.published", "POLICY", m.PolicyVersion,
    ("learner",), ("generator", "router", "analyzer"), "A policy that can be loaded now.",
)  # fmt: skip
POLICY_PROMOTED = Channel(
    "policy.promoted", "tailrace.v1.{run}.policy.promoted", "POLICY", m.Promotion,
    ("analyzer", "operators"), ("generator", "router", "analyzer"), "Which policy serves production from now on.",
)  # fmt: skip
TOKENS = Channel(
    "tokens", "tailrace.v1.{run}.tokens.{reply}", "", m.Tokens,
    ("generator",), ("router",), "Completions as they are sampled, for whoever published the task.",
)  # fmt: skip
CANCEL = Channel(
    "cancel", "tailrace.v1.{run}.cancel", "", m.Cancel,
    ("router",), ("generator",), "Nobody waits for a task any more.",
)  # fmt: skip
WEIGHTS = Channel(
    "weights", "tailrace.v1.{run}.weights.{digest}", "WEIGHTS", m.BlobManifest,
    ("learner",), ("generator",), "Raw chunks of one blob, then its manifest.",
)  # fmt: skip
BLOB = Channel(
    "blob", "tailrace.v1.{run}.blob.{digest}", "BLOBS", m.BlobManifest,
    ("all",), ("all",), "Raw chunks of one oversized message body, then its manifest.",
)  # fmt: skip
ROUTE_REQUEST = Channel(
    "route.request", "tailrace.v1.{run}.route.request", "ROUTES", m.RouteRequest,
    ("downstream",), ("router",), "Where should this request go? Answered by a decision.",
)  # fmt: skip
ROUTE_DECISION = Channel(
    "route.decision", "tailrace.v1.{run}.route.decision", "ROUTES", m.RouteDecision,
    ("router",), ("analyzer", "downstream"), "Where a request or subtask was sent, and why.",
)  # fmt: skip
ROUTE_OUTCOME = Channel(
    "route.outcome", "tailrace.v1.{run}.route.outcome", "ROUTES", m.RouteOutcome,
    ("router",), ("router", "learner", "analyzer", "downstream"), "What a request cost and how it ended.",
)  # fmt: skip
FEEDBACK = Channel(
    "feedback", "tailrace.v1.{run}.feedback", "ROUTES", m.Feedback,
    ("router", "downstream"), ("router", "learner", "analyzer"), "What became of an answer in the world.",
)  # fmt: skip
DLQ = Channel(
    "dlq", "tailrace.v1.dlq.letter.{stream}", "DLQ", m.DeadLetter,
    ("all",), ("operators",), "A message that could not be used, with the reason.",
)  # fmt: skip

CHANNELS: tuple[Channel, ...] = (
    TASK, ROLLOUT, DISCARD, STEP, GENERATOR, HEARTBEAT, POLICY_PUBLISHED, POLICY_PROMOTED, WEIGHTS, BLOB,
    TOKENS, CANCEL,
    ROUTE_REQUEST, ROUTE_DECISION, ROUTE_OUTCOME, FEEDBACK, DLQ,
)  # fmt: skip

TASK_WORKERS = Durable("{run}-{purpose}-{pool}", TASK)
ROUTE_WORKERS = Durable("{run}-route", ROUTE_REQUEST)  # several routers share the requests: each is answered once

DURABLES: tuple[Durable, ...] = (TASK_WORKERS, ROUTE_WORKERS)

# Two key-value buckets: facts that stay, and leases that expire unless renewed.
KV_BUCKET = "tailrace"
KV_LEASES = "tailrace-leases"
LEASE_TTL = 15.0  # seconds without a renewal until a lease is free again
