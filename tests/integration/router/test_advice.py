"""Decisions over the bus: asked once, answered once, also with several routers and with what cannot be decided."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from contracts.examples import START_NS
from contracts.messages import RouteDecision, RouteRequest
from contracts.subjects import ROUTE_DECISION, ROUTE_REQUEST
from infra.bus import Bus
from router.admission.keys import Keys
from router.admission.parse import LONG_BODY, MAX_BYTES, parse
from router.advice import Advisor, Decide, answer_requests
from router.answering import Answering
from router.ledger.books import Books
from router.ledger.spending import Reservation
from router.ledger.store import Ledger
from router.outbox import Outbox
from router.policy.decide import NEUTRAL
from router.pools.openai import OpenAIPool
from router.pools.relay import Relay
from router.settings import KeySettings, PoolSettings, RouterSettings
from router.verification.verifiers import Verifiers
from tests.integration.helpers import dead_letters, first, publish_raw

POOLS = {
    "small": PoolSettings(tier="compact", url="http://127.0.0.1:9/v1", price_in=0.1, price_out=0.2),
    "large": PoolSettings(tier="strong", url="http://127.0.0.1:9/v1", price_in=3.0, price_out=15.0, price_cached=0.3),
}
SECRETS = {"TEAM": "sk-team", "POOR": "sk-poor"}


@pytest.fixture
async def advisor(bus: Bus, run: str, tmp_path: Path) -> AsyncIterator[Advisor]:
    """Of a router whose key `team` may use the large pool alone, and whose key `poor` has spent what it had."""
    keys = {
        "team": KeySettings(variable="TEAM", pools=frozenset({"large"})),
        "poor": KeySettings(variable="POOR", budget_usd=1.0),
    }
    settings = RouterSettings(directory=tmp_path, pools=POOLS, keys=keys, exploration=0.0)
    ledger, outbox = Ledger(tmp_path), Outbox(bus, tmp_path, run)
    running = asyncio.create_task(outbox.run())
    relay = Relay({name: OpenAIPool(name, each) for name, each in POOLS.items()})
    spent: Reservation = ledger.reserve("poor", 2 * 10**12)
    answering = Answering(
        run, settings, relay, Keys(keys, SECRETS, 0.0), Books(ledger, outbox), Verifiers(1), lambda: (NEUTRAL, None)
    )
    yield Advisor(answering)
    spent.release()
    await relay.close()
    await outbox.close()
    await running
    ledger.close()


@asynccontextmanager
async def routers(bus: Bus, run: str, *decide: Decide) -> AsyncIterator[list[asyncio.Task[None]]]:
    """As many as there are ways to decide, on one bus."""
    stopping = asyncio.Event()
    tasks = [asyncio.create_task(answer_requests(bus, run, each, create=True, stopping=stopping)) for each in decide]
    try:
        yield tasks
    finally:
        stopping.set()
        await asyncio.gather(*tasks)


async def unanswered(bus: Bus, run: str) -> int:
    """Requests that no router has taken, or has finished with."""
    info = await bus.consumer_info("ROUTES", f"{run}-route")
    return (info.num_pending or 0) + (info.num_ack_pending or 0)


def request(run: str, id: str, body: object, key: str = "") -> RouteRequest:
    text = body if isinstance(body, str) else json.dumps(body)
    return RouteRequest(id=id, run=run, body=text, key=key, issued_ns=START_NS)


def chat(text: str = "fix the typo", model: str = "auto") -> dict:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


async def test_a_request_over_the_bus_is_answered_once_by_one_of_several_routers(
    bus: Bus, run: str, advisor: Advisor
) -> None:
    async with routers(bus, run, advisor, advisor):
        for number in range(20):
            await bus.publish(ROUTE_REQUEST, request(run, f"ask-{number}", chat()), id=f"ask-{number}", run=run)
        await bus.publish(ROUTE_REQUEST, request(run, "ask-0", chat()), id="ask-0 again", run=run)
        got = await first(bus.read(ROUTE_DECISION, consumer="test", run=run), 20)
        async with asyncio.timeout(10):
            while await unanswered(bus, run):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    decisions = [each.message async for each in bus.read(ROUTE_DECISION, consumer="test", follow=False, run=run)]
    assert sorted(each.request_id for each in decisions) == sorted(f"ask-{number}" for number in range(20))
    assert {each.message.pool for each in got} <= POOLS.keys()
    assert all(each.message.order and each.message.policy and not each.message.error for each in got)


CASES = {
    "a named pool": (chat(model="large"), "", "large", "named"),
    "a key that may use one pool": (chat(), "team", "large", ""),
    "no JSON": ("{", "", "", "refused"),
    "no messages": ({"model": "auto", "messages": []}, "", "", "refused"),
    "an unknown model": (chat(model="enormous"), "", "", "refused"),
    "a pool that the key may not use": (chat(model="small"), "team", "", "refused"),
    "an unknown key": (chat(), "nobody", "", "refused"),
    "a prompt that fits nowhere": (chat("word " * 200_000), "", "", "refused"),
    "a body beyond the gateway's limit": ("x" * (MAX_BYTES + 1), "", "", "refused"),
    "nested without end": ("[" * 100_000, "", "", "refused"),
}


@pytest.mark.parametrize("name", CASES)
async def test_what_is_decided(advisor: Advisor, run: str, name: str) -> None:
    body, key, pool, reason = CASES[name]
    decision = await advisor(request(run, "ask", body, key))
    assert (decision.id, decision.request_id, decision.run) == ("ask", "ask", run)
    assert decision.pool == pool
    assert reason in ("", decision.reason)
    assert bool(decision.error) is (not pool)


async def test_what_a_session_has_cached_counts_for_its_key_alone(advisor: Advisor, run: str) -> None:
    """One conversation of one key: a switch away from the cache costs what it costs the gateway's requests."""
    answering = advisor._answering
    body = chat("word " * 2000)
    cold = await advisor(request(run, "cold", body))
    session = parse(json.dumps(body).encode()).session
    answering.deciding.affinity.used(f"/{session}", "large", 2000, time.monotonic())
    warm = await advisor(request(run, "warm", body))
    other = await advisor(request(run, "other", body, "team"))
    assert warm.scores["large"].cost < cold.scores["large"].cost == other.scores["large"].cost


async def test_a_long_request_is_decided_like_a_short_one(advisor: Advisor, run: str) -> None:
    body = chat() | {"metadata": {"padding": "x" * 2 * LONG_BODY}}
    assert (await advisor(request(run, "ask", body))).pool in POOLS
    refused = await advisor(request(run, "ask", json.dumps(body)[:-1]))
    assert refused.reason == "refused" and refused.error and refused.requested == ""
    assert (await advisor(request(run, "ask", chat(model="enormous")))).requested == "enormous"


async def test_a_key_without_budget_is_told_so(advisor: Advisor, run: str) -> None:
    decision = await advisor(request(run, "ask", chat(), "poor"))
    assert decision.pool == "" and decision.error


async def test_ids_that_would_break_headers_and_messages_that_are_none(bus: Bus, run: str, advisor: Advisor) -> None:
    hostile = "x\r\nNats-Msg-Id: other\r\n\r\n\u2028" + "y" * 5000
    async with routers(bus, run, advisor):
        await publish_raw(bus, ROUTE_REQUEST.subject(run=run), b"\xc1", **{"Tailrace-Schema": "route_request/1"})
        await bus.publish(ROUTE_REQUEST, request(run, hostile, chat()), id="hostile", run=run)
        (got,) = await first(bus.read(ROUTE_DECISION, consumer="test", run=run), 1)
        assert got.message.request_id == hostile and got.message.pool
        assert [letter.consumer for letter in await dead_letters(bus, run)] == [f"{run}-route"]


async def test_a_decision_that_fails_is_asked_for_again(bus: Bus, run: str, advisor: Advisor) -> None:
    failed: list[str] = []

    async def shaky(asking: RouteRequest) -> RouteDecision:
        if not failed:
            failed.append(asking.id)
            raise RuntimeError("for once")
        return await advisor(asking)

    async with routers(bus, run, shaky):
        await bus.publish(ROUTE_REQUEST, request(run, "ask", chat()), id="ask", run=run)
        (got,) = await first(bus.read(ROUTE_DECISION, consumer="test", run=run), 1)
    assert failed and got.message.pool
