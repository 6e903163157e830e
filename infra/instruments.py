"""What this project measures: the messaging conventions' metrics and its own under `tailrace.*`.

Every function records on the process's meter provider, and does nothing while none is set.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from opentelemetry import metrics

SCOPE = "tailrace"
DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
LONG_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
REWARD_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


# The API's proxies turn into real instruments once a provider is set, so caching them before `setup` is safe.
@cache
def counter(name: str, unit: str, description: str) -> metrics.Counter:
    """The process's counter of that name."""
    return metrics.get_meter(SCOPE).create_counter(name, unit, description)


@cache
def gauge(name: str, unit: str, description: str) -> Any:
    """The process's gauge of that name."""
    return metrics.get_meter(SCOPE).create_gauge(name, unit, description)


@cache
def up_down_counter(name: str, unit: str, description: str) -> metrics.UpDownCounter:
    """The process's sum of that name, to which negative amounts may be added."""
    return metrics.get_meter(SCOPE).create_up_down_counter(name, unit, description)


@cache
def histogram(name: str, unit: str, description: str, buckets: tuple[float, ...]) -> metrics.Histogram:
    """The process's histogram of that name; `buckets` are upper bounds in its unit."""
    return metrics.get_meter(SCOPE).create_histogram(
        name, unit, description, explicit_bucket_boundaries_advisory=buckets
    )


def messaging_attributes(template: str, operation: str) -> dict[str, Any]:
    """The conventions' attributes of an operation (send, receive, process) on a subject template."""
    return {
        "messaging.system": "nats",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.template": template,
    }


def operation(template: str, name: str, seconds: float, error: str | None = None, count: int = 1) -> None:
    """One operation on a subject template took `seconds` for `count` messages; `error`: the class of what it raised."""
    labels = messaging_attributes(template, name) | ({"error.type": error} if error else {})
    if name == "process":
        metric, description = "messaging.process.duration", "Time of processing one message or batch"
    else:
        metric, description = "messaging.client.operation.duration", "Time of one client operation"
    histogram(metric, "s", description, DURATION_BUCKETS).record(seconds, labels)
    if name == "send":
        counter("messaging.client.sent.messages", "{message}", "Messages a producer tried to send").add(count, labels)


def consumed(template: str, count: int, consumer: str = "") -> None:
    """`count` messages were delivered to the application by the durable `consumer`."""
    labels = messaging_attributes(template, "receive") | (
        {"messaging.consumer.group.name": consumer} if consumer else {}
    )
    counter("messaging.client.consumed.messages", "{message}", "Messages delivered").add(count, labels)


def dropped(template: str) -> None:
    """A message that is not stored anywhere could not be used."""
    counter("tailrace.messages.dropped", "{message}", "Messages that could not be used and are lost").add(
        1, {"messaging.destination.template": template}
    )


def staleness(versions: int) -> None:
    """Learner version at consumption minus version of a rollout's oldest token."""
    histogram("tailrace.policy.staleness", "{version}", "Age of a trained rollout", STALENESS_BUCKETS).record(versions)


def learner_idle(ratio: float) -> None:
    """Share of wall time since the first training task in which the learner did not compute."""
    gauge("tailrace.learner.idle_ratio", "1", "Share of time not spent computing").set(ratio)


def target(groups: int) -> None:
    """Groups that the learner's load controller lets be under way."""
    gauge("tailrace.learner.target", "{group}", "Groups that may be under way").set(groups)


def generator_idle(ratio: float) -> None:
    """Share of wall time since the first training task in which the engine had nothing to compute."""
    gauge("tailrace.generator.idle_ratio", "1", "Share of time not spent computing").set(ratio)


def reward(value: float, environment: str) -> None:
    """Reward of one scored rollout."""
    histogram("tailrace.rollout.reward", "1", "Reward of a scored rollout", REWARD_BUCKETS).record(
        value, {"tailrace.environment": environment}
    )


def queue_age(template: str, seconds: float) -> None:
    """Time a message lay on its subject before it was taken."""
    histogram("tailrace.queue.age", "s", "Time a message waited to be taken", LONG_BUCKETS).record(
        seconds, {"messaging.destination.template": template}
    )


def discarded(count: int, reason: str) -> None:
    """Rollouts that became no gradient."""
    counter("tailrace.discarded", "{rollout}", "Rollouts that became no gradient").add(
        count, {"tailrace.reason": reason}
    )


def weights(count: int, direction: str) -> None:
    """Bytes of weights moved; `direction` is publish or load."""
    counter("tailrace.weights.bytes", "By", "Weight bytes moved").add(count, {"tailrace.direction": direction})


def weights_applied(seconds: float) -> None:
    """Time from a policy's announcement until the engine samples with it."""
    histogram("tailrace.weights.apply_seconds", "s", "Time to take over a policy", LONG_BUCKETS).record(seconds)
