"""Names of models, forms of answers and errors: the pure parts of the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from infra.errors import UserError
from router.admission.keys import Caller
from router.admission.models import asked, check, listing
from router.chat import ApiError, Reply, Usage
from router.gateway import feedback
from router.gateway.body import ClientGone, read_body
from router.gateway.errors import error_headers, error_object
from router.gateway.headers import dollars
from router.gateway.stream import Events
from router.pieces import chunks_of
from router.pools.base import Fault, PoolError
from router.pools.errors import api_error
from router.service import make_pools
from router.settings import PoolSettings, RouterSettings

POOLS = {"small": PoolSettings(tier="compact"), "large": PoolSettings()}
EVERYONE = Caller()
TEAM = Caller("team", frozenset({"small", "gone"}))


@pytest.mark.parametrize(
    ("model", "caller", "tolerance", "pools", "named"),
    [
        ("auto", EVERYONE, 0.1, {"small", "large"}, False),
        ("auto-0", EVERYONE, 0.0, {"small", "large"}, False),
        ("auto-0.35", EVERYONE, 0.35, {"small", "large"}, False),
        ("auto-1", EVERYONE, 1.0, {"small", "large"}, False),
        ("auto-.5", TEAM, 0.5, {"small"}, False),
        ("large", EVERYONE, 0.0, {"large"}, True),
        ("small", TEAM, 0.0, {"small"}, True),
    ],
)
def test_models(model: str, caller: Caller, tolerance: float, pools: set[str], named: bool) -> None:
    found = asked(model, POOLS, caller, 0.1)
    assert (found.tolerance, found.pools, found.named) == (tolerance, pools, named)


@pytest.mark.parametrize(
    ("model", "caller"),
    [
        ("gpt-5", EVERYONE),
        ("auto-1.5", EVERYONE),
        ("auto-", EVERYONE),
        ("auto--1", EVERYONE),
        ("AUTO", EVERYONE),
        ("large", TEAM),
        ("gone", TEAM),
        ("auto", Caller("nobody", frozenset({"gone"}))),
    ],
)
def test_models_that_there_are_not(model: str, caller: Caller) -> None:
    with pytest.raises(ApiError) as raised:
        asked(model, POOLS, caller, 0.1)
    assert (raised.value.status, raised.value.code, raised.value.param) == (404, "model_not_found", "model")
    if caller.pools is not None:
        assert "large" not in raised.value.message.removeprefix(f"the model '{model}'")


@pytest.mark.parametrize("caller", [EVERYONE, TEAM, Caller("nobody", frozenset({"gone"}))])
def test_every_listed_model_can_be_asked_for(caller: Caller) -> None:
    for model in listing(POOLS, caller, 0)["data"]:
        asked(model["id"], POOLS, caller, 0.1)


@pytest.mark.parametrize("name", ["auto", "auto-0.5", "", "a b", "a\nb", "gro\u00df", "x" * 101])
def test_names_that_pools_cannot_have(name: str) -> None:
    with pytest.raises(UserError, match=r"router\.pools"):
        check({name: PoolSettings()})
    check({**POOLS, "meta/llama-3.1:8b": PoolSettings()})


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (1, "0.000000000001"), (213_000_000, "0.000213"), (10**12, "1"), (10**13, "10"), (105 * 10**11, "10.5")],
)
def test_dollars(amount: int, text: str) -> None:
    assert dollars(amount) == text


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PoolError(Fault.RATE_LIMITED, "busy", retry_after=7.2), 429, "rate_limit_exceeded"),
        (PoolError(Fault.RATE_LIMITED, "busy"), 429, "rate_limit_exceeded"),
        (PoolError(Fault.UNAVAILABLE, "down"), 503, "upstream_unavailable"),
        (PoolError(Fault.TIMEOUT, "slow"), 504, "upstream_timeout"),
        (PoolError(Fault.BROKEN, "cut"), 502, "upstream_broken"),
        (PoolError(Fault.UNAUTHORISED, "wrong key sk-123", status=401), 502, "upstream_unauthorised"),
        (PoolError(Fault.TOO_LONG, "too long"), 400, "context_length_exceeded"),
        (PoolError(Fault.REFUSED, "bad tool", status=422, body={"code": "bad", "param": "tools"}), 422, "bad"),
        (PoolError(Fault.REFUSED, "bad tool", body={"code": 7}), 400, None),
    ],
)
def test_what_is_told_when_no_pool_answered(error: PoolError, status: int, code: str | None) -> None:
    told = api_error(error)
    assert (told.status, told.code) == (status, code)
    assert set(error_object(told)["error"]) == {"message", "type", "param", "code"}
    assert "sk-123" not in told.message
    headers = dict(error_headers(told))
    if status == 429:
        assert int(headers[b"retry-after"]) >= 1
    if error.retry_after:
        assert headers[b"retry-after"] == b"8"


def reply(message: dict[str, Any], finish: str = "stop", **fields: Any) -> Reply:
    choice = {"index": 0, "message": message, "finish_reason": finish}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **fields}
    return Reply(body, message.get("content") or "", finish, Usage(3, 4), "m", pool="small")


CALLS = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("message", "finish"),
    [
        ({"role": "assistant", "content": "word " * 100}, "stop"),
        ({"role": "assistant", "content": "\u00e9\U0001f600" * 200, "reasoning_content": "hm"}, "length"),
        ({"role": "assistant", "content": ""}, "stop"),
        ({"role": "assistant", "content": None, "tool_calls": CALLS * 2}, "tool_calls"),
    ],
)
def test_a_finished_answer_in_pieces(message: dict[str, Any], finish: str) -> None:
    *pieces, last = chunks_of(reply(message, finish))
    deltas = [piece.body["choices"][0]["delta"] for piece in pieces]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == (message["content"] or "") == "".join(piece.text for piece in pieces)
    assert [call for delta in deltas for call in delta.get("tool_calls", ())] == [
        {"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))
    ]
    assert deltas[0]["role"] == "assistant" and deltas[0].get("reasoning_content") == message.get("reasoning_content")
    assert [piece.finish for piece in pieces if piece.finish] == [finish]
    assert {piece.body["object"] for piece in (*pieces, last)} == {"chat.completion.chunk"}
    assert last.body["choices"] == [] and last.usage == Usage(3, 4)


def test_all_choices_of_an_answer_are_streamed() -> None:
    choices = [
        {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for index, text in enumerate(("one", "two"))
    ]
    seen = {0: "", 1: ""}
    for chunk in chunks_of(Reply({"choices": choices}, "one", "stop", Usage(), "m")):
        for choice in chunk.body["choices"]:
            seen[choice["index"]] += choice["delta"].get("content") or ""
    assert seen == {0: "one", 1: "two"}


def test_feedback() -> None:
    raw = json.dumps({"request_id": "chatcmpl-1", "score": 0.5, "comment": "so so"}).encode()
    said = feedback.read(raw, "run", "team")
    assert (said.request_id, said.score, said.passed, said.key) == ("chatcmpl-1", 0.5, None, "team")
    assert feedback.read(raw, "run", "team").id == said.id != feedback.read(raw, "run", "other").id


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"request_id": "x"},
        {"request_id": "x", "comment": "nothing else"},
        {"request_id": "", "score": 1},
        {"request_id": "x", "score": 1.5},
        {"request_id": "x", "score": "good"},
        {"request_id": "x", "passed": 1},
        {"request_id": "x", "score": 1, "scroe": 1},
        {"request_id": "x" * 200, "score": 1},
        [],
    ],
)
def test_feedback_that_says_nothing(said: Any) -> None:
    with pytest.raises(ApiError) as raised:
        feedback.read(json.dumps(said).encode(), "run", "")
    assert raised.value.status == 400
    for internal in ("feedback-", "$", "Expected", "`"):
        assert internal not in str(raised.value)


@pytest.mark.parametrize(
    ("said", "param", "message"),
    [
        ({"score": 1}, "request_id", "request_id must be the id of an answer, 1 to 100 characters"),
        ({"request_id": "x", "score": 1.5}, "score", "score must be a number from 0 to 1"),
        ({"request_id": "x", "score": True}, "score", "score must be a number from 0 to 1"),
        ({"request_id": "x", "passed": "yes"}, "passed", "passed must be true or false"),
        ({"request_id": "x", "correction": 4}, "correction", "correction must be text"),
        ({"request_id": "x", "score": 1, "comment": "x" * 10_001}, "comment", "comment must be text of at most 10,000"),
        ({"request_id": "x", "rating": 1}, "rating", "unknown parameter 'rating'"),
        ({"request_id": "x"}, None, "give at least one of score, passed, correction"),
    ],
)
def test_what_is_wrong_with_feedback_is_said_by_its_name(said: Any, param: str | None, message: str) -> None:
    with pytest.raises(ApiError) as raised:
        feedback.read(json.dumps(said).encode(), "run", "")
    error = error_object(raised.value)["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"].startswith(message)


@pytest.mark.parametrize(
    ("pools", "word"),
    [
        ({}, "router.pools is empty"),
        ({"a": PoolSettings()}, "router.pools.a"),
        ({"a": PoolSettings(url="http://127.0.0.1:1/v1", key_variable="NOT_SET")}, "NOT_SET"),
        ({"auto": PoolSettings(url="http://127.0.0.1:1/v1")}, "router.pools.auto"),
    ],
)
def test_pools_that_cannot_be(pools: dict[str, PoolSettings], word: str) -> None:
    with pytest.raises(UserError, match=word):
        make_pools(RouterSettings(pools=pools), {}, bus=None, run="run")  # type: ignore[arg-type]


class Sent:
    """What a response consists of, as a server is given it."""

    def __init__(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.body = b""
        self.ended = False
        self.arrived = asyncio.Event()

    async def __call__(self, message: Any) -> None:
        assert not self.ended
        if message["type"] == "http.response.start":
            assert not self.body
            self.starts.append(message)
        else:
            assert self.starts
            self.body += message["body"]
            self.ended = not message["more_body"]
            self.arrived.set()


async def test_a_stream_begins_with_its_first_event() -> None:
    sent, headers = Sent(), [(b"x", b"1")]
    events = Events(sent, lambda: headers)
    async with events:
        await asyncio.sleep(0)
        assert not events.started and not sent.starts
        await events.data(b"{}")
        await events.comment("x-tailrace-cost=0")
        await events.data(b"[DONE]")
    await events.end()
    assert [(start["status"], start["headers"]) for start in sent.starts] == [(200, headers)]
    assert sent.body == b"data: {}\n\n: x-tailrace-cost=0\n\ndata: [DONE]\n\n" and sent.ended


async def test_while_there_is_nothing_to_say_comments_are_sent() -> None:
    sent = Sent()
    events = Events(sent, list, silence=0.02)
    async with asyncio.timeout(10), events:
        while sent.body.count(b": keep-alive\n\n") < 2:
            sent.arrived.clear()
            await sent.arrived.wait()
        await events.data(b"{}")
    before = sent.body
    await asyncio.sleep(0.06)
    assert sent.body == before  # none after it has been left
    await events.end()
    assert len(sent.starts) == 1 and b"data: {}\n\n" in sent.body


async def test_who_does_not_read_is_given_up() -> None:
    sent, full = Sent(), asyncio.Event()

    async def send(message: Any) -> None:
        if full.is_set():
            await asyncio.Event().wait()  # as a server waits for its socket
        await sent(message)

    with pytest.raises(ClientGone):
        async with asyncio.timeout(10), Events(send, list, silence=0.02, stall=0.05) as events:
            await events.data(b"1")
            full.set()
            await events.data(b"2")
    assert sent.body == b"data: 1\n\n"


async def test_a_body_that_does_not_come() -> None:
    async def receive() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(ApiError) as raised:
        await read_body(receive, None, 10, seconds=0.01)
    assert raised.value.status == 408


@pytest.mark.parametrize(
    ("parts", "most", "body"), [([b"ab", b"cd"], 4, b"abcd"), ([b""], 0, b""), ([b"abc", b"de"], 4, None)]
)
async def test_a_body_in_parts(parts: list[bytes], most: int, body: bytes | None) -> None:
    left = list(parts)

    async def receive() -> Any:
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    if body is not None:
        assert await read_body(receive, None, most) == body
        return
    with pytest.raises(ApiError) as raised:
        await read_body(receive, None, most)
    assert raised.value.status == 413
