"""What became of decisions: which messages say that an answer was right, and which say nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from contracts.routing import Attempt, Feedback, PoolScore, RouteDecision, RouteOutcome, Status, Verdict
from router.policy.evidence import Journal

SCORES = {"compact": PoolScore(0.8, 10), "strong": PoolScore(0.9, 100)}


def decision(request: str = "r", subtask: str = "", **fields: Any) -> RouteDecision:
    given: dict[str, Any] = {
        "id": f"{request}.{subtask}", "run": "t", "request_id": request, "subtask": subtask, "session": "s", "key": "",
        "requested": "auto", "kind": "code", "demand": "mechanical", "pool": "compact", "order": ["strong"],
        "reason": "policy", "scores": SCORES, "excluded": {}, "propensity": 0.9, "tolerance": 0.1, "policy": "p",
        "features": {"logit.compact": 1.0, "logit.strong": 2.0, "prompt_tokens": 100.0, "checked": 1.0},
        "shadow": {"t": "strong"}, "at_ns": 5,
    }  # fmt: skip
    return RouteDecision(**(given | fields))


def attempt(
    verdict: str = Verdict.NONE, pool: str = "compact", subtask: str = "", status: str = Status.OK, cost: int = 7
) -> Attempt:
    tier = "strong" if pool == "strong" else "compact"
    return Attempt(subtask, pool, "m", "answer", status, verdict, 100, 0, 20, cost, False, 1.0, 0.1, tier=tier)


def outcome(*attempts: Attempt, request: str = "r", status: str = Status.OK) -> RouteOutcome:
    return RouteOutcome(
        request_id=request, run="t", key="", session="s", requested="auto", pool="compact", kind="code", status=status,
        decisions=[], attempts=list(attempts), cost=sum(each.cost for each in attempts), counterfactual=9, error="",
        seconds=1.0, overhead_seconds=0.1, at_ns=6,
    )  # fmt: skip


def feedback(id: str = "f", **fields: Any) -> Feedback:
    return Feedback(id=id, run="t", request_id="r", key="", **fields)


def known(*messages: Any) -> list[tuple[str, bool]]:
    journal = Journal()
    for message in messages:
        journal.add(message)
    return [(each.pool, each.success) for *_, each in journal.judged()]


@pytest.mark.parametrize(
    ("attempts", "said", "expected"),
    [
        ([attempt(Verdict.PASSED)], [], [("compact", True)]),
        ([attempt(Verdict.FAILED)], [], [("compact", False)]),
        ([attempt(Verdict.NONE)], [], []),
        ([attempt(Verdict.UNDECIDED)], [], []),  # a verifier's time-out is no wrong answer
        ([attempt(Verdict.DEFERRED), attempt(Verdict.PASSED, "strong")], [], [("strong", True)]),
        ([attempt(Verdict.PASSED, status=Status.CANCELLED)], [], []),
        ([attempt(Verdict.FAILED, status=Status.PARTIAL)], [], []),
        ([attempt(status=Status.ERROR)], [], []),  # a pool that is down is no worse at thinking
        # an escalation: the compact answer was refused, the strong one taken
        ([attempt(Verdict.FAILED), attempt(Verdict.PASSED, "strong")], [], [("compact", False), ("strong", True)]),
        # feedback counts more than a verifier, and is about the answer that was given
        ([attempt(Verdict.PASSED)], [feedback(passed=False)], [("compact", False)]),
        ([attempt(Verdict.FAILED)], [feedback(score=0.9)], [("compact", True)]),
        ([attempt()], [feedback(score=0.2)], [("compact", False)]),
        ([attempt()], [feedback(correction="42")], [("compact", False)]),
        ([attempt()], [feedback(passed=True, correction="nicer")], [("compact", True)]),
        (
            [attempt(Verdict.FAILED), attempt(Verdict.PASSED, "strong")],
            [feedback(passed=False)],
            [("compact", False), ("strong", False)],
        ),
        # of two the last one said, in whatever order they arrive
        ([attempt()], [feedback("b", score=1.0, at_ns=2), feedback("a", score=0.0, at_ns=1)], [("compact", True)]),
        # of an answer made of several it is not known which part it means
        ([attempt(subtask="s1"), attempt(Verdict.PASSED, subtask="")], [feedback(score=0.0)], [("compact", True)]),
    ],
)
def test_what_says_that_an_answer_was_right(
    attempts: list[Attempt], said: list[Feedback], expected: list[tuple[str, bool]]
) -> None:
    messages = [decision(), outcome(*attempts), *said]
    for order in itertools.permutations(messages):
        assert known(*order) == expected
        assert known(*order, *order) == expected  # whatever is read twice counts once


@pytest.mark.parametrize("verdict", [Verdict.PASSED, Verdict.FAILED])
def test_a_verifier_that_sees_only_the_form_says_nothing_about_the_answer(verdict: str) -> None:
    unreckoned = decision(features={"logit.compact": 1.0, "checked": 0.0})
    assert known(unreckoned, outcome(attempt(verdict))) == []
    assert known(unreckoned, outcome(attempt(verdict)), feedback(passed=True)) == [("compact", True)]


def test_what_was_cancelled_says_nothing() -> None:
    assert known(decision(), outcome(attempt(Verdict.PASSED), status=Status.CANCELLED), feedback(score=0.0)) == []


def test_messages_without_their_other_half_say_nothing() -> None:
    assert known(feedback(score=1.0)) == known(outcome(attempt(Verdict.PASSED))) == known(decision()) == []
    assert known(decision(pool=""), outcome(attempt(Verdict.PASSED))) == []  # a refusal


def logged(*messages: Any, policy: str = "p") -> list[Any]:
    journal = Journal()
    for message in messages:
        journal.add(message)
    return journal.logged("t", policy)


def test_a_judged_decision_counts_for_the_trial_with_all_its_calls() -> None:
    failed, passed = attempt(Verdict.FAILED, cost=7), attempt(Verdict.PASSED, "strong", cost=70)
    (found,) = logged(decision(), decision(id="r.2", pool="strong", at_ns=6), outcome(failed, passed))
    assert (found.pool, found.greedy, found.trial, found.propensity) == ("compact", "compact", "strong", 0.9)
    assert (found.success, found.cost, found.checked) == (True, 77, True)


def test_what_exploration_chose_is_told_from_what_the_policy_prefers() -> None:
    explored = decision(reason="explored", pool="strong", order=["compact"], propensity=0.05)
    (found,) = logged(explored, outcome(attempt(Verdict.PASSED, "strong")))
    assert (found.pool, found.greedy, found.propensity) == ("strong", "compact", 0.05)


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"shadow": {}}, Verdict.PASSED),
        ({"policy": "another"}, Verdict.PASSED),
        ({"propensity": 0.0}, Verdict.PASSED),
        ({"propensity": 1e-9}, Verdict.PASSED),
        ({"scores": {"compact": PoolScore(0.8, 10)}}, Verdict.PASSED),  # there was no choice
        ({"shadow": {"t": "gone"}}, Verdict.PASSED),
        ({}, Verdict.UNDECIDED),
    ],
)
def test_decisions_that_tell_a_trial_nothing(fields: dict[str, Any], verdict: str) -> None:
    assert logged(decision(**fields), outcome(attempt(verdict))) == []


def test_each_subtask_is_judged_for_itself() -> None:
    journal = Journal()
    for message in (
        decision(subtask="s1"),
        decision(subtask="s2", pool="strong"),
        outcome(attempt(Verdict.PASSED, subtask="s1"), attempt(Verdict.FAILED, "strong", subtask="s2")),
    ):
        journal.add(message)
    assert sorted((each.pool, each.success) for *_, each in journal.judged()) == [("compact", True), ("strong", False)]
    assert sorted((each.pool, each.success) for each in journal.logged("t", "p")) == [
        ("compact", True),
        ("strong", False),
    ]
    assert journal.answers() == [("code", 20), ("code", 20)]


def test_the_journal_is_bounded_and_forgets_last_what_it_learned_something_from() -> None:
    journal = Journal(live=10, kept=20)
    for index in range(100):
        journal.add(decision(f"r{index}"))
        if index % 2:
            journal.add(outcome(attempt(Verdict.PASSED), request=f"r{index}"))
    assert len(journal) == 30
    assert len(journal.judged()) == len(journal.logged("t", "p")) == 25
    journal.add(decision("r61"))
    journal.add(outcome(attempt(Verdict.PASSED), request="r61"))  # long settled, and read again
    assert len(journal) == 30 and len(journal.judged()) == 25
