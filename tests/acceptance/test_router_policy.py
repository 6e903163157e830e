"""The routing policy in a router process: damaged files, sessions, small windows, hosts without tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.acceptance.gateway import Router
from tests.upstream import Answer

STRONG = {"price_in": 3.0, "price_out": 15.0, "price_cached": 0.3, "retries": 0, "window": 100_000}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
RULES = "You are an agent. " + "Follow the house's rules to the letter, whatever they may be. " * 400  # 6,000 tokens


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    directory = tmp_path_factory.mktemp("router")
    policies = directory / "router" / "policies"
    policies.mkdir(parents=True)
    (policies / "head.json").write_text('{"serial": 3, "history": ["0123456789abcdef"], "trial": "fedcba9876543210"}')
    (policies / "0123456789abcdef.json").write_bytes(b'{"model": "x", "calibration": {"weights": {"a": {"b": 1e999}}}}')
    (policies / "fedcba9876543210.json").write_bytes(b"\x00" * 4096)
    mini = {"tier": "compact", "window": 4096, "capabilities": ["json"], "retries": 0}
    router = Router(directory, pools={"mini": mini, "one": STRONG, "two": STRONG})
    try:
        yield router
    finally:
        router.close()


async def asked(router: Router, messages: Any, **fields: Any) -> str:
    """The pool that answered."""
    async with router.client() as client:
        return (await client.chat.completions.create(model="auto", messages=messages, **fields)).model


async def test_damaged_policies_on_disk_do_not_stop_it(router: Router) -> None:
    assert await asked(router, [{"role": "user", "content": "Say hello."}]) == "mini"
    refused = {event["version"]: event["reason"] for event in router.events("routing policy refused")}
    assert refused.keys() == {"0123456789abcdef", "fedcba9876543210"}
    assert all("digest" in reason for reason in refused.values())


async def test_a_session_stays_where_its_prompt_is_cached_and_goes_to_no_small_window(router: Router) -> None:
    router.upstreams["one"].script = Answer(status=503)
    messages: Any = [{"role": "system", "content": RULES}, {"role": "user", "content": "Design a cache for our data."}]
    assert await asked(router, messages) == "two"  # the other one failed once, and is well again
    router.upstreams["one"].script = Answer()
    for said in ("ok continue", "yes", "go on", "now list the files"):
        messages += [{"role": "assistant", "content": "Done, step by step."}, {"role": "user", "content": said}]
        assert await asked(router, messages) == "two"
    fresh: Any = [{"role": "system", "content": RULES}, {"role": "user", "content": "Design a queue for our data."}]
    assert await asked(router, fresh) == "one"


async def test_tools_never_reach_a_host_without_tools(router: Router) -> None:
    weather: Any = [{"role": "user", "content": "What is the weather?"}]
    assert await asked(router, weather) == "mini"
    assert await asked(router, weather, tools=TOOLS) in ("one", "two")
    assert all("tools" not in call.body for call in router.upstreams["mini"].calls)


async def test_what_fits_no_window_is_said_so(router: Router) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await asked(router, [{"role": "user", "content": "word " * 200_000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
