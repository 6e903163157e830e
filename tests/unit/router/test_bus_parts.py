"""Requests in the terms of our generators, and their stretches in the terms of OpenAI."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contracts import codec
from contracts.messages import Finish, Sampling, Task, Tokens, Turn
from contracts.serving import TokensError
from router.chat import Chunk, Usage
from router.pools.asking import terms_of
from router.pools.assembly import Assembly
from router.pools.base import Fault, PoolError
from router.settings import PoolSettings
from tests.unit.builders import policy

TEXT = PoolSettings(kind="bus", window=512)
TOOLS = PoolSettings(kind="bus", capabilities=frozenset({"tools"}))
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]

SAMPLINGS: dict[str, tuple[dict[str, Any], Sampling]] = {
    "OpenAI's defaults": ({}, Sampling(max_tokens=512, temperature=1.0, top_p=1.0)),
    "the old name of the limit": ({"max_tokens": 7}, Sampling(max_tokens=7)),
    "the new name counts": ({"max_tokens": 7, "max_completion_tokens": 9}, Sampling(max_tokens=9)),
    "greedy": ({"temperature": 0}, Sampling(max_tokens=512, temperature=0.0)),
    "a nucleus": ({"top_p": 0.9, "top_k": 5}, Sampling(max_tokens=512, top_p=0.9, top_k=5)),
    "one stop": ({"stop": "\n"}, Sampling(max_tokens=512, stop=["\n"])),
    "several stops": ({"stop": ["a", "b"]}, Sampling(max_tokens=512, stop=["a", "b"])),
    "nothing said in many words": (
        dict.fromkeys(("max_tokens", "temperature", "top_p", "stop", "n", "seed", "tools", "response_format")),
        Sampling(max_tokens=512),
    ),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_parameters_become_how_to_sample(name: str) -> None:
    parameters, expected = SAMPLINGS[name]
    assert terms_of({"messages": HELLO, **parameters}, TEXT).sampling == expected


def test_a_conversation_becomes_turns_that_the_bus_can_carry() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "\ud83d half an emoji"},
    ]
    request = terms_of({"messages": messages, "tools": WEATHER, "n": 2, "seed": -1, "logprobs": True}, TOOLS)
    assert request.turns[:2] == [Turn("system", "be brief"), Turn("user", "a\nb")]
    assert json.loads(request.turns[2].tool_calls) == [call] and request.turns[2].content == ""
    assert request.turns[3].tool_call_id == "c1" and request.turns[3].content.endswith(" half an emoji")
    assert json.loads(request.tools) == WEATHER
    assert (request.choices, request.logprobs) == (2, True) and request.seed is not None and request.seed >= 0
    task = Task(
        id="t", run="r", purpose="serve", environment="serve", seed=request.seed, group_size=2,
        sampling=request.sampling, turns=request.turns, tools=request.tools,
    )  # fmt: skip
    assert codec.decode(codec.encode(task), Task) == task
    assert terms_of({"messages": HELLO, "tools": WEATHER, "tool_choice": "none"}, TEXT).tools == ""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "JSON": ({"response_format": {"type": "json_object"}}, "response_format"),
    "a schema": ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    "tools": ({"tools": WEATHER}, "tools"),
    "a penalty": ({"frequency_penalty": 0.5}, "frequency_penalty"),
    "a bias": ({"logit_bias": {"1": 2}}, "logit_bias"),
    "other log-probs": ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
    "sound": ({"modalities": ["text", "audio"]}, "modalities"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0]"),
    "an unknown role": ({"messages": [*HELLO, {"role": "wizard", "content": "x"}]}, "messages[1]"),
    "no messages": ({"messages": []}, "messages"),
    "content that is no text": ({"messages": [{"role": "user", "content": 7}]}, "messages[0]"),
    "a message that is none": ({"messages": ["hello"]}, "messages[0]"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "half a token": ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    "heat": ({"temperature": 3}, "temperature"),
    "a temperature of NaN": ({"temperature": float("nan")}, "temperature"),
    "no nucleus": ({"top_p": 0}, "top_p"),
    "truth for a number": ({"n": True}, "n"),
    "an empty stop": ({"stop": [""]}, "stop"),
    "too many stops": ({"stop": ["a"] * 40}, "stop"),
    "a seed that is text": ({"seed": "7"}, "seed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_with_the_name_of_the_parameter(name: str) -> None:
    parameters, where = REFUSED[name]
    with pytest.raises(PoolError) as error:
        terms_of({"messages": HELLO, **parameters}, TEXT)
    assert error.value.fault is Fault.REFUSED and error.value.body is not None
    assert error.value.body["param"] == where and error.value.body["message"] == str(error.value)


def test_nobody_can_be_made_to_call_a_tool() -> None:
    with pytest.raises(PoolError, match="tool_choice"):
        terms_of({"messages": HELLO, "tools": WEATHER, "tool_choice": "required"}, TOOLS)


def stretch(start: int, sampled: str = "", *, attempt: int = 1, version: int = 1, **changes: Any) -> Tokens:
    """One token for each character."""
    count = len(sampled)
    sampled_by = policy(version) if count else None
    fields: dict[str, Any] = {
        "run": "r", "task_id": "t", "attempt": attempt, "index": 0, "start": start, "text": sampled,
        "tokens": [7] * count, "pieces": list(sampled), "logprobs": [-0.5] * count, "policy": sampled_by,
        "prompt_tokens": 3,
    }  # fmt: skip
    return Tokens(**(fields | changes))


def assembly(choices: int = 1, *, keeps: bool = False, logprobs: bool = False, tools: str = "") -> Assembly:
    task = Task(
        id="t", run="r", purpose="serve", environment="serve", seed=1, group_size=choices,
        sampling=Sampling(max_tokens=9), tools=tools,
    )  # fmt: skip
    return Assembly("ours", task, logprobs=logprobs, keeps=keeps)


def taken(made: Assembly, *messages: Tokens) -> list[Chunk]:
    return [chunk for message in messages for chunk in made.take(message)]


END = {"finish": Finish.STOP, "rollout": "t.0"}


def test_stretches_become_chunks_and_then_the_usage() -> None:
    made = assembly(logprobs=True)
    chunks = taken(made, stretch(0, "ab"), stretch(2, "c🙂", version=2), stretch(4, **END))
    assert [chunk.text for chunk in chunks] == ["ab", "c🙂", ""]
    assert [chunk.finish for chunk in chunks] == [None, None, "stop"]
    assert [chunk.body["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "ab"}, {"content": "c🙂"}, {},
    ]  # fmt: skip
    entries = chunks[1].body["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"], bytes(entry["bytes"])) for entry in entries] == [
        ("c", -0.5, b"c"), ("🙂", -0.5, "🙂".encode()),
    ]  # fmt: skip
    assert made.complete
    last = made.last()
    assert last.body["choices"] == [] and last.usage == Usage(3, 4) and last.rollout == "t.0"
    assert last.policy == (1, 2, policy(2).digest), "what served it is what sampled its end"
    assert len({chunk.body["id"] for chunk in [*chunks, last]}) == 1
    assert last.body["usage"]["total_tokens"] == 7


def test_bytes_of_a_token_that_is_no_whole_character_are_not_made_up() -> None:
    made = assembly(logprobs=True)
    (chunk,) = taken(made, stretch(0, "x", text="", pieces=["\ufffd"]))
    assert chunk.body["choices"][0]["logprobs"]["content"][0]["bytes"] is None


def test_text_that_lags_behind_its_tokens_makes_no_chunks_of_its_own() -> None:
    made = assembly()
    assert len(taken(made, stretch(0, "a"), stretch(1, "b", text=""), stretch(2, "c", text="bc"))) == 2
    assert made.usage.completion == 3


def test_several_choices_end_each_by_itself() -> None:
    made = assembly(2)
    first = {"index": 1, "finish": Finish.LENGTH, "rollout": "t.1"}
    chunks = taken(made, stretch(0, "a"), stretch(0, "z", index=1), stretch(1, **first))
    assert not made.complete and [chunk.text for chunk in chunks] == ["a", "", ""]
    taken(made, stretch(1, **END))
    reply = made.reply()
    assert [c["message"]["content"] for c in reply.body["choices"]] == ["a", "z"]
    assert [c["finish_reason"] for c in reply.body["choices"]] == ["stop", "length"]
    assert (reply.text, reply.finish, reply.rollout, reply.usage) == ("a", "stop", "t.0", Usage(3, 2))


def test_what_is_told_twice_is_taken_once() -> None:
    made = assembly()
    messages = [stretch(0, "ab"), stretch(0, "ab"), stretch(2, **END), stretch(2, **END)]
    assert "".join(chunk.text for chunk in taken(made, *messages)) == "ab"


def test_a_gap_breaks_the_answer_and_keeps_what_it_had_cost() -> None:
    made = assembly()
    taken(made, stretch(0, "ab"))
    with pytest.raises(PoolError, match="lost on its way") as error:
        made.take(stretch(3, "d"))
    assert error.value.fault is Fault.BROKEN and error.value.usage == Usage(3, 2)


@pytest.mark.parametrize("keeps", [True, False])
def test_another_attempt_takes_over_only_while_nothing_was_shown(keeps: bool) -> None:
    made = assembly(keeps=keeps)
    taken(made, stretch(0, "ab"))
    if not keeps:
        with pytest.raises(PoolError, match="mid-answer") as error:
            made.take(stretch(0, "xyz", attempt=2))
        assert error.value.fault is Fault.BROKEN
        return
    late = stretch(2, "c"), stretch(3, **END)  # of the first attempt
    assert not taken(made, stretch(0, "xyz", attempt=2), *late, stretch(3, attempt=2, **END))
    assert made.reply().text == "xyz" and made.usage == Usage(3, 3)


ERRORS = {
    TokensError.PROMPT_TOO_LONG: Fault.TOO_LONG,
    TokensError.REFUSED: Fault.REFUSED,
    TokensError.FAILED: Fault.UNAVAILABLE,
    TokensError.EXPIRED: Fault.TIMEOUT,
    "something newer": Fault.UNAVAILABLE,
}


@pytest.mark.parametrize("code", ERRORS)
def test_an_error_of_the_generator_is_one_of_the_pool(code: str) -> None:
    with pytest.raises(PoolError, match="a sentence") as error:
        assembly().take(stretch(0, code=code, error="a sentence"))
    assert error.value.fault is ERRORS[code]
    if code == TokensError.PROMPT_TOO_LONG:
        assert error.value.body is not None and error.value.body["code"] == "context_length_exceeded"


def test_an_error_in_mid_answer_breaks_it() -> None:
    made = assembly()
    taken(made, stretch(0, "ab"))
    with pytest.raises(PoolError) as error:
        made.take(stretch(0, code=TokensError.FAILED, error="x"))
    assert error.value.fault is Fault.BROKEN and error.value.usage == Usage(3, 2)


ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bergen {}"}}\n</tool_call>'
TWO = f'{ONE}\n<tool_call>{{"name": "time", "arguments": "{{}}"}}</tool_call>'
MARKED = '<tool_call>{"name": "say", "arguments": {"text": "</tool_call><tool_call>{"}}</tool_call>'
WRITTEN: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "text": ("a < b <tool> c", "a < b <tool> c", []),
    "a call": (ONE, "", [("weather", '{"city": "Bergen {}"}')]),
    "a call after text": (f"Let me see. {ONE}", "Let me see. ", [("weather", '{"city": "Bergen {}"}')]),
    "two calls": (TWO, "", [("weather", '{"city": "Bergen {}"}'), ("time", "{}")]),
    "a call whose end is a stop string": (ONE.removesuffix("</tool_call>"), "", [("weather", '{"city": "Bergen {}"}')]),
    "no arguments": ('<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    "a call that is cut off": (ONE[:40], ONE[:40], []),
    "no JSON": ("<tool_call>{city}</tool_call>", "<tool_call>{city}</tool_call>", []),
    "no name": ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    "text after a call": (f"{ONE} so", f"{ONE} so", []),
    "the mark inside an argument": (MARKED, "", [("say", '{"text": "</tool_call><tool_call>{"}')]),
    "two openings": (f"<tool_call>{ONE}", f"<tool_call>{ONE}", []),
    "nested without end": ('<tool_call>{"a": ' + "[" * 20_000, '<tool_call>{"a": ' + "[" * 20_000, []),
    "openings without end": ("<tool_call>{" * 10_000, "<tool_call>{" * 10_000, []),  # minutes, were it looked at twice
}


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_of_tools_are_told_from_text(name: str, keeps: bool) -> None:
    written, shown, calls = WRITTEN[name]
    made = assembly(keeps=keeps, tools="[{}]")
    size = 5 if len(written) < 1000 else 1000
    pieces = [stretch(start, written[start : start + size]) for start in range(0, len(written), size)]
    chunks = taken(made, *pieces, stretch(len(written), **END))
    reply = made.reply()
    assert reply.text == shown
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in reply.tool_calls] == calls
    assert reply.finish == ("tool_calls" if calls else "stop")
    if not keeps:
        deltas = [chunk.body["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == shown
        told = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["function"] for call in told] == [call["function"] for call in reply.tool_calls]
        assert [call["index"] for call in told] == list(range(len(calls)))
        assert chunks[-1].finish == reply.finish


def test_where_no_tools_are_on_offer_nothing_is_a_call() -> None:
    made = assembly()
    chunks = taken(made, stretch(0, ONE), stretch(len(ONE), **END))
    assert chunks[0].text == ONE and made.reply().finish == "stop"
