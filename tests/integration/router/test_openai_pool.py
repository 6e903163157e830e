"""An upstream over real HTTP, in all its moods."""

import asyncio
import logging

import pytest

from infra.errors import UserError
from router.chat import Chunk, Usage
from router.pools import openai, sse
from router.pools.base import Fault, PoolError
from router.pools.openai import OpenAIPool
from router.settings import PoolSettings
from tests.integration.router.pools import BODY, one_pool, until
from tests.upstream import Answer, Upstream

PROMPT = 12  # tokens of BODY, as the upstream counts them


async def streamed(pool: OpenAIPool, body: dict = BODY) -> list[Chunk]:
    return [chunk async for chunk in pool.stream(body)]


async def asked(pool: OpenAIPool, streaming: bool, body: dict = BODY) -> tuple[str, Usage]:
    """Text and usage, either way."""
    if streaming:
        chunks = await streamed(pool, body)
        return "".join(chunk.text for chunk in chunks), chunks[-1].usage
    reply = await pool.complete(body)
    return reply.text, reply.usage


async def test_a_plain_answer_with_tools():
    script = Answer(text="", tool_calls=[{"name": "ls", "arguments": '{"path": "."}'}], model="gpt-x", cached_tokens=5)
    async with one_pool(script, model="gpt-x-2026") as (pool, upstream):
        body = {**BODY, "temperature": 0.3, "unheard_of": [1], "stream": False, "stream_options": None}
        reply = await pool.complete(body)
        assert (reply.text, reply.finish, reply.model, reply.pool) == ("", "tool_calls", "gpt-x", "cloud")
        assert reply.tool_calls[0]["function"] == {"name": "ls", "arguments": '{"path": "."}'}
        assert (reply.usage.cached, reply.usage.estimated) == (5, False)
        call = upstream.calls[0]
        assert call.body == {**BODY, "model": "gpt-x-2026", "temperature": 0.3, "unheard_of": [1]}
        assert call.headers["Authorization"] == "Bearer sk-secret"


async def test_a_stream_with_tools():
    script = Answer(text="Let me look.", tool_calls=[{"name": "ls", "arguments": '{"path": "."}'}], finish="tool_calls")
    async with one_pool(script) as (pool, upstream):
        chunks = await streamed(pool, {**BODY, "stream_options": {"include_obfuscation": False}})
        assert "".join(chunk.text for chunk in chunks) == "Let me look."
        deltas = [chunk.body["choices"][0]["delta"] for chunk in chunks[:-1]]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(call["arguments"] for call in calls) == '{"path": "."}'
        assert [chunk.finish for chunk in chunks if chunk.finish] == ["tool_calls"]
        assert upstream.calls[0].body["stream"] is True
        assert upstream.calls[0].body["stream_options"] == {"include_obfuscation": False, "include_usage": True}


@pytest.mark.parametrize("how", ["reported", "finish", "each", "zero", "none"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_usage_is_always_known_and_says_where_it_was_estimated(how, streaming):
    async with one_pool(Answer(text="one two three", usage=how, prompt_tokens=PROMPT)) as (pool, _):
        _, usage = await asked(pool, streaming)
        if how in ("zero", "none"):
            assert usage.estimated and usage.prompt > 0 and usage.completion > 0
        else:
            assert (usage.prompt, usage.completion, usage.estimated) == (PROMPT, 3, False)


@pytest.mark.parametrize("how", ["reported", "finish", "each", "zero", "none"])
async def test_the_last_chunk_of_a_stream_and_no_other_bears_the_usage(how):
    async with one_pool(Answer(usage=how)) as (pool, _):
        *others, last = await streamed(pool)
        assert last.body["choices"] == [] and last.body["object"] == "chat.completion.chunk"
        assert last.body["usage"]["total_tokens"] == last.usage.prompt + last.usage.completion > 0
        assert all(chunk.usage is None and "usage" not in chunk.body and chunk.body["choices"] for chunk in others)


@pytest.mark.parametrize("streaming", [False, True])
async def test_characters_cut_by_the_network_arrive_whole(streaming):
    text = "Grüße東 🙂"
    async with one_pool(Answer(text=text, split=1)) as (pool, _):
        assert (await asked(pool, streaming))[0] == text


@pytest.mark.parametrize(
    "script,fault,wait",
    [
        (Answer(status=429, headers={"retry-after": "7"}), Fault.RATE_LIMITED, 7.0),
        (Answer(status=429), Fault.RATE_LIMITED, None),
        (Answer(status=503, headers={"retry-after": "2"}), Fault.UNAVAILABLE, 2.0),
        (Answer(status=500, raw=b"<html>oops</html>"), Fault.UNAVAILABLE, None),
        (Answer(status=401), Fault.UNAUTHORISED, None),
        (Answer(status=400, error={"message": "no", "param": "tools"}), Fault.REFUSED, None),
        (Answer(status=400, error={"message": "?", "code": "context_length_exceeded"}), Fault.TOO_LONG, None),
        (Answer(status=307, headers={"location": "http://127.0.0.1:9/"}), Fault.UNAVAILABLE, None),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
async def test_failures_cost_nothing_where_nothing_was_begun(script, fault, wait, streaming):
    async with one_pool(script) as (pool, _):
        with pytest.raises(PoolError) as caught:
            await asked(pool, streaming)
        error = caught.value
        assert (error.fault, error.status, error.retry_after) == (fault, script.status, wait)
        assert error.usage == Usage()
        if fault is Fault.REFUSED:
            assert error.body == {"message": "no", "type": None, "param": "tools", "code": None}


BEGUN = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'

BROKEN = {
    "error in a plain 200": (False, Answer(then="error"), Fault.UNAVAILABLE, 0),
    "error at the start of a stream": (True, Answer(then="error", after=0), Fault.UNAVAILABLE, 0),
    "error in mid-stream": (True, Answer(then="error", after=3), Fault.UNAVAILABLE, 2),
    "an unknown error in mid-stream": (True, Answer(then="error", after=3, error={"message": "!"}), Fault.BROKEN, 2),
    "an error in place of a stream": (True, Answer(raw=b'{"error": {"code": 429}}'), Fault.RATE_LIMITED, 0),
    "an error event": (True, Answer(raw=b"event: error\ndata: {}\n\n"), Fault.BROKEN, 0),
    "closed in a plain answer": (False, Answer(then="close", after=20), Fault.BROKEN, 0),
    "cut in a plain answer": (False, Answer(then="abort", after=20), Fault.BROKEN, 0),
    "closed at the start": (True, Answer(then="close", after=0), Fault.BROKEN, 0),
    "closed in mid-stream": (True, Answer(then="close", after=3), Fault.BROKEN, 2),
    "cut in mid-stream": (True, Answer(then="abort", after=3), Fault.BROKEN, 2),
    "ended before it finished": (True, Answer(raw=BEGUN), Fault.BROKEN, 1),
    "[DONE] alone": (True, Answer(raw=b"data: [DONE]\n\n"), Fault.BROKEN, 0),
    "no JSON in a plain answer": (False, Answer(raw=b"{nonsense"), Fault.BROKEN, 0),
    "no JSON in a stream": (True, Answer(raw=BEGUN + b"data: {x\n\n"), Fault.BROKEN, 1),
    "no object": (False, Answer(raw=b"[]"), Fault.BROKEN, 0),
    "no choice": (False, Answer(raw=b'{"choices": []}'), Fault.BROKEN, 0),
    "a choice that is none": (True, Answer(raw=b'data: {"choices": [7]}\n\n'), Fault.BROKEN, 0),
    "choices that are none": (False, Answer(raw=b'{"choices": {"a": 1}}'), Fault.BROKEN, 0),
    "calls that are none": (False, Answer(raw=b'{"choices": [{"message": {"tool_calls": 7}}]}'), Fault.BROKEN, 0),
    "no call": (True, Answer(raw=b'data: {"choices": [{"delta": {"tool_calls": [7]}}]}\n\n'), Fault.BROKEN, 0),
    "a plain answer to a stream": (True, Answer(raw=b'{"choices": [{"message": {"content": "a"}}]}'), Fault.BROKEN, 0),
    "silent": (True, Answer(delay=60), Fault.TIMEOUT, 0),
    "silent after the headers": (True, Answer(then="hang", after=0), Fault.TIMEOUT, 0),
    "silent after the role": (True, Answer(then="hang", after=1), Fault.TIMEOUT, 0),
    "silent in mid-stream": (True, Answer(then="hang", after=3), Fault.TIMEOUT, 2),
    "silent in a plain answer": (False, Answer(then="hang", after=20), Fault.TIMEOUT, 0),
    "too slow in a plain answer": (False, Answer(delay=60), Fault.TIMEOUT, 0),
    "trickling for ever": (True, Answer(text="a " * 100, pace=0.04), Fault.TIMEOUT, 1),
    "trickling bytes": (True, Answer(text="a " * 100, split=1), Fault.TIMEOUT, 0),
    "comments only": (True, Answer(raw=b": ping\n\n" * 100, split=8, pace=0.01), Fault.TIMEOUT, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
async def test_what_goes_wrong_after_sending_has_a_fault_and_a_price(name):
    streaming, script, fault, completion = BROKEN[name]
    if script.raw and script.raw.startswith(b"{"):
        script = Answer(**{**vars(script), "headers": {"content-type": "application/json"}})
    times = {"first_token_seconds": 0.5, "next_token_seconds": 0.4, "total_seconds": 0.8}
    async with one_pool(script, **times) as (pool, upstream):
        with pytest.raises(PoolError) as caught:
            await asked(pool, streaming)
        assert caught.value.fault is fault
        assert caught.value.usage.prompt > 0 and caught.value.usage.completion >= completion
        assert caught.value.usage.estimated
        await until(lambda: not upstream.active)


async def test_usage_that_was_told_before_a_failure_is_kept():
    async with one_pool(Answer(then="abort", after=3, usage="each", prompt_tokens=50)) as (pool, _):
        with pytest.raises(PoolError) as caught:
            await streamed(pool)
        assert caught.value.usage == Usage(50, 2)


async def test_nobody_there():
    upstream = await Upstream().start()
    await upstream.stop()
    pool = OpenAIPool("cloud", PoolSettings(url=upstream.url))
    for streaming in (False, True):
        with pytest.raises(PoolError) as caught:
            await asked(pool, streaming)
        assert (caught.value.fault, caught.value.usage) == (Fault.UNAVAILABLE, Usage())
    await pool.close()


async def test_somebody_there_who_only_listens(monkeypatch):
    """A server that takes connections and never shakes hands is left early, not after the time for an answer."""
    monkeypatch.setattr(openai, "CONNECT_SECONDS", 0.1)
    server = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
    async with server, asyncio.timeout(5):
        port = server.sockets[0].getsockname()[1]
        pool = OpenAIPool("cloud", PoolSettings(url=f"https://127.0.0.1:{port}/v1", total_seconds=60))
        for streaming in (False, True):
            with pytest.raises(PoolError) as caught:
                await asked(pool, streaming)
            assert (caught.value.fault, caught.value.usage) == (Fault.UNAVAILABLE, Usage())
        await pool.close()


@pytest.mark.parametrize("tail", [b"", b"data: [DONE]", b"data: [DONE]\n\n", b": bye\n\ndata: [DONE]\r\n\r\n"])
async def test_a_stream_may_end_as_it_likes_once_it_has_finished(tail):
    chunk = b'data: {"choices": [{"delta": {"content": "fine"}, "finish_reason": "stop"}]}\n\n'
    script = Answer(raw=b": hello\n\ndata: \n\n" + chunk + tail)
    async with one_pool(script) as (pool, _):
        chunks = await streamed(pool)
        assert [chunk.text for chunk in chunks] == ["fine", ""]


@pytest.mark.parametrize("then", ["hang", "abort"])
async def test_nothing_that_happens_after_the_end_of_an_answer_spoils_it(then):
    """Its words are there, and its reason to stop: a server that does not close its stream is no failure."""
    script = Answer(text="all of it", then=then, after=5)  # the role, three words, the finish_reason
    async with one_pool(script, next_token_seconds=0.2) as (pool, _):
        chunks = await streamed(pool)
        assert "".join(chunk.text for chunk in chunks) == "all of it"
        assert chunks[-2].finish == "stop" and chunks[-1].usage.completion and chunks[-1].usage.estimated


async def test_an_answer_with_several_choices_ends_with_the_last_of_them():
    first = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n'
    async with one_pool(Answer(raw=first)) as (pool, upstream):
        with pytest.raises(PoolError) as caught:
            await streamed(pool, {**BODY, "n": 2})
        assert caught.value.fault is Fault.BROKEN
        upstream.script = Answer(raw=first + first.replace(b'"index": 0', b'"index": 1'))
        assert len(await streamed(pool, {**BODY, "n": 2})) == 3


async def test_who_stops_listening_stops_the_upstream():
    async with one_pool(Answer(text="word " * 1000, pace=0.005)) as (pool, upstream):
        chunks = pool.stream(BODY)
        async for chunk in chunks:
            if chunk.text:
                break
        await chunks.aclose()
        await until(lambda: upstream.calls[0].gone and not upstream.connections)


async def test_comments_keep_nobody_waiting():
    """A server that says it is at work, and no more, gives its turn to another in time."""
    script = Answer(raw=b": at work\n\n" * 200, split=10, pace=0.02)
    async with one_pool(script, first_token_seconds=0.2) as (pool, upstream):
        with pytest.raises(PoolError) as caught:
            await streamed(pool)
        assert caught.value.fault is Fault.TIMEOUT and upstream.calls[0].sent < 100


@pytest.mark.parametrize("streaming", [False, True])
async def test_cancellation_stops_the_upstream(streaming):
    async with one_pool(Answer(delay=60)) as (pool, upstream):
        task = asyncio.create_task(asked(pool, streaming))
        await until(lambda: upstream.active == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: upstream.calls[0].gone and not upstream.connections)


@pytest.mark.parametrize("split", [0, 60])
async def test_connections_are_used_again(split):
    async with one_pool(Answer(split=split)) as (pool, upstream):
        for _ in range(5):
            await streamed(pool)
            await pool.complete(BODY)
        assert len({call.connection for call in upstream.calls}) == 1


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("status", [200, 400, 401, 429, 500])
async def test_the_key_is_never_repeated(status, streaming, caplog):
    caplog.set_level(logging.DEBUG)
    key = "sk-very-secret"
    error = {"message": f"Incorrect API key provided: {key}", "type": "invalid_request_error", "code": key}
    async with one_pool(Answer(status=status, then="error", error=error), key=key) as (pool, _):
        with pytest.raises(PoolError) as caught:
            await asked(pool, streaming)
        error = caught.value
        assert key not in f"{error!r} {error.body} {error.__cause__!r} {error.__context__!r} {pool!r} {caplog.text}"


@pytest.mark.parametrize("key", ["1", "null", "type", '"', "400"])
async def test_no_key_is_too_odd_to_be_left_out(key):
    error = {"message": f"bad key {key}.", "type": "invalid_request_error", "code": 400, "param": {"key": key}}
    async with one_pool(Answer(status=400, error=error), key=key) as (pool, _):
        with pytest.raises(PoolError) as caught:
            await pool.complete(BODY)
        assert str(caught.value) == "bad key [key]."
        assert caught.value.body == {
            "message": "bad key [key].",
            "type": "invalid_request_error".replace(key, "[key]"),
            "code": 400,
            "param": None,
        }


async def test_answers_are_bounded(monkeypatch):
    monkeypatch.setattr(openai, "LONGEST_BODY", 10_000)
    for streaming, raw in ((False, b" " * 20_000), (True, b"data: " + b"x" * (sse.LONGEST + 1))):
        async with one_pool(Answer(raw=raw)) as (pool, _):
            with pytest.raises(PoolError) as caught:
                await asked(pool, streaming)
            assert caught.value.fault is Fault.BROKEN


async def test_large_and_odd_prompts_arrive():
    body = {**BODY, "messages": [{"role": "user", "content": "漢" * 2_000_000 + "\ud83d"}]}
    async with one_pool(Answer()) as (pool, upstream):
        await pool.complete(body)
        assert upstream.calls[0].body["messages"][0]["content"] == "漢" * 2_000_000 + "?"


def test_nothing_is_opened_and_no_key_needed_before_the_first_call():
    OpenAIPool("cloud", PoolSettings(url="http://127.0.0.1:9/v1"))


def test_keys_come_from_the_environment():
    named = PoolSettings(url="http://127.0.0.1:9/v1", key_variable="CLOUD_KEY")
    OpenAIPool.from_environment("cloud", named, {"CLOUD_KEY": "sk-1"})
    with pytest.raises(UserError, match=r"router\.pools\.cloud: the environment variable CLOUD_KEY is not set"):
        OpenAIPool.from_environment("cloud", named, {})
    for url in ("", "api.example.com/v1", "ftp://api.example.com/v1"):
        with pytest.raises(UserError, match="needs a url"):
            OpenAIPool.from_environment("cloud", PoolSettings(url=url), {})
