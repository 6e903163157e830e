"""The verified cascade: real verifiers, a real relay, and upstreams that answer as they are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import pytest_asyncio

from contracts.routing import Demand, Role, Status, Verdict
from router.cascade.cascade import solve
from router.chat import ApiError, Reply
from router.decomposition.plan import Kind, Subtask
from router.policy.decision import Decision
from router.pools.base import PoolError
from router.verification.check import Check
from router.verification.verifiers import Verifiers
from tests.integration.router.pools import BODY, Bench, bench
from tests.upstream import Answer, Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"
WRONG = "```python\ndef double(x):\n    return x\n```"
UNKNOWN = "```python\nimport a_module_that_nobody_has\n```"
TESTS = Check("tests", {"code": "def test_double():\n    assert double(2) == 4\n"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def verifiers() -> AsyncIterator[Verifiers]:
    verifiers = Verifiers(workers=1)
    await verifiers.start()
    yield verifiers
    await verifiers.close()


def two_tiers(compact: Script, strong: Script) -> AbstractAsyncContextManager[Bench]:
    """Pool a is compact, pool b strong."""
    return bench(compact, strong, each={"a": {"tier": "compact"}, "b": {"tier": "strong"}})


def choosing(first: tuple[str, ...], strong: tuple[str, ...] = ("b",)) -> Callable[[str, bool], Decision]:
    """Decides on `first`, and on `strong` where that is the least; without strong pools it refuses, as the policy."""

    def choose(minimum: str, checked: bool) -> Decision:
        order = strong if minimum else first
        if not order:
            raise ApiError(429, "The budget of this key is used up.")
        return Decision(order[0], order, "policy", {}, {}, {}, 1.0, "test")

    return choose


async def solved(
    pools: Bench, verifiers: Verifiers, check: Check | None = TESTS, choose: Any = None, body: dict[str, Any] = BODY
) -> Reply:
    subtask = Subtask("s1", Kind.CODE, Demand.MECHANICAL, "", check=check)
    return await solve(subtask, body, choose or choosing(("a",)), pools.relay, verifiers, pools.attempts)


def story(pools: Bench) -> list[tuple[str, str, str]]:
    return [(attempt.pool, attempt.role, attempt.verdict) for attempt in pools.attempts]


async def test_a_right_answer_costs_one_compact_call(verifiers: Verifiers) -> None:
    async with two_tiers(Answer(RIGHT), Answer(RIGHT)) as pools:
        assert (await solved(pools, verifiers)).text == RIGHT
        assert story(pools) == [("a", Role.ANSWER, Verdict.PASSED)]


async def test_a_refused_answer_goes_to_the_strong_pool_with_what_was_wrong(verifiers: Verifiers) -> None:
    async with two_tiers(Answer(WRONG), Answer(RIGHT)) as pools:
        assert (await solved(pools, verifiers)).text == RIGHT
        assert story(pools) == [("a", Role.ANSWER, Verdict.FAILED), ("b", Role.ESCALATION, Verdict.PASSED)]
        assert all(attempt.cost > 0 for attempt in pools.attempts)
        told = pools.upstreams["b"].calls[0].body["messages"][-1]["content"]
        assert told.startswith(BODY["messages"][-1]["content"]) and WRONG in told and "test_double" in told
        assert pools.upstreams["a"].calls[0].body["messages"] == BODY["messages"]


async def test_after_an_escalation_no_other_is_reckoned_with(verifiers: Verifiers) -> None:
    """Else the cheapest of several strong pools would be chosen, as if its mistakes were found and mended."""
    asked = []

    def choose(minimum: str, checked: bool) -> Decision:
        asked.append((minimum, checked))
        return choosing(("a",))(minimum, checked)

    async with two_tiers(Answer(WRONG), Answer(RIGHT)) as pools:
        await solved(pools, verifiers, choose=choose)
        assert asked == [("", True), ("strong", False)]


async def test_the_strong_answer_is_given_whatever_its_verdict(verifiers: Verifiers) -> None:
    async with two_tiers(Answer(WRONG), Answer("I cannot do that.")) as pools:
        assert (await solved(pools, verifiers)).text == "I cannot do that."
        assert story(pools) == [("a", Role.ANSWER, Verdict.FAILED), ("b", Role.ESCALATION, Verdict.FAILED)]


@pytest.mark.parametrize(
    ("check", "text", "verdict"),
    [
        (TESTS, UNKNOWN, Verdict.UNDECIDED),
        (Check("tests", {"code": "def test_double(:"}), WRONG, Verdict.UNDECIDED),
        (Check("no such verifier"), WRONG, Verdict.UNDECIDED),
        (None, WRONG, Verdict.NONE),
    ],
    ids=["a missing module", "tests that do not compile", "unknown verifier", "no check"],
)
async def test_what_no_verifier_refuses_is_given(
    verifiers: Verifiers, check: Check | None, text: str, verdict: Verdict
) -> None:
    async with two_tiers(Answer(text), Answer(RIGHT)) as pools:
        assert (await solved(pools, verifiers, check)).text == text
        assert story(pools) == [("a", Role.ANSWER, verdict)]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_tokens": 5}, [Verdict.UNDECIDED]),  # a stronger model would be cut off as well
        ({"max_completion_tokens": 5}, [Verdict.UNDECIDED]),
        ({}, [Verdict.FAILED, Verdict.PASSED]),  # it went on and on
    ],
)
async def test_an_answer_that_the_application_cut_off_is_not_held_against_the_model(
    verifiers: Verifiers, limits: dict[str, int], expected: list[Verdict]
) -> None:
    async with two_tiers(Answer(RIGHT[:25], finish="length"), Answer(RIGHT)) as pools:
        await solved(pools, verifiers, Check("python"), body={**BODY, **limits})
        assert [attempt.verdict for attempt in pools.attempts] == expected


async def test_above_strong_nobody_is_asked(verifiers: Verifiers) -> None:
    async with two_tiers(Answer(RIGHT), Answer(WRONG)) as pools:
        assert (await solved(pools, verifiers, choose=choosing(("b", "a")))).text == WRONG
        assert story(pools) == [("b", Role.ANSWER, Verdict.FAILED)]


async def test_a_fallback_to_strong_counts_as_strong(verifiers: Verifiers) -> None:
    async with two_tiers(Answer(status=503), Answer(WRONG)) as pools:
        assert (await solved(pools, verifiers, choose=choosing(("a", "b")))).text == WRONG
        assert story(pools) == [("a", Role.ANSWER, Verdict.NONE), ("b", Role.ANSWER, Verdict.FAILED)]


async def test_without_a_strong_pool_the_refused_answer_is_given(verifiers: Verifiers) -> None:
    async with two_tiers(Answer(WRONG), Answer(status=503)) as pools:
        assert (await solved(pools, verifiers)).text == WRONG
        assert pools.tried == [("a", Status.OK), ("b", Status.ERROR)]
        assert story(pools)[0] == ("a", Role.ANSWER, Verdict.FAILED)


async def test_without_budget_for_it_nobody_else_is_called(verifiers: Verifiers) -> None:
    async with two_tiers(Answer(WRONG), Answer(RIGHT)) as pools:
        assert (await solved(pools, verifiers, choose=choosing(("a",), ()))).text == WRONG
        assert pools.received == [1, 0]


async def test_where_the_first_call_fails_there_is_nothing_to_check(verifiers: Verifiers) -> None:
    async with two_tiers(Answer(status=503), Answer(RIGHT)) as pools:
        with pytest.raises(PoolError):
            await solved(pools, verifiers)
        assert pools.received == [1, 0]


async def test_an_agents_turn_with_bad_arguments_is_made_again(verifiers: Verifiers) -> None:
    schema = {"type": "object", "required": ["path"]}
    bad, good = ({"name": "read", "arguments": arguments} for arguments in ("{}", '{"path": "a"}'))
    async with two_tiers(Answer("", tool_calls=[bad]), Answer("", tool_calls=[good])) as pools:
        reply = await solved(pools, verifiers, Check("tool_call", {"tools": {"read": schema}}))
        assert reply.tool_calls[0]["function"]["arguments"] == good["arguments"]
        assert [attempt.verdict for attempt in pools.attempts] == [Verdict.FAILED, Verdict.PASSED]
        assert "'path' is a required property" in pools.upstreams["b"].calls[0].body["messages"][-1]["content"]


async def test_an_agents_turn_with_a_call_that_is_none_is_made_again(verifiers: Verifiers) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": None}]}
    malformed = Answer(raw=json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode())
    good = Answer("", tool_calls=[{"name": "read", "arguments": "{}"}])
    async with two_tiers(malformed, good) as pools:
        reply = await solved(pools, verifiers, Check("tool_call", {"tools": {"read": {}}}))
        assert reply.tool_calls[0]["function"]["name"] == "read"
        assert [attempt.verdict for attempt in pools.attempts] == [Verdict.FAILED, Verdict.PASSED]


async def test_subtasks_side_by_side_keep_their_verdicts_apart(verifiers: Verifiers) -> None:
    texts = {"s1": RIGHT, "s2": WRONG, "s3": RIGHT}

    def answer(body: dict[str, Any], _: int) -> Answer:
        return Answer(texts[body["messages"][0]["content"]])

    async with two_tiers(answer, Answer(RIGHT)) as pools:
        replies = await asyncio.gather(
            *(
                solve(
                    Subtask(name, Kind.CODE, Demand.MECHANICAL, name, check=TESTS),
                    {**BODY, "messages": [{"role": "user", "content": name}]},
                    choosing(("a",)),
                    pools.relay,
                    verifiers,
                    pools.attempts,
                )
                for name in texts
            )
        )
        assert [reply.text for reply in replies] == [RIGHT] * 3
        verdicts = {(attempt.subtask, attempt.pool): attempt.verdict for attempt in pools.attempts}
        assert verdicts == {
            ("s1", "a"): Verdict.PASSED,
            ("s2", "a"): Verdict.FAILED,
            ("s2", "b"): Verdict.PASSED,
            ("s3", "a"): Verdict.PASSED,
        }


EDIT = {"name": "edit_file", "arguments": '{"path": "a.py", "old": "x", "new": "y"}'}
READ = {"name": "read_file", "arguments": '{"path": "a.py"}'}
OFFERED = Check("tool_call", {"tools": {"edit_file": {"type": "object"}, "read_file": {"type": "object"}}})


@pytest.mark.parametrize("strong", [("a",), ()], ids=["no strong pool", "no budget for it"])
async def test_a_turn_that_nobody_else_can_take_over_is_given(verifiers: Verifiers, strong: tuple[str, ...]) -> None:
    async with two_tiers(Answer("", tool_calls=[EDIT]), Answer()) as pools:
        reply = await solved(pools, verifiers, OFFERED, choosing(("a",), strong))
        assert reply.tool_calls and story(pools) == [("a", Role.ANSWER, Verdict.PASSED)]


async def test_without_a_strong_pool_the_compact_one_is_told_what_was_wrong(verifiers: Verifiers) -> None:
    async with two_tiers([Answer(WRONG), Answer(RIGHT)], Answer()) as pools:
        assert (await solved(pools, verifiers, choose=choosing(("a",), ("a",)))).text == RIGHT
        assert story(pools) == [("a", Role.ANSWER, Verdict.FAILED), ("a", Role.ESCALATION, Verdict.PASSED)]


@pytest.mark.parametrize(
    ("call", "demand", "expected"),
    [
        (READ, Demand.MECHANICAL, [("a", Role.ANSWER, Verdict.PASSED)]),
        (EDIT, Demand.MECHANICAL, [("a", Role.ANSWER, Verdict.DEFERRED), ("b", Role.ESCALATION, Verdict.PASSED)]),
        (EDIT, Demand.DEEP, [("a", Role.ANSWER, Verdict.PASSED)]),
    ],
    ids=["it looks", "it writes", "it was known to write"],
)
async def test_a_mechanical_turn_that_goes_on_to_write_is_left_to_the_strong_pool(
    verifiers: Verifiers, call: dict[str, str], demand: Demand, expected: list[tuple[str, str, str]]
) -> None:
    turn = Answer("", tool_calls=[call])
    async with two_tiers(turn, turn) as pools:
        subtask = Subtask("s1", Kind.EXPLORING, demand, "", check=OFFERED)
        await solve(subtask, BODY, choosing(("a",)), pools.relay, verifiers, pools.attempts)
        assert story(pools) == expected
        if len(expected) == 2:
            told = pools.upstreams["b"].calls[0].body["messages"]
            assert told == BODY["messages"], "nothing was wrong, so nothing is said about it"
