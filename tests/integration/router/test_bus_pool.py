"""Requests to our own generators: a real server, a real engine, and what can go wrong between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing

import pytest

from contracts.messages import Outcome, Purpose, Rollout, Sampling, Task, Tokens, Turn
from contracts.serving import TokensError
from contracts.subjects import ROLLOUT, TASK, TOKENS, WEIGHTS
from infra.blobs import BlobStore
from infra.bus import Bus
from infra.chains import blobs_of
from infra.server import EmbeddedServer
from router.chat import Chunk
from router.pools.base import Fault, PoolError
from router.pools.bus import BusPool
from tests.integration.helpers import dead_letters, retained, until
from tests.integration.router.serving import body, pool, promote, publish, serving_generator, slow_engine
from tests.integration.test_publisher import limited

LONG = {"text": "hello>", "max_tokens": 120, "temperature": 0}  # greedily, this model never comes to an end


@pytest.fixture
async def ours(bus: Bus, run: str) -> AsyncIterator[BusPool]:
    made = pool(bus, run)
    yield made
    await made.close()


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generator.loading.make_engine", slow_engine)


async def rollouts(bus: Bus, run: str) -> dict[str, Rollout]:
    found = bus.read(ROLLOUT, kind=Rollout, follow=False, consumer="test", run=run)
    return {got.message.id: got.message async for got in found}


async def test_a_request_is_answered_streamed_and_filed(bus: Bus, run: str, ours: BusPool) -> None:
    await promote(bus, run, await publish(bus, run, 3))
    asked = body(seed=7, logprobs=True, temperature=0.9, stop=["zz"])
    async with serving_generator(bus, run) as server:
        reply = await ours.complete(asked)
        chunks = [chunk async for chunk in ours.stream(asked)]
        two = await ours.complete(body(n=2, seed=8))
    assert "".join(chunk.text for chunk in chunks) == reply.text, "a seed and a policy determine an answer"
    assert (reply.usage.prompt, reply.usage.completion, reply.finish) == (4, 24, "length")
    assert chunks[-1].usage == reply.usage and chunks[-2].finish == "length"
    assert reply.policy is not None and reply.policy == chunks[-1].policy and reply.policy[:2] == (1, 3)
    assert len({choice["message"]["content"] for choice in two.body["choices"]}) == 2

    filed = await rollouts(bus, run)
    assert len(filed) == 4
    rollout = filed[reply.rollout]
    assert (rollout.purpose, rollout.environment, rollout.outcome) == (Purpose.SERVE, "serve", Outcome.PENDING)
    assert rollout.reward is None and rollout.completion == reply.text and rollout.oldest.version == 3
    told = [entry["logprob"] for entry in reply.body["choices"][0]["logprobs"]["content"]]
    assert told == pytest.approx(rollout.logprobs.array()[rollout.prompt_length :].tolist(), abs=1e-6)
    assert filed[chunks[-1].rollout].item == rollout.item, "the same question"
    assert await retained(bus, TASK, run=run) == 0
    assert server.reports.rollouts == 4 and not server.active


async def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(bus: Bus, run: str, ours: BusPool) -> None:
    await promote(bus, run, await publish(bus, run, 0))
    async with serving_generator(bus, run):
        whole = await ours.complete(body(seed=3))
        stop = whole.text[10:12]
        cut = await ours.complete(body(seed=3, stop=stop))
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish == "stop"


async def test_what_no_generator_can_do_is_said_so(bus: Bus, run: str, ours: BusPool) -> None:
    await promote(bus, run, await publish(bus, run, 0))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    able = pool(bus, run, capabilities=frozenset({"tools"}))
    async with serving_generator(bus, run) as server:
        with pytest.raises(PoolError, match="leaves no room in a window of 256") as too_long:
            await ours.complete(body("a" * 300))
        with pytest.raises(PoolError, match="no place for tools") as no_tools:
            await able.complete(body(tools=tools))
        with pytest.raises(PoolError, match=r"max_requests is 8") as too_many:
            await ours.complete(body(n=9))
        assert await until(lambda: server.reports.outcomes["refused"] == 3)
        assert (await ours.complete(body())).text, "and the next request is answered"
    await able.close()
    assert too_long.value.fault is Fault.TOO_LONG and too_long.value.body is not None
    assert too_long.value.body["code"] == "context_length_exceeded"
    assert no_tools.value.fault is too_many.value.fault is Fault.REFUSED
    assert not await dead_letters(bus, run), "an application's mistake is no operator's"


async def test_before_a_policy_is_promoted_a_request_is_told_so_at_once(bus: Bus, run: str) -> None:
    asking = pool(bus, run)
    with pytest.raises(PoolError, match="no policy is promoted yet") as error:
        await asking.complete(body())
    await asking.close()
    assert error.value.fault is Fault.UNAVAILABLE and await retained(bus, TASK, run=run) == 0


async def test_without_a_generator_a_request_is_given_up_and_withdrawn(bus: Bus, run: str) -> None:
    await promote(bus, run, await publish(bus, run, 0))
    asking = pool(bus, run, first_token_seconds=0.3)
    with pytest.raises(PoolError, match="no generator answered in time") as error:
        await asking.complete(body())
    await asking.close()
    assert error.value.fault is Fault.TIMEOUT
    assert await retained(bus, TASK, run=run) == 0, "whoever starts later finds nothing to do"
    async with serving_generator(bus, run) as server:
        await asyncio.sleep(0.3)
        assert server.engine.stats.tokens == 0


@pytest.mark.usefixtures("slowly")
async def test_whoever_goes_away_frees_the_slot(bus: Bus, run: str, ours: BusPool) -> None:
    await promote(bus, run, await publish(bus, run, 0))
    async with serving_generator(bus, run) as server:
        async with aclosing(ours.stream(body(**LONG))) as chunks:
            assert (await anext(chunks)).text
            assert server.engine.stats.inflight == 1
        assert await until(lambda: server.reports.outcomes["cancelled"] == 1)
        waiting = asyncio.create_task(ours.complete(body(**LONG)))
        assert await until(lambda: server.engine.stats.inflight == 1 and len(server.active) == 1)
        waiting.cancel()
        assert await until(lambda: server.reports.outcomes["cancelled"] == 2)
        assert await until(lambda: server.engine.stats.inflight, expected=False) is False
        assert server.sampling == 0
    assert await retained(bus, TASK, run=run) == 0
    assert not await rollouts(bus, run), "half an answer is filed by nobody"


@pytest.mark.usefixtures("slowly")
async def test_a_deadline_ends_what_is_sampled_and_what_waits(bus: Bus, run: str) -> None:
    await promote(bus, run, await publish(bus, run, 0))
    hasty = pool(bus, run, total_seconds=0.6)
    heard: list[Tokens] = []
    listening = await bus.listen(TOKENS, heard.append, kind=Tokens, run=run, reply="test")
    late = Task(
        id="late", run=run, purpose=Purpose.SERVE, environment="serve", seed=1, group_size=1, reply="test",
        sampling=Sampling(max_tokens=5), turns=[Turn("user", "hello>")], deadline_ns=time.time_ns() - 1,
    )  # fmt: skip
    slow = Task(
        id="slow", run=run, purpose=Purpose.SERVE, environment="serve", seed=1, group_size=1, reply="test",
        sampling=Sampling(max_tokens=120, temperature=0),
        turns=[Turn("user", "hello>")], deadline_ns=time.time_ns() + 800_000_000,
    )  # fmt: skip
    async with serving_generator(bus, run) as server:
        for task in (late, slow):
            await bus.publish(TASK, task, id=f"{run}.{task.id}", run=run, purpose="serve", pool="default")
        with pytest.raises(PoolError) as error:
            await hasty.complete(body(**LONG))
        assert error.value.fault is Fault.TIMEOUT and error.value.usage.completion > 0, "what had come was paid for"
        assert await until(lambda: server.reports.outcomes["expired"] >= 2)
        assert await until(lambda: server.engine.stats.inflight, expected=False) is False
    await bus.connection.unsubscribe(listening)
    await hasty.close()
    codes = {message.task_id: message.code for message in heard if message.code}
    assert codes == {"late": TokensError.EXPIRED, "slow": TokensError.EXPIRED}
    assert not [message for message in heard if message.task_id == "late" and message.tokens]


@pytest.mark.usefixtures("slowly")
async def test_a_policy_promoted_in_mid_answer_samples_the_rest_of_it(bus: Bus, run: str, ours: BusPool) -> None:
    await promote(bus, run, await publish(bus, run, 0))
    newer = await publish(bus, run, 1, seed=1)
    chunks: list[Chunk] = []
    async with serving_generator(bus, run):
        async for chunk in ours.stream(body(**LONG)):
            chunks.append(chunk)
            if len(chunks) == 2:
                await promote(bus, run, newer)
    (rollout,) = (await rollouts(bus, run)).values()
    assert [segment.policy.version for segment in rollout.segments] == [0, 1]
    assert {chunk.body["model"] for chunk in chunks} == {"ours@1.0", "ours@1.1"}
    assert "".join(chunk.text for chunk in chunks) == rollout.completion
    assert chunks[-1].policy is not None and chunks[-1].policy[1] == 1


@pytest.mark.usefixtures("slowly")
async def test_another_generator_answers_from_the_start_what_one_gives_back(bus: Bus, run: str, ours: BusPool) -> None:
    await promote(bus, run, await publish(bus, run, 0))
    async with AsyncExitStack() as first_one, AsyncExitStack() as second_one:
        first = await first_one.enter_async_context(serving_generator(bus, run, "generator-serve-1"))
        whole = asyncio.create_task(ours.complete(body(seed=5, **LONG)))
        streamed = ours.stream(body(seed=5, **LONG))
        shown = (await anext(streamed)).text
        assert await until(lambda: len(first.active) == 2 and first.engine.stats.tokens > 20)
        second = await second_one.enter_async_context(serving_generator(bus, run, "generator-serve-2"))
        await first_one.aclose()
        with pytest.raises(PoolError, match="mid-answer") as error:
            async for chunk in streamed:
                shown += chunk.text
        assert error.value.fault is Fault.BROKEN and error.value.usage.completion == len(shown) > 0
        reply = await whole
        assert await until(lambda: second.reports.outcomes["cancelled"] == 1), "of no use to whoever saw half of it"
    assert reply.usage.completion == 120 and reply.text.startswith(shown)
    assert list(await rollouts(bus, run)) == [reply.rollout]


@pytest.mark.usefixtures("slowly")
async def test_a_server_that_is_away_is_said_at_once_and_comes_back(
    bus: Bus, run: str, ours: BusPool, server: EmbeddedServer
) -> None:
    await promote(bus, run, await publish(bus, run, 0))
    async with serving_generator(bus, run) as generator:
        streamed = ours.stream(body(**LONG))
        assert (await anext(streamed)).text
        server.stop()
        started = time.monotonic()
        with pytest.raises(PoolError, match="connection to the NATS server was lost") as broken:
            async for _ in streamed:
                pass
        with pytest.raises(PoolError, match="no connection to the NATS server") as down:
            await ours.complete(body())
        assert time.monotonic() - started < 3
        server.start()
        assert await until(lambda: bus.connected)
        assert await until(lambda: not generator.active, seconds=20)
        assert (await ours.complete(body())).text
    assert broken.value.fault is Fault.BROKEN and broken.value.usage.completion > 0
    assert down.value.fault is Fault.UNAVAILABLE


async def test_a_full_queue_is_an_unavailable_pool(bus: Bus, run: str, ours: BusPool) -> None:
    await promote(bus, run, await publish(bus, run, 0))
    used = (await bus.stream_info("TASKS")).state.bytes
    async with limited(bus, "TASKS", max_bytes=used + 10, discard="new"):
        with pytest.raises(PoolError, match="queue of requests is full") as error:
            await ours.complete(body())
    assert error.value.fault is Fault.UNAVAILABLE


async def test_closing_a_pool_fails_what_is_in_flight_and_tells_the_generators(bus: Bus, run: str) -> None:
    await promote(bus, run, await publish(bus, run, 0))
    asking = pool(bus, run)
    waiting = asyncio.create_task(asking.complete(body()))
    assert await until(lambda: asking._inboxes)
    await asyncio.sleep(0.1)
    await asking.close()
    with pytest.raises(PoolError, match="being closed"):
        await waiting
    assert await until(lambda: not asking._withdrawing)
    assert await retained(bus, TASK, run=run) == 0


async def test_what_serves_is_stored_again_when_the_store_has_forgotten_it(
    bus: Bus, run: str, ours: BusPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await publish(bus, run, 0)
    await promote(bus, run, version)
    async with serving_generator(bus, run) as first:
        for digest in blobs_of(version):
            await BlobStore(bus.connection, WEIGHTS, run).delete(digest)
        await first.loader.keep_stored()
        assert await retained(bus, WEIGHTS, run=run) == 0, "the store forgets nothing as young as that"
        monkeypatch.setattr("time.time_ns", lambda: version.published_ns + 4 * 24 * 3600 * 1_000_000_000)
        await first.loader.keep_stored()
        monkeypatch.undo()
    async with serving_generator(bus, run):
        assert (await ours.complete(body())).text, "a generator that starts now finds all it needs"
