"""Conversations become prompts through the model's own template, or say why not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from contracts.messages import Purpose, Sampling, Task, Turn
from generator.conversations import content_hash, encode, message_of
from infra import models

TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {}}}])
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "oslo"}'}}
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}>{% endif %}"
    "{% for turn in messages %}"
    "{% if turn.role == 'tool' %}{{ turn.tool_call_id }} {% endif %}{{ turn.role }}>{{ turn.content }}"
    "{% for call in turn.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments.city }}{% endfor %}"
    "{{ '\\n' }}"
    "{% if turn.content == 'no' %}{{ raise_exception('never say no') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    made = models.load_tokenizer(models.resolve("tiny"))
    made.chat_template = TEMPLATE
    return made


def task(*turns: Turn, tools: str = "") -> Task:
    return Task(
        id="t", run="r", purpose=Purpose.SERVE, environment="serve", seed=1, group_size=1,
        sampling=Sampling(max_tokens=1), turns=list(turns), tools=tools,
    )  # fmt: skip


CONVERSATIONS: dict[str, tuple[Task, str]] = {
    "one question": (task(Turn("user", "hi")), "user>hi\nassistant>"),
    "with tools": (task(Turn("user", "hi"), tools=TOOLS), "weather>user>hi\nassistant>"),
    "a call and its result": (
        task(
            Turn("user", "oslo"),
            Turn("assistant", "", tool_calls=json.dumps([CALL])),
            Turn("tool", "11", tool_call_id="c1"),
        ),
        "user>oslo\nassistant>weather oslo\nc1 tool>11\nassistant>",
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_template_of_the_model_is_applied(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    asked, expected = CONVERSATIONS[name]
    assert tokenizer.decode(encode(tokenizer, asked)) == expected


def test_a_model_without_a_template_gets_what_was_said_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    assert tokenizer.decode(encode(tokenizer, task(Turn("system", "ab"), Turn("user", "c>")))) == "ab\nc>"


REFUSED: dict[str, tuple[Task, str | None, str]] = {
    "by the template": (task(Turn("user", "no")), TEMPLATE, "refuses the conversation: never say no"),
    "arguments it cannot read": (
        task(Turn("assistant", "", tool_calls='[{"function": {"name": "weather", "arguments": "none"}}]')),
        "{{ messages[0].tool_calls[0].function.arguments.city.name }}",
        "refuses the conversation",
    ),
    "tools without a place": (task(Turn("user", "hi"), tools=TOOLS), "{{ messages[0].content }}", "no place for tools"),
    "tools without a template": (task(Turn("user", "hi"), tools=TOOLS), None, "no place for tools"),
    "tools that are no JSON": (task(Turn("user", "hi"), tools="["), TEMPLATE, "tools is not JSON"),
    "tools that are no array": (task(Turn("user", "hi"), tools="{}"), TEMPLATE, "tools must be an array"),
    "nothing said": (task(Turn("user", "")), None, "no tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_become_a_prompt_is_a_sentence(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    asked, template, sentence = REFUSED[name]
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=sentence):
        encode(tokenizer, asked)


def test_arguments_that_are_no_json_stay_text() -> None:
    call: dict[str, Any] = {"function": {"name": "f", "arguments": "{"}}
    assert message_of(Turn("assistant", "", tool_calls=json.dumps([call])))["tool_calls"] == [call]


def test_the_same_question_has_the_same_hash_and_another_one_another() -> None:
    turns = [Turn("user", "a"), Turn("assistant", "b")]
    hashes = {
        content_hash(turns, ""),
        content_hash(turns[:1], ""),
        content_hash(turns, TOOLS),
        content_hash([Turn("user", "ab"), Turn("assistant", "")], ""),
    }
    assert len(hashes) == 4 and content_hash(list(turns), "") in hashes
    assert all(len(each) == 16 for each in hashes)
