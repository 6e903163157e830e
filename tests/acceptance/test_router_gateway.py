"""OpenAI's client, unchanged, before a router process: what it gets, what it is told, and what stops when it goes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import openai
import pytest

from contracts import subjects
from infra.bus import Bus
from tests.acceptance.gateway import Router
from tests.upstream import Answer

HELLO: Any = [{"role": "user", "content": "Hello there, how are you?"}]
PRICES = {"price_in": 3.0, "price_out": 15.0}
CHEAP = {"tier": "compact", "price_in": 0.1, "price_out": 0.2}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"name": "weather", "arguments": '{"city": "Reykjav\u00edk"}'}
SECRETS = {
    "TEAM_KEY": "sk-team-5f0e", "POOR_KEY": "sk-poor-77aa", "SLOW_KEY": "sk-slow-1b2c", "UPSTREAM_KEY": "sk-up-9d3e",
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """Two pools, three keys; every test sets what the upstreams say."""
    router = Router(
        tmp_path_factory.mktemp("router"),
        pools={
            "small": {**CHEAP, "key_variable": "UPSTREAM_KEY", "retries": 0},
            "large": {**PRICES, "retries": 0, "failures": 100, "cooldown_seconds": 0.3},
        },
        keys={
            "team": {"variable": "TEAM_KEY"},
            "poor": {"variable": "POOR_KEY", "budget_usd": 0.0001, "pools": ["large"]},
            "slow": {"variable": "SLOW_KEY", "requests_per_minute": 1},
        },
        secrets=SECRETS,
    )
    try:
        yield router
    finally:
        router.close()


@pytest.fixture
def router(shared: Router) -> Router:
    for upstream in shared.upstreams.values():
        upstream.script = Answer(text="All is well, and so is this.")
    return shared


@pytest.fixture
async def client(router: Router) -> AsyncIterator[openai.AsyncOpenAI]:
    async with router.client(SECRETS["TEAM_KEY"]) as client:
        yield client


async def text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_a_plain_answer(router: Router, client: openai.AsyncOpenAI) -> None:
    router.upstreams["large"].script = Answer(text="Fine.", model="large-2026", prompt_tokens=100, completion_tokens=10)
    raw = await client.chat.completions.with_raw_response.create(model="large", messages=HELLO)
    answer, headers = raw.parse(), raw.headers
    assert answer.choices[0].message.content == "Fine." and answer.model == "large-2026"
    assert answer.id == headers["x-tailrace-request-id"]
    assert answer.usage is not None and answer.usage.total_tokens == 110
    assert answer.usage.to_dict()["cost"] == pytest.approx(100 * 3e-6 + 10 * 15e-6)
    assert headers["x-tailrace-model"] == "large" and headers["x-tailrace-tier"] == "strong"
    assert headers["x-tailrace-decision"] == "named" and headers["x-tailrace-attempts"] == "1"
    assert headers["x-tailrace-cost"] == "0.00045" and float(headers["x-tailrace-overhead-ms"]) > 0
    assert router.upstreams["large"].calls[-1].body["model"] == "large"


async def test_a_stream(router: Router, client: openai.AsyncOpenAI) -> None:
    words = " ".join(f"w\u00f6rd{number}" for number in range(12))
    router.upstreams["small"].script = router.upstreams["large"].script = Answer(text=words, split=7)
    raw = await client.chat.completions.with_raw_response.create(model="auto", messages=HELLO, stream=True)
    chunks = [chunk async for chunk in raw.parse()]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == words
    assert {chunk.id for chunk in chunks} == {raw.headers["x-tailrace-request-id"]}
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert not any(chunk.usage for chunk in chunks)
    assert raw.headers["x-tailrace-model"] in router.upstreams and raw.headers["x-tailrace-attempts"] == "1"


@pytest.mark.parametrize("usage", ["reported", "none", "zero", "finish", "each"])
async def test_usage_is_the_last_chunk_of_a_stream(router: Router, client: openai.AsyncOpenAI, usage: Any) -> None:
    router.upstreams["large"].script = Answer(text="one two three four", usage=usage)
    options: Any = {"include_usage": True}
    stream = await client.chat.completions.create(model="large", messages=HELLO, stream=True, stream_options=options)
    *chunks, last = [chunk async for chunk in stream]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage is not None
    assert last.usage.prompt_tokens > 0 and last.usage.completion_tokens > 0 and last.usage.to_dict()["cost"] > 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_tools(router: Router, client: openai.AsyncOpenAI, streamed: bool) -> None:
    for upstream in router.upstreams.values():
        upstream.script = Answer(text="", tool_calls=[CALL, CALL])
    asked: Any = {
        "model": "auto",
        "messages": [{"role": "user", "content": "Weather in Reykjav\u00edk?"}],
        "tools": TOOLS,
    }
    if streamed:
        async with client.chat.completions.stream(**asked) as stream:
            answer = await stream.get_final_completion()
    else:
        answer = await client.chat.completions.create(**asked)
    calls = answer.choices[0].message.tool_calls
    assert (
        calls is not None
        and [(call.function.name, call.function.arguments) for call in calls] == [("weather", CALL["arguments"])] * 2
    )
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("streamed", [False, True])
async def test_json_that_is_none_is_asked_for_again(router: Router, client: openai.AsyncOpenAI, streamed: bool) -> None:
    router.upstreams["small"].script = Answer(text='{"city": "Oslo",')
    router.upstreams["large"].script = Answer(text='{"city": "Oslo"}')
    asked: Any = {
        "model": "auto-0.9",
        "messages": [{"role": "user", "content": "Extract the city as JSON: I live in Oslo."}],
        "response_format": {"type": "json_object"},
        "extra_headers": {"x-tailrace-session": f"extracting-{streamed}"},  # one that has escalated stays strong
    }
    before = router.upstreams["small"].count
    if streamed:
        text = await text_of(await client.chat.completions.create(stream=True, **asked))
    else:
        raw = await client.chat.completions.with_raw_response.create(**asked)
        text = raw.parse().choices[0].message.content or ""
        assert raw.headers["x-tailrace-attempts"] == "2" and raw.headers["x-tailrace-model"] == "large"
    assert json.loads(text) == {"city": "Oslo"}
    assert router.upstreams["small"].count == before + 1


async def test_an_answer_says_where_another_pool_had_to_give_it(router: Router, client: openai.AsyncOpenAI) -> None:
    router.upstreams["small"].script = Answer(status=503)
    router.upstreams["large"].script = Answer(text="Hei")
    raw = await client.chat.completions.with_raw_response.create(
        model="auto-1",  # the cheapest
        messages=[{"role": "user", "content": "Translate to Norwegian: hi"}],
        extra_headers={"x-tailrace-session": "falling back"},
    )
    assert raw.headers["x-tailrace-decision"] == "fallback" and raw.headers["x-tailrace-model"] == "large"
    assert int(raw.headers["x-tailrace-attempts"]) >= 2
    router.upstreams["small"].script = Answer(text="Hei")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_of_several_parts(router: Router, client: openai.AsyncOpenAI, streamed: bool) -> None:
    def script(body: dict[str, Any], _: int) -> Answer:
        asked = body["messages"][-1]["content"]
        for word, text in (("French", "Bonjour."), ("haiku", "Leaves fall."), ("17*23", "17*23 = 391")):
            if word in asked:
                return Answer(text=text)
        return Answer(status=400)

    for upstream in router.upstreams.values():
        upstream.script = script
    asks = "1. Translate 'good morning' into French.\n2. Write a haiku about autumn leaves.\n3. Compute 17*23."
    asked: Any = {"model": "auto", "messages": [{"role": "user", "content": asks}]}
    if streamed:
        text = await text_of(await client.chat.completions.create(stream=True, **asked))
    else:
        raw = await client.chat.completions.with_raw_response.create(**asked)
        text = raw.parse().choices[0].message.content or ""
        assert int(raw.headers["x-tailrace-attempts"]) == 3
    assert [text.find(part) > -1 for part in ("Bonjour.", "Leaves fall.", "391")] == [True] * 3
    assert text.index("Bonjour.") < text.index("Leaves fall.") < text.index("391")


async def test_models_that_are_listed_can_be_asked_for(client: openai.AsyncOpenAI) -> None:
    names = [model.id async for model in client.models.list()]
    assert names == ["auto", "large", "small"]
    for name in [*names, "auto-0.5"]:
        assert (await client.models.retrieve(name)).id == name
        assert (await client.chat.completions.create(model=name, messages=HELLO)).choices


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "code", "param"),
    [
        ({"model": "gpt-99"}, openai.NotFoundError, "model_not_found", "model"),
        ({"messages": []}, openai.BadRequestError, None, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError, None, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, openai.BadRequestError, None, "messages[0].content"),
        ({"n": 0}, openai.BadRequestError, None, "n"),
        (
            {"messages": [{"role": "user", "content": "word " * 100_000}]},
            openai.BadRequestError, "context_length_exceeded", "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            openai.BadRequestError, "unsupported", "messages",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streamed", [False, True])
async def test_mistakes(
    client: openai.AsyncOpenAI, change: dict[str, Any], kind: type[Any], code: str | None, param: str, streamed: bool
) -> None:
    asked: Any = {"model": "auto", "messages": HELLO, "stream": streamed, **change}
    with pytest.raises(kind) as raised:
        await client.chat.completions.create(**asked)
    assert (raised.value.code, raised.value.param) == (code, param)


async def test_an_upstreams_refusal_reaches_the_application(router: Router, client: openai.AsyncOpenAI) -> None:
    error = {"message": "that tool is wrong", "type": "invalid_request_error", "param": "tools", "code": "bad_tool"}
    router.upstreams["large"].script = Answer(status=400, error=error)
    with pytest.raises(openai.BadRequestError, match="that tool is wrong") as raised:
        await client.chat.completions.create(model="large", messages=HELLO)
    assert (raised.value.code, raised.value.param) == ("bad_tool", "tools")
    assert raised.value.response.headers["x-tailrace-request-id"]


async def test_keys(router: Router) -> None:
    for key in ("none", "sk-team-5f0f", SECRETS["UPSTREAM_KEY"]):
        with pytest.raises(openai.AuthenticationError):
            await router.client(key).chat.completions.create(model="auto", messages=HELLO)
        with pytest.raises(openai.AuthenticationError):
            await router.client(key).models.list()


async def test_a_rate_limit_says_when_to_come_again(router: Router) -> None:
    slow = router.client(SECRETS["SLOW_KEY"])
    await slow.chat.completions.create(model="large", messages=HELLO)
    with pytest.raises(openai.RateLimitError) as raised:
        await slow.chat.completions.create(model="large", messages=HELLO)
    assert raised.value.code == "rate_limit_exceeded"
    assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60


async def test_a_budget_ends_and_pools_are_the_keys_own(router: Router) -> None:
    router.upstreams["large"].script = Answer(text="Dear.", prompt_tokens=1000, completion_tokens=1000)
    poor = router.client(SECRETS["POOR_KEY"]).with_options(max_retries=3)
    assert [model.id async for model in poor.models.list()] == ["auto", "large"]
    with pytest.raises(openai.NotFoundError):
        await poor.chat.completions.create(model="small", messages=HELLO)
    before = router.upstreams["large"].count
    await poor.chat.completions.create(model="auto", messages=HELLO, max_tokens=3)  # dearer than was to be expected
    with pytest.raises(openai.RateLimitError) as raised:
        await poor.chat.completions.create(model="auto", messages=HELLO, max_tokens=3)
    assert raised.value.code == "insufficient_quota"
    assert router.upstreams["large"].count == before + 1


async def test_an_overloaded_pool_and_all_of_them_cooling_down(router: Router, client: openai.AsyncOpenAI) -> None:
    busy = Answer(status=429, headers={"retry-after": "2"})
    router.upstreams["large"].script = busy
    for _ in range(2):  # the first from the upstream, the second because it cools down
        with pytest.raises(openai.RateLimitError) as raised:
            await client.chat.completions.create(model="large", messages=HELLO)
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 10
    router.upstreams["large"].script = Answer(text="Back.")
    assert (await client.chat.completions.create(model="auto", messages=HELLO)).choices  # the other one is well
    async with aiohttp.ClientSession() as session, session.get(f"{router.url}/readyz") as ready:
        assert ready.status == 200

    async def back() -> bool:
        try:
            return bool((await client.chat.completions.create(model="large", messages=HELLO)).choices)
        except openai.RateLimitError:
            return False

    deadline = time.monotonic() + 20
    while not await back():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


async def test_every_error_has_openais_shape(router: Router) -> None:
    headers = {"authorization": f"Bearer {SECRETS['TEAM_KEY']}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for method, path, data, status in (
            ("GET", "/v1/nothing", None, 404),
            ("GET", "/v1/chat/completions", None, 405),
            ("POST", "/v1/chat/completions", b"{", 400),
            ("POST", "/v1/chat/completions", b"[" * 50_000, 400),
            ("POST", "/v1/chat/completions", b'{"model": "' + b"x" * 9_000_000 + b'"}', 413),
            ("POST", "/v1/feedback", b"{}", 400),
            ("POST", "/v1/feedback", b'{"request_id": "chatcmpl-0", "score": 1}', 404),
            ("GET", "/v1/models/gpt-99", None, 404),
        ):
            async with session.request(method, router.url + path, data=data) as response:
                assert response.status == status, (method, path)
                error = (await response.json())["error"]
                assert set(error) == {"message", "type", "param", "code"} and error["message"]
        async with session.get(f"{router.url}/healthz") as response:
            assert response.status == 200


async def test_half_a_surrogate_pair_gets_through(router: Router) -> None:
    body = b'{"model": "large", "messages": [{"role": "user", "content": "cut \\ud83d"}]}'
    headers = {"authorization": f"Bearer {SECRETS['TEAM_KEY']}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{router.url}/v1/chat/completions", data=body) as response,
    ):
        assert response.status == 200
    assert router.upstreams["large"].calls[-1].body["messages"][0]["content"] == "cut \ufffd"


@pytest.mark.parametrize("streamed", [False, True])
async def test_half_a_surrogate_pair_in_an_answer_does_not_lose_it(
    router: Router, client: openai.AsyncOpenAI, streamed: bool
) -> None:
    said = rb'{"role": "assistant", "content": "cut \ud83d"}'
    if streamed:
        chunk = rb'data: {"choices": [{"index": 0, "delta": %b, "finish_reason": "stop"}]}' % said
        router.upstreams["large"].script = Answer(raw=chunk + b"\n\ndata: [DONE]\n\n")
        text = await text_of(await client.chat.completions.create(model="large", messages=HELLO, stream=True))
    else:
        whole = rb'{"choices": [{"index": 0, "message": %b, "finish_reason": "stop"}]}' % said
        router.upstreams["large"].script = Answer(raw=whole)
        answer = await client.chat.completions.create(model="large", messages=HELLO)
        text = answer.choices[0].message.content or ""
    assert text.startswith("cut ")


# --- what breaks on the way -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["error", "close", "abort"])
async def test_a_failure_in_mid_stream_is_an_error(router: Router, client: openai.AsyncOpenAI, then: Any) -> None:
    router.upstreams["large"].script = Answer(text="one two three four five six", after=4, then=then)
    stream = await client.chat.completions.create(model="large", messages=HELLO, stream=True)
    seen = ""
    with pytest.raises(openai.APIError):
        async for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
    assert seen == "one two three"


@pytest.mark.parametrize("streamed", [False, True])
async def test_who_goes_away_stops_the_upstream(router: Router, client: openai.AsyncOpenAI, streamed: bool) -> None:
    upstream = router.upstreams["large"]
    upstream.script = Answer(text="word " * 1000, pace=0.02, delay=0.0 if streamed else 60.0)
    before = upstream.count
    async with asyncio.timeout(10):
        if streamed:
            stream = await client.chat.completions.create(model="large", messages=HELLO, stream=True)
            async for _ in stream:
                break
            await stream.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.3).chat.completions.create(model="large", messages=HELLO)
    router.until(lambda: upstream.count > before and upstream.active == 0, "the upstream is let go")
    assert upstream.calls[-1].gone and upstream.calls[-1].sent < 500


async def test_feedback_is_taken_for_ones_own_answers_only(router: Router, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="large", messages=HELLO)
    said: Any = {"request_id": answer.id, "score": 0.5, "passed": True, "comment": "good enough"}
    async with aiohttp.ClientSession() as session:
        for key, status in (("POOR_KEY", 404), ("TEAM_KEY", 200)):
            headers = {"authorization": f"Bearer {SECRETS[key]}"}
            async with session.post(f"{router.url}/v1/feedback", json=said, headers=headers) as response:
                assert response.status == status
    bus = await Bus.connect(router.server.settings, "onlooker")
    try:
        async with asyncio.timeout(10):
            async for received in bus.read(subjects.FEEDBACK, consumer="test", run="front"):
                feedback = received.message
                break
    finally:
        await bus.close()
    assert (feedback.request_id, feedback.score, feedback.passed) == (answer.id, 0.5, True)
    assert feedback.key == "team"


async def test_no_key_and_no_prompt_is_in_the_log(router: Router, client: openai.AsyncOpenAI) -> None:
    prompt: Any = [{"role": "user", "content": "my secret is xyzzy-prompt"}]
    router.upstreams["large"].script = Answer(status=500, error={"message": "xyzzy-prompt sk-up-9d3e failed"})
    with pytest.raises(openai.APIError):
        await client.chat.completions.create(model="large", messages=prompt)
    log = router.log.read_text()
    assert not [secret for secret in (*SECRETS.values(), "xyzzy-prompt") if secret in log]
    assert "Traceback" not in log and "Exception in ASGI" not in log
