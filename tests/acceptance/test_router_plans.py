"""Requests that consist of several, before a router process: one answer, the parts' bill, and no half answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from tests.acceptance.gateway import Router
from tests.upstream import Answer

POOLS = {
    "small": {"tier": "compact", "price_in": 0.1, "price_out": 0.2, "retries": 0, "failures": 1000},
    "large": {"price_in": 3.0, "price_out": 15.0, "retries": 0, "failures": 1000},
}
SECRETS = {"RICH_KEY": "sk-rich-1a2b", "POOR_KEY": "sk-poor-3c4d"}
LIST = 'Please do the following:\n1. Write a haiku about rain.\n2. Translate "cat" to French.\n3. Explain DNS.'
FREE = (
    "I would like to know what sourdough is, and then it would also help me a great deal to see how a small bakery "
    "adds up what it sells in a week."
)
PLAN = {
    "subtasks": [
        {"id": "a", "title": "Sourdough", "kind": "question", "prompt": "What is sourdough?"},
        {"id": "b", "title": "Sales", "kind": "code", "prompt": "Show how to add up sales."},
    ]
}


def asks(text: str) -> Any:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def echo(body: dict[str, Any], _: int) -> Answer:
    """Says what it was asked."""
    return Answer(text=f"<{body['messages'][-1]['content']}>", prompt_tokens=100, completion_tokens=10)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router that asks a model for plans, and plans by form where that fails or is not worth a call."""
    router = Router(
        tmp_path_factory.mktemp("plans"),
        pools=POOLS,
        keys={
            "rich": {"variable": "RICH_KEY"},
            "poor": {"variable": "POOR_KEY", "budget_usd": 0.0004, "pools": ["small"]},
        },
        secrets=SECRETS,
        ROUTER__PLAN__PLANNER="model",
        ROUTER__PLAN__WIDTH=1,
    )
    try:
        yield router
    finally:
        router.close()


@pytest.fixture
def router(shared: Router) -> Router:
    for upstream in shared.upstreams.values():
        upstream.script = echo
        upstream.calls.clear()
    return shared


@pytest.fixture
async def client(router: Router) -> AsyncIterator[openai.AsyncOpenAI]:
    async with router.client(SECRETS["RICH_KEY"]) as client:
        yield client


def prompts(router: Router) -> list[str]:
    """What the pools were asked."""
    return [call.body["messages"][-1]["content"] for upstream in router.upstreams.values() for call in upstream.calls]


JOINED = (
    "## 1. Write a haiku about rain\n\n<Write a haiku about rain.>\n\n"
    '## 2. Translate "cat" to French\n\n<Translate "cat" to French.>\n\n## 3. Explain DNS\n\n<Explain DNS.>'
)


async def test_parts_are_answered_apart_and_given_as_one(router: Router, client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model="auto", messages=asks(LIST))
    answer = raw.parse()
    assert answer.choices[0].message.content == JOINED
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (300, 30)
    assert raw.headers["x-tailrace-attempts"] == "3"
    calls = [call for upstream in router.upstreams.values() for call in upstream.calls]
    assert all(call.body["messages"][0] == {"role": "system", "content": "Be brief."} for call in calls)


async def test_a_stream_of_parts_is_a_stream(router: Router, client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = await client.chat.completions.create(
        model="auto", messages=asks(LIST), stream=True, stream_options=options
    )
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == JOINED
    assert last.usage is not None and last.usage.total_tokens == 330


async def test_where_a_part_fails_the_request_is_answered_whole_and_strong(
    router: Router, client: openai.AsyncOpenAI
) -> None:
    def refuses(body: dict[str, Any], number: int) -> Answer:
        whole = body["messages"][-1]["content"] == LIST
        return Answer(text="All three.") if whole else Answer(status=500)

    for upstream in router.upstreams.values():
        upstream.script = refuses
    raw = await client.chat.completions.with_raw_response.create(model="auto", messages=asks(LIST))
    assert raw.parse().choices[0].message.content == "All three."
    assert raw.headers["x-tailrace-model"] == "large"


async def test_a_budget_reached_in_mid_plan_ends_it_and_what_was_spent_is_booked(router: Router) -> None:
    router.upstreams["small"].script = Answer(text="Long.", prompt_tokens=100, completion_tokens=2000)
    async with router.client(SECRETS["POOR_KEY"]) as client:
        for expected in (1, 0):  # one part is paid for; then nothing is left to begin with
            router.upstreams["small"].calls.clear()
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model="auto", messages=asks(LIST))
            assert caught.value.code == "insufficient_quota"
            assert len(router.upstreams["small"].calls) == expected


async def test_a_model_may_plan(router: Router, client: openai.AsyncOpenAI) -> None:
    def plans(body: dict[str, Any], number: int) -> Answer:
        planning = "You plan how a request is answered" in str(body["messages"][0]["content"])
        return Answer(text=f"```json\n{json.dumps(PLAN)}\n```") if planning else echo(body, number)

    for upstream in router.upstreams.values():
        upstream.script = plans
    raw = await client.chat.completions.with_raw_response.create(model="auto", messages=asks(FREE))
    text = raw.parse().choices[0].message.content or ""
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Sourdough", "## Sales"]
    assert raw.headers["x-tailrace-attempts"] == "3"
    assert sum("Do only this part" in prompt for prompt in prompts(router)) == 2


async def test_what_a_model_plans_badly_is_answered_as_it_stands(router: Router, client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model="auto", messages=asks(FREE))
    assert raw.parse().choices[0].message.content == f"<{FREE}>"
    assert raw.headers["x-tailrace-attempts"] == "2"
