"""What every service measures: the messaging conventions' metrics, queues and weights under `tailrace.*`.

Every function records on the process's meter provider, and does nothing while none is set. What one service alone
measures is in its own `instruments`, made of the instruments here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from opentelemetry import metrics

SCOPE = "tailrace"
DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
LONG_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


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


def queue_age(template: str, seconds: float) -> None:
    """Time a message lay on its subject before it was taken."""
    histogram("tailrace.queue.age", "s", "Time a message waited to be taken", LONG_BUCKETS).record(
        seconds, {"messaging.destination.template": template}
    )


def weights(count: int, direction: str) -> None:
    """Bytes of weights moved; `direction` is publish or load."""
    counter("tailrace.weights.bytes", "By", "Weight bytes moved").add(count, {"tailrace.direction": direction})
