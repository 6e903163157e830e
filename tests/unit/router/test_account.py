"""The bill of a request: exact, complete whatever became of its calls, and fair to the strongest model."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from contracts import codec
from contracts.base import INT64_MAX
from contracts.routing import Attempt, Role, RouteOutcome, Status, Verdict
from router.chat import Usage
from router.ledger.account import Facts, account, outcome, strongest
from router.prices import cost
from router.settings import PoolSettings

POOLS = {
    "small": PoolSettings(tier="compact", price_in=0.05, price_out=0.2, price_cached=0.005),
    "large": PoolSettings(tier="strong", price_in=3.0, price_out=15.0, price_cached=0.3, window=200_000),
    "other": PoolSettings(tier="strong", price_in=2.0, price_out=8.0, window=100_000),
    "free": PoolSettings(tier="compact"),
}
FACTS = Facts(request_id="r1", run="demo", key="team", session="s", requested="auto", kind="code", prompt_tokens=1000)


def call(pool: str, prompt: int = 1000, completion: int = 100, cached: int = 0, **changes: object) -> Attempt:
    """An attempt priced as the relay prices it."""
    made = Attempt(
        subtask="",
        pool=pool,
        model=f"{pool}-v1",
        role=Role.ANSWER,
        status=Status.OK,
        verdict=Verdict.NONE,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        cost=cost(POOLS[pool], Usage(prompt, completion, cached)),
        estimated=False,
        seconds=1.0,
        first_token_seconds=0.1,
        tier=POOLS[pool].tier,
    )
    return msgspec.structs.replace(made, **changes)


SMALL = 1000 * 50_000 + 100 * 200_000  # one call of `call("small")`
LARGE = 1000 * 3_000_000 + 100 * 15_000_000


@dataclass
class Case:
    attempts: list[Attempt]
    cost: int
    counterfactual: int
    pool: str
    answered: bool = True
    allowed: frozenset[str] | None = None
    cached: dict[str, int] = field(default_factory=dict)


CASES = {
    "a compact answer": Case([call("small")], SMALL, LARGE, "small"),
    "an answer of the strongest pool saves nothing": Case([call("large")], LARGE, LARGE, "large"),
    "an answer of a cheaper strong pool": Case([call("other")], 1000 * 2_000_000 + 100 * 8_000_000, LARGE, "other"),
    "a free pool": Case([call("free")], 0, LARGE, "free"),
    "the same share from the cache": Case(
        [call("small", cached=400)],
        600 * 50_000 + 400 * 5_000 + 100 * 200_000,
        600 * 3_000_000 + 400 * 300_000 + 100 * 15_000_000,
        "small",
    ),
    "what the session left in any pool's cache would lie in the strongest one's": Case(
        [call("small", 1100)],
        1100 * 50_000 + 100 * 200_000,
        220 * 3_000_000 + 880 * 300_000 + 1_500_000_000,  # 800 of the estimated 1000 are 880 of the 1100
        "small",
        cached={"small": 800, "large": 300},
    ),
    "back on the strongest pool, its cache has missed the turns between": Case(
        [call("large", cached=300)],
        700 * 3_000_000 + 300 * 300_000 + 1_500_000_000,
        200 * 3_000_000 + 800 * 300_000 + 1_500_000_000,
        "large",
        cached={"small": 800, "large": 300},
    ),
    "a session that stayed on the strongest pool, whatever its cache gave": Case(
        [call("large")], LARGE, LARGE, "large", cached={"large": 800, "small": 300}
    ),
    "a cache never holds more than the prompt": Case(
        [call("small")], SMALL, 1000 * 300_000 + 1_500_000_000, "small", cached={"small": 5000}
    ),
    "the strongest pool's own cache, where it answered": Case(
        [call("large", cached=1000)], 1000 * 300_000 + 1_500_000_000, 1000 * 300_000 + 1_500_000_000, "large"
    ),
    "an answer after a fallback has a cost": Case(
        [call("other", 0, 0, status=Status.ERROR, error="503"), call("small")], SMALL, LARGE, "small"
    ),
    "a failure that was paid for is a loss": Case(
        [call("large", 1000, 7, status=Status.ERROR), call("large")],
        2 * LARGE - 93 * 15_000_000,
        LARGE,
        "large",
    ),
    "a streamed answer that broke off is paid for and compared at its length": Case(
        [call("small", completion=30, status=Status.PARTIAL)],
        1000 * 50_000 + 30 * 200_000,
        1000 * 3_000_000 + 30 * 15_000_000,
        "small",
    ),
    "usage that was counted here is billed all the same": Case([call("small", estimated=True)], SMALL, LARGE, "small"),
    "a reader that went away": Case(
        [call("small", completion=5, status=Status.CANCELLED)],
        1000 * 50_000 + 5 * 200_000,
        1000 * 3_000_000 + 5 * 15_000_000,
        "small",
    ),
    "a reader that went away before a token": Case(
        [call("small", 1000, 0, status=Status.CANCELLED)], 1000 * 50_000, 0, ""
    ),
    "no answer: what it cost is lost": Case(
        [call("small", 1000, 20, status=Status.PARTIAL), call("large", 0, 0, status=Status.ERROR)],
        1000 * 50_000 + 20 * 200_000,
        0,
        "",
        answered=False,
    ),
    "nothing was called": Case([], 0, 0, "", answered=False),
    "an escalation: the failure's text is not the strongest pool's prompt": Case(
        [
            call("small", verdict=Verdict.FAILED),
            call("large", 1300, 80, role=Role.ESCALATION, verdict=Verdict.PASSED),
        ],
        SMALL + 1300 * 3_000_000 + 80 * 15_000_000,
        1000 * 3_000_000 + 80 * 15_000_000,
        "large",
    ),
    "an escalation that failed leaves the compact answer": Case(
        [call("small", verdict=Verdict.FAILED), call("large", 0, 0, role=Role.ESCALATION, status=Status.ERROR)],
        SMALL,
        LARGE,
        "small",
    ),
    "a hedge: both are paid for, one answers": Case(
        [
            call("large", 1000, 40, status=Status.CANCELLED),
            call("small", role=Role.HEDGE),
        ],
        SMALL + 1000 * 3_000_000 + 40 * 15_000_000,
        LARGE,
        "small",
    ),
    "a plan, its parts and their join against one call as long as the join": Case(
        [
            call("large", 900, 50, role=Role.PLAN),
            call("small", 300, 60, subtask="s1"),
            call("small", 400, 70, subtask="s2"),
            call("large", 500, 120, subtask="join", role=Role.JOIN),
        ],
        1400 * 3_000_000 + 170 * 15_000_000 + 700 * 50_000 + 130 * 200_000,
        1000 * 3_000_000 + 120 * 15_000_000,
        "large",
    ),
    "parts that were given up are no part of the answer, nor is their prompt the request's": Case(
        [
            call("small", 300, 600, subtask="s1"),
            call("small", 0, 0, subtask="s2", status=Status.ERROR),
            call("other", 1000, 100),
        ],
        300 * 50_000 + 600 * 200_000 + 1000 * 2_000_000 + 100 * 8_000_000,
        LARGE,
        "other",
    ),
    "parts that were given up for the strongest pool are lost": Case(
        [call("small", 300, 600, subtask="s1"), call("large", 980, 100)],
        300 * 50_000 + 600 * 200_000 + LARGE - 20 * 3_000_000,
        LARGE - 20 * 3_000_000,
        "large",
    ),
    "a plan that keeps the request whole saves nothing where the strongest pool answers": Case(
        [call("small", 900, 50, subtask="plan", role=Role.PLAN), call("large", 980, 100)],
        900 * 50_000 + 50 * 200_000 + LARGE - 20 * 3_000_000,
        LARGE - 20 * 3_000_000,
        "large",
    ),
    "parts in a row: one call as long as all of them": Case(
        [call("small", 300, 60, subtask="s1"), call("small", 400, 70, subtask="s2")],
        700 * 50_000 + 130 * 200_000,
        1000 * 3_000_000 + 130 * 15_000_000,
        "small",
    ),
    "a key that may not use the dearest pool would not have used it": Case(
        [call("small")], SMALL, 1000 * 2_000_000 + 100 * 8_000_000, "small", allowed=frozenset({"small", "other"})
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cost_and_counterfactual(name: str) -> None:
    case = CASES[name]
    bill = account(
        case.attempts, POOLS, prompt_tokens=1000, answered=case.answered, allowed=case.allowed, cached=case.cached
    )
    assert (bill.cost, bill.counterfactual, bill.pool) == (case.cost, case.counterfactual, case.pool)
    assert bill.cost == sum(attempt.cost for attempt in case.attempts)
    assert bill.saved == case.counterfactual - case.cost


@pytest.mark.parametrize("name", CASES)
def test_an_outcome_is_a_message_with_numbers_in_every_case(name: str) -> None:
    case = CASES[name]
    status = Status.OK if case.answered else Status.ERROR
    made = outcome(
        FACTS, case.attempts, POOLS, status=status, decisions=["r1"], seconds=2.0, overhead_seconds=0.01, at_ns=7
    )
    assert codec.decode(codec.encode(made), RouteOutcome) == made
    assert (made.cost, made.pool, made.status) == (case.cost, case.pool, status)


def test_an_alias_that_was_streamed_is_billed_by_the_pool_that_served_it() -> None:
    """The name that was asked for has no price, the pool has."""
    streamed = call("small", 700, 30, model="gpt-something-2026-11", status=Status.OK)
    made = outcome(FACTS, [streamed], POOLS, status=Status.OK, decisions=[], seconds=1.0, overhead_seconds=0.0, at_ns=1)
    assert made.requested == "auto" and made.cost == 700 * 50_000 + 30 * 200_000 > 0


STRONGEST = [
    (1_000, None, "large"),
    (150_000, None, "large"),
    (1_000, {"small", "other"}, "other"),
    (1_000, {"small", "free"}, "small"),  # nobody strong: the dearest
    (150_000, {"small", "other"}, "other"),  # fits nowhere: as if it did
    (1_000, set(), ""),
]


@pytest.mark.parametrize("tokens, allowed, name", STRONGEST)
def test_the_strongest_pool(tokens: int, allowed: set[str] | None, name: str) -> None:
    assert strongest(POOLS, tokens, allowed) == name


def test_the_strongest_pool_is_one_that_could_have_taken_the_request() -> None:
    pools = POOLS | {"dear": PoolSettings(tier="strong", price_in=30.0, price_out=60.0, window=4096)}
    assert strongest(pools, 4096) == "dear"
    assert strongest(pools, 4097) == "large"


def test_a_call_costs_no_more_than_can_be_written_down() -> None:
    """An upstream that miscounts must not take the record of the request with it."""
    absurd = Usage(prompt=2**52, completion=2**52)
    assert cost(POOLS["large"], absurd) == INT64_MAX
    made = outcome(
        FACTS, [call("large", 2**52, 2**52)], POOLS, status=Status.OK, decisions=[], seconds=1.0, overhead_seconds=0.0,
        at_ns=1,
    )  # fmt: skip
    assert codec.decode(codec.encode(made), RouteOutcome).cost == INT64_MAX


def test_sums_stay_within_what_other_languages_can_hold() -> None:
    dear = call("large", cost=INT64_MAX - 5)
    bill = account([dear, dear], POOLS, prompt_tokens=1)
    assert bill.cost == INT64_MAX and bill.counterfactual <= INT64_MAX


def test_without_pools_the_counterfactual_is_what_was_paid() -> None:
    bill = account([call("small")], {}, prompt_tokens=1000)
    assert bill.cost == bill.counterfactual == SMALL


def test_a_bill_does_not_fail_over_what_an_upstream_says_about_itself() -> None:
    odd = call("small", model="half a pair: \ud83d" + "x" * 10_000, error="\udc00")
    made = outcome(
        FACTS, [odd], POOLS, status=Status.OK, decisions=[], seconds=1.0, overhead_seconds=0.0, at_ns=1, error="\ud800"
    )
    assert codec.decode(codec.encode(made), RouteOutcome).cost == SMALL
    assert made.attempts[0].model.startswith("half a pair: ?x") and len(made.attempts[0].model) < 1000
