"""Bytes to requests: what is understood, and what is said about the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.admission.parse import MAX_DEPTH, parse
from router.chat import ApiError

USER = {"role": "user", "content": "hello"}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "auto", "messages": [USER], **fields}).encode()


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"{", None),
        (b'{"model": NaN}', None),
        (b'{"model": 1e999}', None),
        (b'{"model": "\xff"}', None),
        (b"[" * 100_000, None),
        (body(metadata=nested(MAX_DEPTH + 1)), None),
        (body(metadata=nested(800)), None),
        (json.dumps({"messages": [USER]}).encode(), "model"),
        (body(model=7), "model"),
        (body(model=""), "model"),
        (body(messages=[]), "messages"),
        (body(messages=None), "messages"),
        (body(messages="hello"), "messages"),
        (body(messages=["hello"]), "messages[0]"),
        (body(messages=[USER, {"role": "wizard", "content": "x"}]), "messages[1].role"),
        (body(messages=[{"role": ["user"], "content": "x"}]), "messages[0].role"),
        (body(messages=[{"content": "x"}]), "messages[0].role"),
        (body(messages=[{"role": "user", "content": None}]), "messages[0].content"),
        (body(messages=[{"role": "assistant", "content": None}]), "messages[0].content"),
        (body(messages=[{"role": "assistant", "content": None, "tool_calls": []}]), "messages[0].content"),
        (body(messages=[{"role": "user", "content": 7}]), "messages[0].content"),
        (body(messages=[{"role": "user", "content": ["x"]}]), "messages[0].content[0]"),
        (body(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        (body(messages=[{"role": "assistant", "tool_calls": "x"}]), "messages[0].tool_calls"),
        (body(messages=[{"role": "assistant", "tool_calls": [{"id": "c"}]}]), "messages[0].tool_calls[0]"),
        (body(stream="yes"), "stream"),
        (body(stream_options={"include_usage": True}), "stream_options"),
        (body(stream=True, stream_options=[]), "stream_options"),
        (body(stream=True, stream_options={"include_usage": 1}), "include_usage"),
        (body(tools={}), "tools"),
        (body(tools=[7]), "tools[0]"),
        (body(tools=[{"type": "function"}]), "tools[0]"),
        (body(tools=[{"type": "function", "function": {"name": ""}}]), "tools[0]"),
        (body(functions=[{}]), "functions[0]"),
        (body(response_format="json"), "response_format"),
        (body(response_format={"type": "xml"}), "response_format"),
        (body(response_format={"type": "json_schema"}), "response_format.json_schema"),
        (
            body(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}),
            "response_format.json_schema.schema",
        ),
        (body(max_tokens=0), "max_tokens"),
        (body(max_tokens=True), "max_tokens"),
        (body(max_completion_tokens=1.5), "max_completion_tokens"),
        (body(n=0), "n"),
        (body(n=1000), "n"),
        (body(temperature="hot"), "temperature"),
        (body(temperature=3), "temperature"),
        (body(top_p=-0.1), "top_p"),
    ],
)
def test_what_is_wrong_is_said_with_its_parameter(raw: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as raised:
        parse(raw)
    assert (raised.value.status, raised.value.type, raised.value.param) == (400, "invalid_request_error", param)


def test_a_request_is_read() -> None:
    request = parse(
        body(
            stream=True,
            stream_options={"include_usage": True},
            tools=[TOOL],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            max_tokens=10,
            max_completion_tokens=20,
            n=2,
            unheard_of={"x": 1},
        )
    )
    assert (request.stream, request.include_usage, request.tools, request.json_mode) == (True, True, ("look",), True)
    assert (request.schema, request.max_tokens, request.choices) == ({"type": "object"}, 20, 2)
    assert request.body["unheard_of"] == {"x": 1}  # travels on


@pytest.mark.parametrize(
    ("turn", "text", "images", "calls", "failed"),
    [
        ({"role": "user", "content": ""}, "", 0, (), False),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "", 0, ("look",), False),
        ({"role": "assistant", "tool_calls": [CALL, CALL]}, "", 0, ("look", "look"), False),
        ({"role": "assistant", "content": None, "function_call": CALL["function"]}, "", 0, ("look",), False),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            "a",
            1,
            (),
            False,
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            "a\nb",
            0,
            (),
            False,
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "run", "input": {"x": 1}}]},
            "",
            0,
            ("run",),
            False,
        ),
        (
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True}],
            },
            "no",
            0,
            (),
            True,
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "yes"}]}]},
            "yes",
            0,
            (),
            False,
        ),
        ({"role": "tool", "tool_call_id": "1", "content": "fine"}, "fine", 0, (), False),
        ({"role": "tool", "tool_call_id": "1", "content": "no", "is_error": True}, "no", 0, (), True),
        ({"role": "tool", "tool_call_id": "1", "content": "no", "status": "error"}, "no", 0, (), True),
        ({"role": "tool", "content": '{"isError": true}'}, '{"isError": true}', 0, (), True),
        ({"role": "tool", "content": '{"error": "no such file"}'}, '{"error": "no such file"}', 0, (), True),
        ({"role": "tool", "content": '{"error": null}'}, '{"error": null}', 0, (), False),
        ({"role": "tool", "content": "{not json"}, "{not json", 0, (), False),
        (
            {"role": "tool", "content": "<tool_use_error>no</tool_use_error>"},
            "<tool_use_error>no</tool_use_error>",
            0,
            (),
            True,
        ),
        ({"role": "user", "content": '{"error": "quoted"}'}, '{"error": "quoted"}', 0, (), False),
    ],
)
def test_turns(turn: dict[str, Any], text: str, images: int, calls: tuple[str, ...], failed: bool) -> None:
    (message,) = parse(body(messages=[turn])).messages
    assert (message.text, message.images, message.tool_calls, message.is_error) == (text, images, calls, failed)
    assert len(message.arguments) == len(calls)


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"cut \ud83d", "cut \ufffd"),
        (rb"\ude00 half", "\ufffd half"),
        (rb"\ud83d\ude00 whole \uD83D", "\U0001f600 whole \ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\\ud83d is text, \ud83d is not", "\\ud83d is text, \ufffd is not"),
        (rb"\\\ud83d", "\\\ufffd"),
        (rb"\\\\ud83d\udc00 \n", "\\\\ud83d\ufffd \n"),
    ],
)
def test_half_a_surrogate_pair_does_not_lose_the_request(sent: bytes, read: str) -> None:
    request = parse(b'{"model": "auto", "messages": [{"role": "user", "content": "%b"}]}' % sent)
    assert request.messages[0].text == read
    assert request.body["messages"][0]["content"] == read  # what is sent on can be encoded


def test_five_megabytes_and_a_hundred_thousand_tokens() -> None:
    request = parse(body(messages=[{"role": "user", "content": "word " * 1_000_000}]))
    assert request.prompt_tokens > 1_000_000
    request = parse(body(messages=[{"role": "user", "content": "word " * 100_000}]))
    assert 100_000 <= request.prompt_tokens <= 200_000


def test_tools_and_images_count_as_prompt() -> None:
    bare = parse(body()).prompt_tokens
    assert parse(body(tools=[TOOL] * 50)).prompt_tokens > bare + 500
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}]}
    assert bare + 500 < parse(body(messages=[image])).prompt_tokens < 2000  # not the length of its data


def test_a_session_is_the_same_for_all_turns_of_a_conversation_and_for_no_other() -> None:
    system = {"role": "system", "content": "be kind"}
    answer = {"role": "assistant", "content": "hi"}
    first = parse(body(messages=[system, USER])).session
    assert parse(body(messages=[system, USER, answer, {"role": "user", "content": "and?"}])).session == first
    others = [
        parse(body(messages=[USER])).session,
        parse(body(messages=[system, {"role": "user", "content": "bye"}])).session,
        parse(body(messages=[system, USER], user="ann")).session,
        parse(body(messages=[system, USER], prompt_cache_key="k")).session,
        parse(body(messages=[system, USER]), "mine").session,
    ]
    assert len({first, *others}) == 6
    assert parse(body(prompt_cache_key="k"), "mine").session == others[-1]
    assert parse(body(messages=[answer, USER]), "mine").session == others[-1]
    assert "mine" not in others[-1]
