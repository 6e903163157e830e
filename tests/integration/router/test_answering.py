"""The way of a request, real parts in process: whatever happens on it, it ends in one outcome that says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from contracts.routing import Role, Status, Verdict
from infra.bus import Bus
from infra.settings import NatsSettings
from router.admission.keys import EVERYONE, Caller, Keys
from router.admission.parse import parse
from router.answering import Answering
from router.chat import ApiError
from router.ledger.books import Books
from router.ledger.store import Ledger
from router.outbox import Outbox
from router.policy.decide import NEUTRAL
from router.pools.openai import OpenAIPool
from router.pools.relay import Relay
from router.record import Record
from router.settings import KeySettings, PlanSettings, PoolSettings, RouterSettings
from router.verification.verifiers import Verifiers
from tests.integration.router.pools import until
from tests.upstream import Answer, Script, Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "Hello there, how are you today?"}]
EXTRACT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Extract the city as JSON: I live in Oslo."}],
    "response_format": {"type": "json_object"},
}
GOOD, BAD = '{"city": "Oslo"}', '{"city": "Oslo",'
CHEAP = {"tier": "compact", "price_in": 0.1, "price_out": 0.2}
DEAR = {"price_in": 3.0, "price_out": 15.0, "price_cached": 0.3}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def verifiers() -> AsyncIterator[Verifiers]:
    verifiers = Verifiers(workers=1)
    await verifiers.start()
    yield verifiers
    await verifiers.close()


class Front:
    """An `Answering` before two upstreams, small and large."""

    def __init__(self, answering: Answering, upstreams: dict[str, Upstream], ledger: Ledger) -> None:
        self.answering = answering
        self.upstreams = upstreams
        self.ledger = ledger

    def begin(self, caller: Caller = EVERYONE, **body: Any) -> Record:
        request = parse(json.dumps({"model": "auto", "messages": HELLO, **body}).encode())
        return self.answering.begin(request, caller)

    async def texts(self, record: Record) -> list[str]:
        """The pieces of a stream, or the answer."""
        if not record.request.stream:
            return [(await self.answering.answer(record)).text]
        async with aclosing(self.answering.stream(record)) as chunks:
            return [chunk.text async for chunk in chunks if chunk.text]

    def calls(self) -> list[int]:
        return [upstream.count for upstream in self.upstreams.values()]


@asynccontextmanager
async def front(
    directory: Path, verifiers: Verifiers, small: Script, large: Script, **settings: Any
) -> AsyncIterator[Front]:
    async with Upstream(small) as first, Upstream(large) as second:
        upstreams = {"small": first, "large": second}
        pools = {
            name: PoolSettings(url=upstreams[name].url, retries=0, **prices)
            for name, prices in (("small", CHEAP), ("large", DEAR))
        }
        relay = Relay({name: OpenAIPool(name, pool) for name, pool in pools.items()})
        ledger = Ledger(directory)
        outbox = Outbox(Bus.later(NatsSettings(url="nats://127.0.0.1:9"), "front"), directory, "demo")
        whole = RouterSettings(directory=directory, pools=pools, exploration=0.0, **settings)
        keys = Keys(whole.keys, {"TEAM": "sk-team"}, 0.0)
        books = Books(ledger, outbox)
        try:
            yield Front(
                Answering("demo", whole, relay, keys, books, verifiers, lambda: (NEUTRAL, None)), upstreams, ledger
            )
        finally:
            await relay.close()
            ledger.close()


FINE = Answer(text="All is well.", prompt_tokens=100, completion_tokens=10)
DOWN = Answer(status=503)
CUT = Answer(text="one two three four", after=3, then="abort", prompt_tokens=100)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("small", "large", "model", "status", "pool", "tried", "told"),
    [
        (FINE, FINE, "small", Status.OK, "small", ["ok"], None),
        (DOWN, FINE, "auto-1", Status.OK, "large", ["error", "ok"], None),
        (DOWN, DOWN, "auto", Status.ERROR, "", ["error", "error"], 503),
        (DOWN, FINE, "small", Status.ERROR, "", ["error"], 503),
        (Answer(status=400), FINE, "small", Status.ERROR, "", ["error"], 400),
    ],
)
async def test_one_outcome_says_how_it_ended(
    tmp_path: Path, verifiers: Verifiers, stream: bool, small: Answer, large: Answer, model: str,
    status: Status, pool: str, tried: list[str], told: int | None,
) -> None:  # fmt: skip
    async with front(tmp_path, verifiers, small, large) as f:
        record = f.begin(model=model, stream=stream)
        if told is None:
            assert "".join(await f.texts(record)) == "All is well."
        else:
            with pytest.raises(ApiError) as raised:
                await f.texts(record)
            assert raised.value.status == told
        outcome = record.outcome
        assert outcome is not None and (outcome.status, outcome.pool) == (status, pool)
        assert [attempt.status for attempt in outcome.attempts] == tried
        assert outcome.cost == sum(attempt.cost for attempt in outcome.attempts) == f.ledger.spent("")
        assert bool(outcome.error) == (told is not None)
        assert outcome.decisions == [decision.id for decision in record.decisions] == [record.id]
        assert outcome.seconds >= outcome.overhead_seconds > 0


async def test_what_came_before_a_stream_broke_is_paid_for(tmp_path: Path, verifiers: Verifiers) -> None:
    async with front(tmp_path, verifiers, CUT, FINE) as f:
        record = f.begin(model="auto-1", stream=True)
        seen = ""
        with pytest.raises(ApiError):
            async for chunk in f.answering.stream(record):
                seen += chunk.text
        assert seen == "one two" and f.calls() == [1, 0]
        assert record.outcome is not None and record.outcome.status == Status.PARTIAL and record.outcome.cost > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_who_goes_away_is_booked_and_stops_the_pool(tmp_path: Path, verifiers: Verifiers, stream: bool) -> None:
    slow = Answer(text="word " * 1000, pace=0.01, delay=0.0 if stream else 60.0)
    async with front(tmp_path, verifiers, slow, slow, keys={"team": KeySettings(variable="TEAM", budget_usd=1)}) as f:
        caller = f.answering.keys.named("team")
        record = f.begin(caller, model="large", stream=stream)
        task = asyncio.create_task(f.texts(record))
        await until(lambda: record.begun or (not stream and f.upstreams["large"].active > 0))
        assert f.ledger.spent("team") > 0  # set aside while it runs
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not f.upstreams["large"].active)
        assert record.outcome is not None and record.outcome.status == Status.CANCELLED
        assert f.ledger.spent("team") == record.outcome.cost
        assert (record.outcome.cost > 0) == bool(record.outcome.attempts)


async def test_what_an_answer_may_cost_is_set_aside_so_that_requests_side_by_side_share_no_budget(
    tmp_path: Path, verifiers: Verifiers
) -> None:
    long = Answer(text="word", completion_tokens=4000, delay=0.5)
    async with front(tmp_path, verifiers, long, long, keys={"team": KeySettings(variable="TEAM", budget_usd=0.1)}) as f:
        caller = f.answering.keys.named("team")
        asked = {"model": "large", "max_tokens": 4000}  # $0.06 an answer

        async def outcome() -> str:
            try:
                return "".join(await f.texts(f.begin(caller, **asked)))
            except ApiError as error:
                return str(error.code)

        answers = await asyncio.gather(*(outcome() for _ in range(30)))
        assert sorted(answers) == ["insufficient_quota"] * 28 + ["word"] * 2, "the second is under way when it ends"


async def test_a_stream_that_is_not_read_to_its_end_is_booked(tmp_path: Path, verifiers: Verifiers) -> None:
    async with front(tmp_path, verifiers, FINE, Answer(text="word " * 100, pace=0.01)) as f:
        record = f.begin(model="large", stream=True)
        async with aclosing(f.answering.stream(record)) as chunks:
            async for _ in chunks:
                break
        assert record.outcome is not None and record.outcome.status == Status.CANCELLED
        assert [attempt.status for attempt in record.outcome.attempts] == [Status.CANCELLED]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_answer_is_never_given(tmp_path: Path, verifiers: Verifiers, stream: bool) -> None:
    async with front(tmp_path, verifiers, Answer(text=BAD), Answer(text=GOOD)) as f:
        record = f.begin(model="auto-1", stream=stream, **EXTRACT)
        assert "".join(await f.texts(record)) == GOOD
        assert [(attempt.role, attempt.verdict) for attempt in record.attempts] == [
            (Role.ANSWER, Verdict.FAILED),
            (Role.ESCALATION, Verdict.PASSED),
        ]
        assert [(each.pool, each.reason) for each in record.decisions][1] == ("large", "verifier")
        assert [each.id for each in record.decisions] == [record.id, f"{record.id}.2"]
        assert record.outcome is not None and (record.outcome.status, record.outcome.pool) == (Status.OK, "large")
        again = f.begin(model="auto-1", stream=stream, **EXTRACT)
        await f.texts(again)
        assert [attempt.pool for attempt in again.attempts] == ["large"]  # its session does not try the small one again


async def test_what_a_strong_pool_streams_is_passed_on_as_it_comes(tmp_path: Path, verifiers: Verifiers) -> None:
    async with front(tmp_path, verifiers, FINE, Answer(text=GOOD)) as f:
        record = f.begin(model="large", stream=True, **EXTRACT)
        pieces = await f.texts(record)
        assert len(pieces) > 1 and "".join(pieces) == GOOD
        assert [attempt.verdict for attempt in record.attempts] == [Verdict.NONE]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "gpt-99"}, 404, "model_not_found"),
        ({"model": "large", "max_tokens": 50_000}, 400, "context_length_exceeded"),
    ],
)
async def test_what_is_not_let_in_or_fits_nowhere_calls_nobody(
    tmp_path: Path, verifiers: Verifiers, body: dict[str, Any], status: int, code: str
) -> None:
    async with front(tmp_path, verifiers, FINE, FINE) as f:
        with pytest.raises(ApiError) as raised:
            await f.texts(f.begin(**body))
        assert (raised.value.status, raised.value.code) == (status, code)
        assert f.calls() == [0, 0]


async def test_a_fault_of_the_router_is_told_as_one_and_booked(tmp_path: Path, verifiers: Verifiers) -> None:
    async with front(tmp_path, verifiers, FINE, FINE) as f:
        await f.answering.relay.close()

        def broken() -> Any:
            raise ZeroDivisionError("a fault in the policy")

        f.answering.deciding.policies = broken
        record = f.begin()
        with pytest.raises(ApiError) as raised:
            await f.texts(record)
        assert raised.value.status == 500 and "policy" not in raised.value.message
        assert record.outcome is not None and record.outcome.status == Status.ERROR


async def test_a_later_turn_is_compared_with_a_pool_that_has_its_session_cached(
    tmp_path: Path, verifiers: Verifiers
) -> None:
    """Whoever sends everything to one pool reads the earlier turns from its cache."""
    async with front(tmp_path, verifiers, small=FINE, large=FINE) as f:
        turns = [*HELLO, {"role": "assistant", "content": "All is well."}, {"role": "user", "content": "And you?"}]
        first = f.begin()
        await f.texts(first)
        second = f.begin(messages=turns)
        await f.texts(second)
        assert first.outcome and second.outcome and first.outcome.pool == second.outcome.pool == "small"
        assert second.cached == {"small": first.request.prompt_tokens}
        warm = first.request.prompt_tokens * 100 // second.request.prompt_tokens
        assert first.outcome.counterfactual == 100 * 3_000_000 + 10 * 15_000_000
        assert second.outcome.counterfactual == (100 - warm) * 3_000_000 + warm * 300_000 + 10 * 15_000_000


@pytest.mark.parametrize(("usd", "most"), [(0.0, 3), (0.00003, 1)])
async def test_parts_whose_expected_cost_exceeds_a_plans_limit_run_one_after_the_other(
    tmp_path: Path, verifiers: Verifiers, usd: float, most: int
) -> None:
    parts = "Please do the following:\n1. Write a haiku about rain.\n2. Explain what DNA is.\n3. List three fruits."
    slow = Answer(text="All is well.", prompt_tokens=50, completion_tokens=10, pace=0.02)
    async with front(tmp_path, verifiers, small=slow, large=slow, plan=PlanSettings(usd=usd)) as f:
        record = f.begin(model="auto-1", messages=[{"role": "user", "content": parts}])
        await f.texts(record)
        assert not record.whole and record.outcome and record.outcome.status == Status.OK
        assert f.upstreams["small"].most_active == most
        assert not record.expected
