"""What is known of a request while it is answered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from router.admission.keys import EVERYONE
from router.admission.models import Asked
from router.admission.parse import parse
from router.record import Record

REQUEST = b'{"model": "auto", "messages": [{"role": "user", "content": "Hello"}]}'


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("router.record.time", SimpleNamespace(perf_counter=clock))
    return clock


def record() -> Record:
    return Record("run", parse(REQUEST), EVERYONE, Asked(0.1, frozenset({"a"})), started=10.0)


def test_overhead_is_the_time_in_which_no_pool_was_waited_for(clock: Clock) -> None:
    it = record()
    clock.now += 1
    with it.calling():  # a model makes the plan
        clock.now += 20
        assert it.overhead == 1
    clock.now += 2
    with it.calling():
        clock.now += 30
        with it.calling():  # another part, beside it
            clock.now += 30
        assert it.overhead == 3, "the first part still waits, also while the headers are written"
        clock.now += 30
    clock.now += 4
    assert it.overhead == 7


def test_a_call_that_fails_was_waited_for_too(clock: Clock) -> None:
    it = record()
    with pytest.raises(ZeroDivisionError), it.calling():
        clock.now += 5
        raise ZeroDivisionError
    clock.now += 1
    assert it.overhead == 1
