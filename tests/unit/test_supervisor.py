"""What the supervisor decides when a process exits."""

from __future__ import annotations

import signal

import pytest

from infra.supervisor import Action, Backoff, children, decide


@pytest.mark.parametrize(
    ("code", "completes", "proven", "action"),
    [
        (0, True, False, Action.COMPLETE),
        (0, False, True, Action.LEAVE),
        (1, True, False, Action.RESTART),
        (1, False, True, Action.RESTART),
        (2, True, False, Action.ABORT),
        (2, False, False, Action.ABORT),
        (2, True, True, Action.RESTART),
        (2, False, True, Action.RESTART),
        (-signal.SIGKILL, True, False, Action.RESTART),
        (-signal.SIGTERM, False, True, Action.RESTART),
        (137, False, False, Action.RESTART),
    ],
)
def test_decide(code: int, completes: bool, proven: bool, action: Action) -> None:
    assert decide(code, completes=completes, proven=proven) is action


def test_backoff_doubles_up_to_its_limit_and_then_gives_up() -> None:
    backoff = Backoff()
    delays = [backoff.failed(lived=1.0) for _ in range(Backoff.LIMIT)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, None]


def test_backoff_forgets_after_a_healthy_life() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.failed(lived=1.0)
    assert backoff.failed(lived=Backoff.HEALTHY) == 0.5
    assert backoff.failed(lived=59.0) == 1.0


def test_children_are_numbered_and_none_are_made_for_zero() -> None:
    found = children({"learner": 1, "generator": 2, "router": 0})
    assert [child.instance for child in found] == ["learner-1", "generator-1", "generator-2"]
    assert found[1].command[1:] == ("-m", "generator")


def test_a_child_in_a_role_is_the_same_program_told_so_by_its_environment() -> None:
    plain, serving = children({"generator": 1, "generator.serve": 1})
    assert (plain.instance, serving.instance) == ("generator-1", "generator-serve-1")
    assert serving.command == plain.command
    assert not plain.environment and serving.environment == {"TAILRACE_GENERATOR__ROLE": "serve"}
