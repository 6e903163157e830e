"""What requests have cost, as `tailrace costs` tells it beside a running router: nothing is free, or unknown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import openai
import pytest

from contracts.messages import RouteDecision, RouteRequest
from contracts.subjects import ROUTE_DECISION, ROUTE_REQUEST
from infra.bus import Bus
from router.ledger import report, schema
from tests.acceptance.gateway import Router
from tests.upstream import Answer

HELLO: Any = [{"role": "user", "content": "Hello there, how are you?"}]
KEYS = {"TEAM_KEY": "sk-team-1"}
SMALL, LARGE = (
    100_000 * 1000 + 200_000 * 10,
    3_000_000 * 1000 + 15_000_000 * 10,
)  # of an answer as below, in picodollars
ANSWER = Answer(text="one two three four five six", prompt_tokens=1000, completion_tokens=10)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    calm = {"retries": 0, "failures": 1000}
    router = Router(
        tmp_path_factory.mktemp("router"),
        pools={
            "small": {"tier": "compact", "price_in": 0.1, "price_out": 0.2, **calm},
            "large": {"tier": "strong", "price_in": 3.0, "price_out": 15.0, **calm},
        },
        keys={"team": {"variable": "TEAM_KEY"}},
        secrets=KEYS,
    )
    try:
        yield router
    finally:
        router.close()


@pytest.fixture
def router(shared: Router) -> Router:
    for upstream in shared.upstreams.values():
        upstream.script = ANSWER
    return shared


def costs(router: Router, *arguments: str) -> dict[str, Any]:
    file = router.directory / "costs.json"
    command = [str(Path(sys.executable).parent / "tailrace"), "costs", "--directory", str(router.directory / "router")]
    done = subprocess.run([*command, "--json", str(file), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


def total(router: Router, requests: int) -> report.Row:
    """All there is once so many requests are in the ledger."""
    with closing(schema.connect(router.directory / "router" / schema.NAME)) as ledger:
        router.until(lambda: report.total(ledger).requests == requests, f"{requests} requests are in the ledger", 20)
        return report.total(ledger)


async def test_the_bill_of_a_day(router: Router) -> None:
    """Fallback, a streamed alias, a failure in mid-stream, and a kill: one story, because each adds to the last."""
    async with router.client(KEYS["TEAM_KEY"]) as client:
        # an alias that is streamed, without the usage being asked for
        stream = await client.chat.completions.create(model="auto", messages=HELLO, stream=True)
        async for _ in stream:
            pass
        bill = total(router, 1)
        first_cost = bill.cost
        assert first_cost in (SMALL, LARGE)
        assert bill.counterfactual == LARGE

        # a fallback: what answered is what is paid
        answered, other = ("small", "large") if first_cost == SMALL else ("large", "small")
        router.upstreams[answered].script = Answer(status=503)
        reply = await client.chat.completions.with_raw_response.create(model="auto", messages=HELLO)
        assert reply.headers["x-tailrace-model"] == other and float(reply.headers["x-tailrace-cost"]) > 0
        bill = total(router, 2)
        assert bill.cost == SMALL + LARGE

        # a failure in mid-stream: what had come was paid for
        router.upstreams["large"].script = Answer(text=ANSWER.text, after=4, then="abort")
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(model="large", messages=HELLO, stream=True):
                pass
        bill = total(router, 3)
        partial = bill.cost - SMALL - LARGE
        assert partial > 3 * 15_000_000  # three words at least, and the prompt

        # a pool that was named: nothing is decided, nothing is saved
        router.upstreams["small"].script = ANSWER
        saved = bill.saved
        await client.chat.completions.create(model="small", messages=HELLO)
        bill = total(router, 4)
        assert bill.cost == 2 * SMALL + LARGE + partial
        assert bill.saved == saved

    by_key = costs(router, "--by", "key")["rows"]
    assert [(row["name"], row["requests"], row["cost_picodollars"]) for row in by_key] == [("team", 4, bill.cost)]
    os.killpg(router.process.pid, signal.SIGKILL)
    router.process.wait(10)
    router.process = router.start()
    router.until(lambda: len(router.events("ready")) == 2, "it is there again", 30)
    assert total(router, 4) == bill


async def test_where_would_it_go_is_answered_over_the_bus(router: Router) -> None:
    """Also after somebody has deleted what the routers share: the router goes on, and makes it again."""
    bus = await Bus.connect(router.server.settings, "asker")

    async def ask(id: str) -> RouteDecision:
        asking = RouteRequest(id=id, run="front", body=json.dumps({"model": "auto", "messages": HELLO}), key="team")
        await bus.publish(ROUTE_REQUEST, asking, id=asking.id, run="front")
        async with asyncio.timeout(30), aclosing(bus.read(ROUTE_DECISION, consumer="asker", run="front")) as decisions:
            async for received in decisions:
                if received.message.request_id == id:
                    return received.message
        raise AssertionError("the read ended")

    before = [upstream.count for upstream in router.upstreams.values()]
    try:
        found = await ask("ask-1")
        assert found.pool in ("small", "large") and found.key == "team" and not found.error
        await bus.connection.client.jetstream().delete_consumer("ROUTES", "front-route")
        assert (await ask("ask-2")).pool == found.pool
    finally:
        await bus.close()
    assert [upstream.count for upstream in router.upstreams.values()] == before
    assert router.process.poll() is None
