"""What a router does while pools die, without its server, when it is told to stop, and when it is set up wrongly."""

from __future__ import annotations

import asyncio
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from nats.aio.client import Client

from contracts import subjects
from infra.bus import Bus
from tests.acceptance.gateway import Router
from tests.upstream import Answer

HELLO: Any = [{"role": "user", "content": "Hello there, how are you?"}]
STREAMS = 64
WORDS = " ".join(f"word{number}" for number in range(40))
POOLS = {
    "first": {"price_in": 1.0, "price_out": 1.0, "retries": 0, "cooldown_seconds": 1.0},
    "second": {"price_in": 2.0, "price_out": 2.0, "retries": 0, "cooldown_seconds": 1.0},
}


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router that outlives what happens around it."""
    router = Router(tmp_path_factory.mktemp("router"), POOLS)
    try:
        yield router
    finally:
        router.close()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    """A router that is told to stop."""
    router = Router(tmp_path, POOLS, SERVICE__DRAIN_SECONDS=4)
    try:
        yield router
    finally:
        router.close()


async def one_stream(client: openai.AsyncOpenAI, number: int, begun: asyncio.Event) -> tuple[str, str]:
    """What came, and how it ended."""
    seen = ""
    try:
        stream = await client.chat.completions.create(
            model="auto", messages=HELLO, stream=True, extra_headers={"x-tailrace-session": f"session {number}"}
        )
        async for chunk in stream:
            begun.set()
            if chunk.choices:
                seen += chunk.choices[0].delta.content or ""
    except openai.APIError as error:
        return seen, error.message
    return seen, ""


async def test_many_streams_while_a_pool_dies(lasting: Router) -> None:
    lasting.upstreams["first"].script = Answer(text=WORDS, pace=0.02)
    lasting.upstreams["second"].script = Answer(text=WORDS)
    begun = asyncio.Event()
    async with lasting.client() as client, asyncio.timeout(40):
        streams = [asyncio.create_task(one_stream(client, number, begun)) for number in range(STREAMS)]
        await begun.wait()
        assert lasting.upstreams["first"].active > 0
        lasting.stop_upstream("first")
        ends = await asyncio.gather(*streams)
        assert all(seen == WORDS if not error else WORDS.startswith(seen) for seen, error in ends)
        assert any(error for _, error in ends)  # begun on the pool that died: half an answer is not passed off as one
        after = [await one_stream(client, number, begun) for number in range(STREAMS, STREAMS + 4)]
        assert after == [(WORDS, "")] * 4
    lasting.start_upstream("first")
    lasting.until(lambda: not lasting.upstreams["second"].active, "nothing is left running")


async def test_answers_go_on_without_the_server_and_are_published_when_it_is_back(lasting: Router) -> None:
    async def ask() -> str:
        return (await client.chat.completions.create(model="auto", messages=HELLO)).id

    async with lasting.client() as client, asyncio.timeout(60):
        ids = [await ask()]
        lasting.server.kill()
        ids += [await ask(), await ask(), await ask()]
        stream = await client.chat.completions.create(model="auto", messages=HELLO, stream=True)
        ids += {chunk.id async for chunk in stream}
        async with aiohttp.ClientSession() as session, session.get(f"{lasting.url}/readyz") as ready:
            assert ready.status == 200
        lasting.server.start()
        bus = await Bus.connect(lasting.server.settings, "onlooker")
        try:
            seen: list[str] = []
            async for received in bus.read(subjects.ROUTE_OUTCOME, consumer="test", run="front"):
                seen += {received.message.request_id} & set(ids)
                if len(seen) >= len(ids):
                    break
        finally:
            await bus.close()
    assert sorted(seen) == sorted(ids)


async def test_a_server_that_lost_its_streams_gets_them_again_and_answers_go_on_meanwhile(lasting: Router) -> None:
    async with lasting.client() as client, asyncio.timeout(60):
        bus = await Bus.connect(lasting.server.settings, "operator")
        try:
            made = len(lasting.events("stream created"))
            await bus.connection.call(delete_stream)
            while len(lasting.events("stream created")) == made:
                assert (await client.chat.completions.create(model="auto", messages=HELLO)).choices
                await asyncio.sleep(0.1)
            id = (await client.chat.completions.create(model="auto", messages=HELLO)).id
            async with aclosing(bus.read(subjects.ROUTE_OUTCOME, consumer="test", run="front")) as outcomes:
                async for received in outcomes:
                    if received.message.request_id == id:
                        break
        finally:
            await bus.close()
    assert lasting.process.poll() is None


async def delete_stream(client: Client, limit: float) -> None:
    await client.jetstream(timeout=limit).delete_stream("ROUTES")


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def test_a_router_that_can_open_no_more_files_lives_on(lasting: Router) -> None:
    pid = lasting.process.pid
    allowed = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    lasting.upstreams["first"].script = lasting.upstreams["second"].script = Answer(text=WORDS, pace=0.02)
    begun = asyncio.Event()
    async with lasting.client() as client, asyncio.timeout(60):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files(pid) + STREAMS, allowed[1]))
        try:
            ends = await asyncio.gather(*(one_stream(client, number, begun) for number in range(STREAMS)))
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, allowed)
        assert all(seen == WORDS if not error else WORDS.startswith(seen) for seen, error in ends)
        assert any(error for _, error in ends), "the limit was met"
        while True:  # as soon as no pool cools down
            with suppress(openai.RateLimitError):
                assert (await client.chat.completions.create(model="auto", messages=HELLO)).choices
                break
            await asyncio.sleep(0.2)


async def test_feedback_waits_for_a_ledger_that_cannot_be_read(lasting: Router) -> None:
    ledger = lasting.directory / "router" / "ledger.sqlite"
    away = ledger.rename(ledger.with_name("away"))
    try:
        async with aiohttp.ClientSession() as session:
            said = {"request_id": "chatcmpl-0", "score": 1}
            async with session.post(f"{lasting.url}/v1/feedback", json=said) as response:
                assert response.status == 503 and response.headers["retry-after"]
                assert "ledger" in (await response.json())["error"]["message"]
    finally:
        away.rename(ledger)


async def test_running_requests_are_finished_before_it_stops(router: Router) -> None:
    for upstream in router.upstreams.values():
        upstream.script = Answer(text=WORDS, pace=0.015)
    begun = asyncio.Event()
    async with router.client() as client, asyncio.timeout(30):
        running = asyncio.create_task(one_stream(client, 0, begun))
        await begun.wait()
        router.process.send_signal(signal.SIGTERM)
        refused = None
        while refused is None:
            with suppress(openai.APIStatusError):
                try:
                    await client.chat.completions.create(model="auto", messages=HELLO, max_tokens=1)
                except openai.InternalServerError as error:
                    refused = error
        assert refused.status_code == 503 and refused.response.headers["retry-after"]
        assert await running == (WORDS, "")
    assert router.process.wait(10) == 0
    assert not router.events("requests took too long to finish and were cut off")


async def test_what_takes_too_long_is_told_so_when_it_stops(router: Router) -> None:
    for upstream in router.upstreams.values():
        upstream.script = Answer(text=WORDS, after=3, then="hang")
    begun = asyncio.Event()
    async with router.client() as client, asyncio.timeout(30):
        running = asyncio.create_task(one_stream(client, 0, begun))
        await begun.wait()
        router.process.send_signal(signal.SIGTERM)
        seen, error = await running
    assert WORDS.startswith(seen) and "stopping" in error
    assert router.process.wait(10) == 0
    assert "Traceback" not in router.log.read_text()


def test_mistakes_in_the_settings_are_one_sentence(tmp_path: Path, lasting: Router) -> None:
    port = lasting.url.rpartition(":")[2]
    keys = '{"team": {"variable": "NOT_SET"}}'
    for case, word in (({"ROUTER__PORT": port}, port), ({"ROUTER__KEYS": keys}, "NOT_SET")):
        changed = {"ROUTER__DIRECTORY": str(tmp_path / "other"), **case}
        done = subprocess.run(
            [sys.executable, "-m", "router"],
            env=lasting.environment() | {f"TAILRACE_{name}": value for name, value in changed.items()},
            capture_output=True,
            text=True,
            timeout=60,
        )
        sentences = [line for line in done.stderr.splitlines() if not line.startswith("{")]
        assert done.returncode == 2 and len(sentences) == 1 and word in sentences[0], done.stderr
