"""What the health endpoints say."""

from __future__ import annotations

import pytest

from infra.health import Health, respond


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_liveness_counts_from_the_first_readiness() -> None:
    clock = Clock()
    health = Health(60.0, clock)
    clock.now += 1000  # loading a model may take long
    assert health.liveness()[0]
    health.ready("")
    clock.now += 60
    assert health.liveness()[0]
    clock.now += 1
    assert not health.liveness()[0]
    health.beat()
    assert health.liveness()[0]


def test_readiness_needs_the_bus_and_the_service() -> None:
    health = Health(60.0, Clock())
    assert health.readiness(connected=True) == (False, "starting")
    health.ready("version 3")
    assert health.readiness(connected=True) == (True, "version 3")
    assert health.readiness(connected=False) == (False, "not connected to NATS")
    health.not_ready("draining")
    assert health.readiness(connected=True) == (False, "draining")


def test_a_service_that_does_not_need_the_bus_is_ready_without_and_says_so() -> None:
    health = Health(60.0, Clock(), needs_bus=False)
    assert health.readiness(connected=False) == (False, "starting; not connected to NATS")
    health.ready("answering")
    assert health.readiness(connected=False) == (True, "answering; not connected to NATS")
    assert health.readiness(connected=True) == (True, "answering")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /healthz HTTP/1.1", b"200"),
        (b"GET /readyz?verbose HTTP/1.1", b"503"),
        (b"HEAD /healthz HTTP/1.1", b"405"),
        (b"GET / HTTP/1.1", b"404"),
        (b"POST /healthz HTTP/1.1", b"405"),
        (b"\x16\x03\x01", b"405"),
        (b"", b"405"),
    ],
)
def test_respond(request_line: bytes, status: bytes) -> None:
    response = respond(request_line + b"\r\n\r\n", Health(60.0, Clock()), connected=True)
    assert response.startswith(b"HTTP/1.1 " + status)
