"""Retries, fallback, cooldown, hedging, and an account of every call, before real upstreams."""

import asyncio
import random
from contextlib import aclosing

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from contracts.routing import Role, Status
from router.chat import Chunk, Reply, Usage
from router.pools.base import Fault, PoolError
from router.pools.relay import Relay
from router.prices import cost
from tests.integration.router.pools import BODY, bench, failing, settings, until
from tests.upstream import Answer

OK, ERROR, PARTIAL, CANCELLED = Status.OK, Status.ERROR, Status.PARTIAL, Status.CANCELLED
DIES = Answer(then="abort", after=3, usage="each", prompt_tokens=50)  # in mid-stream, after two words
both = pytest.mark.parametrize("streaming", [False, True])


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@both
async def test_pools_are_called_in_the_order_given(streaming):
    async with bench(failing(503), failing(503), Answer()) as it:
        it.order = ("b", "a", "b", "c")
        assert await it.ask(streaming) == "c"
        assert it.tried == [("b", ERROR), ("a", ERROR), ("c", OK)]


@both
@pytest.mark.parametrize(
    "script,calls",
    [
        (failing(503), 3),
        (failing(429), 3),
        (Answer(then="error", after=0), 3),
        (Answer(then="close", after=0), 3),
        (failing(401), 1),  # another key will not come of asking again
        (Answer(status=400, error={"code": "context_length_exceeded"}), 1),
        (failing(429, **{"retry-after": "30"}), 1),  # it said when
    ],
)
async def test_what_may_pass_is_tried_again_here_then_elsewhere(script, calls, streaming):
    async with bench(script, Answer(), retries=2, failures=5, each={"b": {"window": 10**6}}) as it:
        assert await it.ask(streaming) == "b"
        assert it.received == [calls, 1]


@both
async def test_a_retry_that_goes_well_is_enough(streaming):
    async with bench([failing(503), Answer()], Answer(), retries=1) as it:
        assert await it.ask(streaming) == "a"
        assert it.tried == [("a", ERROR), ("a", OK)]


@both
async def test_each_failure_decides_about_the_next_try_itself(streaming):
    """A first failure that may pass does not make the second one worth another try."""
    async with bench([failing(503), failing(401), Answer()], Answer(), retries=5) as it:
        assert await it.ask(streaming) == "b"
        assert it.received == [2, 1]


@both
async def test_a_refusal_ends_it(streaming):
    refusal = {"message": "top_p must be below 1", "type": "invalid_request_error", "param": "top_p", "code": None}
    async with bench(Answer(status=400, error=refusal), Answer(), retries=2, failures=1) as it:
        with pytest.raises(PoolError) as caught:
            await it.ask(streaming)
        assert (caught.value.fault, caught.value.body) == (Fault.REFUSED, refusal)
        assert it.received == [1, 0]
        assert it.tried == [("a", ERROR)] and "top_p" not in it.attempts[0].error
        assert all(state.available for state in it.relay.states())


@both
async def test_what_does_not_fit_goes_on_to_larger_windows_only(streaming):
    full = Answer(status=400, error={"message": "maximum context length is 8192"})
    windows = {"a": {"window": 8192}, "b": {"window": 8192}, "c": {"window": 4096}, "d": {"window": 65536}}
    async with bench(full, Answer(), Answer(), Answer(), each=windows) as it:
        assert await it.ask(streaming) == "d"
        assert it.received == [1, 0, 0, 1]


TOO_LONG = Answer(status=400, error={"message": "prompt is too long", "code": "context_length_exceeded"})


@both
@pytest.mark.parametrize(
    "scripts,windows,fault,status",
    [
        ((failing(503), failing(429)), (8, 8), Fault.UNAVAILABLE, 503),  # of the preferred pool, not the last noise
        ((failing(429), failing(500)), (8, 8), Fault.RATE_LIMITED, 429),
        ((failing(503), Answer(status=400)), (8, 8), Fault.REFUSED, 400),  # the application's own
        ((TOO_LONG, failing(503)), (8, 8), Fault.TOO_LONG, 400),
        ((TOO_LONG, failing(503)), (8, 16), Fault.UNAVAILABLE, 503),  # it would have fitted
        ((failing(503), TOO_LONG), (16, 8), Fault.UNAVAILABLE, 503),  # noise of a small fallback
        ((TOO_LONG, TOO_LONG), (8, 16), Fault.TOO_LONG, 400),
        ((failing(503), TOO_LONG), (8, 8), Fault.TOO_LONG, 400),  # it would not have fitted there either
    ],
)
async def test_the_error_raised_is_the_one_that_matters(scripts, windows, fault, status, streaming):
    async with bench(*scripts, each={"a": {"window": windows[0]}, "b": {"window": windows[1]}}) as it:
        with pytest.raises(PoolError) as caught:
            await it.ask(streaming)
        assert (caught.value.fault, caught.value.status) == (fault, status)


@both
async def test_all_cooling_down_says_when_to_come_back(streaming):
    clock = Clock()
    limits = {"a": {"cooldown_seconds": 30.0}, "b": {"cooldown_seconds": 20.0}}
    async with bench(failing(429), failing(503), clock=clock, failures=1, each=limits) as it:
        with pytest.raises(PoolError) as caught:
            await it.ask(streaming)
        assert (caught.value.fault, caught.value.retry_after) == (Fault.RATE_LIMITED, 20.0)
        clock.now += 5
        with pytest.raises(PoolError) as caught:
            await it.ask(streaming)
        assert (caught.value.fault, caught.value.retry_after) == (Fault.RATE_LIMITED, 15.0)
        assert it.received == [1, 1] and len(it.attempts) == 2
        states = [(state.available, state.reason, state.retry_after) for state in it.relay.states()]
        assert states == [(False, "cooling down", 25.0), (False, "cooling down", 15.0)]


async def test_a_rate_limit_always_says_when_to_come_back():
    async with bench(failing(429), failures=5) as it:
        with pytest.raises(PoolError) as caught:
            await it.complete()
        assert caught.value.fault is Fault.RATE_LIMITED and caught.value.retry_after


@both
async def test_a_larger_pool_that_cools_down_is_no_reason_to_call_the_prompt_too_long(streaming):
    limits = {"a": {"window": 8}, "b": {"window": 16}}
    async with bench(TOO_LONG, failing(503), failures=1, clock=Clock(), each=limits) as it:
        for fault in (Fault.UNAVAILABLE, Fault.RATE_LIMITED):
            with pytest.raises(PoolError) as caught:
                await it.ask(streaming)
            assert (caught.value.fault, caught.value.retry_after) == (fault, 10.0)


@both
async def test_a_pool_that_cools_down_but_is_no_larger_does_not_hide_that_the_prompt_is_too_long(streaming):
    """Else the application would come again and again with what fits nowhere."""
    limits = {"a": {"window": 8}, "b": {"window": 8}}
    async with bench(failing(503), TOO_LONG, failures=1, clock=Clock(), each=limits) as it:
        for _ in range(2):
            with pytest.raises(PoolError) as caught:
                await it.ask(streaming)
            assert (caught.value.fault, caught.value.retry_after) == (Fault.TOO_LONG, None)
        assert it.received == [1, 2]


@both
async def test_who_was_silent_for_as_long_as_may_be_is_not_waited_for_once_more(streaming):
    times = {"first_token_seconds": 0.2, "total_seconds": 0.2}
    async with bench(Answer(delay=60), Answer(), retries=3, each={"a": times}) as it:
        assert await it.ask(streaming) == "b"
        assert it.received == [1, 1]


@both
async def test_a_fallback_that_fails_cools_down_like_any_pool(streaming):
    async with bench(failing(401), failing(503), Answer(), failures=2, clock=Clock()) as it:
        for _ in range(4):
            assert await it.ask(streaming) == "c"
        assert it.received == [1, 2, 4]


@both
@pytest.mark.parametrize("status,available", [(401, False), (402, False), (404, False), (403, True)])
async def test_a_prompt_that_one_upstream_forbids_takes_its_pool_from_nobody_else(status, available, streaming):
    async with bench([failing(status), Answer()], Answer(), failures=3, retries=1) as it:
        assert await it.ask(streaming) == "b"
        assert it.received == [1, 1]
        assert it.relay.states()[0].available is available


@both
async def test_a_pool_that_asked_for_rest_gets_it_though_others_went_well_with_it(streaming):
    clock = Clock()
    later = failing(429, **{"retry-after": "30"})
    async with bench([Answer(delay=0.2, pace=0.01), later, Answer()], Answer(), clock=clock) as it:
        going = asyncio.create_task(it.ask(streaming))
        await until(lambda: it.upstreams["a"].active == 1)
        assert await it.ask(streaming) == "b"
        assert await going == "a"
        assert await it.ask(streaming) == "b"
        clock.now += 30
        assert await it.ask(streaming) == "a"


@both
async def test_one_call_finds_out_whether_a_pool_is_back(streaming):
    clock = Clock()
    async with bench([failing(503), Answer(delay=0.1)], Answer(), failures=1, clock=clock) as it:
        assert await it.ask(streaming) == "b"
        clock.now += 10
        answered = await asyncio.gather(*(it.ask(streaming) for _ in range(5)))
        assert sorted(answered) == ["a", "b", "b", "b", "b"]
        assert await it.ask(streaming) == "a"


async def test_a_pool_that_streams_again_is_back_before_it_has_ended():
    clock = Clock()
    async with bench([failing(503), Answer(text="word " * 1000, pace=0.01), Answer()], failures=1, clock=clock) as it:
        with pytest.raises(PoolError):
            await it.streamed()
        clock.now += 10
        async with aclosing(it.relay.stream(it.order, BODY, it.attempts)) as chunks:
            await anext(chunks)
            assert await it.ask(False) == "a"


async def test_an_error_inside_a_200_counts_as_a_failure_of_the_pool():
    async with bench(Answer(then="error", after=1), Answer(), failures=1, clock=Clock()) as it:
        assert [await it.ask(True), await it.ask(True)] == ["b", "b"]
        assert it.tried == [("a", ERROR), ("b", OK), ("b", OK)]


@pytest.mark.parametrize(
    "weak", [Answer(then="abort", after=0), Answer(then="abort", after=1), Answer(then="close", after=1)]
)
async def test_a_stream_that_breaks_before_its_first_token_goes_to_the_next_pool(weak):
    async with bench(weak, Answer(text="strong")) as it:
        chunks = await it.streamed()
        assert "".join(chunk.text for chunk in chunks) == "strong"
        assert {chunk.pool for chunk in chunks} == {"b"}
        assert it.tried == [("a", ERROR), ("b", OK)]


async def test_a_stream_that_breaks_later_keeps_what_it_had_cost():
    async with bench(DIES, Answer(), retries=3) as it:
        heard = []
        with pytest.raises(PoolError) as caught:
            async for chunk in it.relay.stream(it.order, BODY, it.attempts):
                heard += [chunk.text]
        assert "".join(heard) == "All is"
        assert caught.value.fault is Fault.BROKEN
        assert it.received == [1, 0]
        (attempt,) = it.attempts
        assert (attempt.status, attempt.prompt_tokens, attempt.completion_tokens) == (PARTIAL, 50, 2)
        assert attempt.cost == 50 * 1_000_000 + 2 * 10_000_000
        assert attempt.error == "broken"


async def test_streams_that_keep_breaking_cool_their_pool_down():
    async with bench(DIES, Answer(), failures=2, clock=Clock()) as it:
        for _ in range(2):
            with pytest.raises(PoolError):
                await it.streamed()
        assert await it.ask(True) == "b"


@both
async def test_the_answer_of_a_fallback_has_its_own_price(streaming):
    prices = {
        "a": {"price_in": 100.0},
        "b": {"price_in": 0.5, "price_out": 2.0, "price_cached": 0.05, "tier": "compact"},
    }
    answer = Answer(text="one two", prompt_tokens=1000, cached_tokens=800, model="gpt-b")
    async with bench(failing(503), answer, each=prices) as it:
        await it.ask(streaming)
        failed, served = it.attempts
        assert (failed.pool, failed.cost, failed.model, failed.error) == ("a", 0, "", "unavailable (HTTP 503)")
        assert served.cost == 200 * 500_000 + 800 * 50_000 + 2 * 2_000_000
        assert (served.model, served.tier, served.cached_tokens, served.estimated) == ("gpt-b", "compact", 800, False)
        assert 0 < served.first_token_seconds <= served.seconds


@both
@pytest.mark.parametrize("usage", ["zero", "none"])
async def test_an_answer_without_usage_is_not_free(usage, streaming):
    async with bench(Answer(usage=usage)) as it:
        await it.ask(streaming)
        (attempt,) = it.attempts
        assert attempt.estimated and attempt.prompt_tokens and attempt.completion_tokens and attempt.cost


@both
async def test_the_trace_goes_on_upstream(streaming):
    context = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    async with bench(Answer()) as it:
        with use_span(NonRecordingSpan(context)):
            await it.ask(streaming)
        assert f"{0xABC:032x}" in it.upstreams["a"].calls[0].headers["traceparent"]


async def test_roles_and_subtasks_are_noted():
    async with bench(Answer()) as it:
        await it.relay.complete("a", BODY, it.attempts, subtask="s1", role=Role.ESCALATION)
        assert (it.attempts[0].subtask, it.attempts[0].role) == ("s1", Role.ESCALATION)


@both
async def test_whoever_goes_away_leaves_an_account_and_frees_the_upstream(streaming):
    async with bench(Answer(text="word " * 1000, pace=0.005, delay=0 if streaming else 60)) as it:
        task = asyncio.create_task(it.ask(streaming))
        await until(lambda: it.upstreams["a"].active == 1 and (not streaming or it.upstreams["a"].calls[0].sent > 5))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: it.upstreams["a"].calls[0].gone)
        (attempt,) = it.attempts
        assert (attempt.status, attempt.estimated) == (CANCELLED, True)
        assert attempt.prompt_tokens and attempt.cost and bool(attempt.completion_tokens) is streaming
        assert it.busy() == [0]


async def test_closing_a_stream_in_the_middle_does_so_too():
    async with bench(Answer(text="word " * 1000, pace=0.005)) as it:
        async with aclosing(it.relay.stream(it.order, BODY, it.attempts)) as chunks:
            async for chunk in chunks:
                if chunk.text:
                    break
        assert it.tried == [("a", CANCELLED)] and it.busy() == [0]
        await until(lambda: it.upstreams["a"].calls[0].gone)


async def test_who_leaves_after_the_usage_has_heard_everything():
    async with bench(Answer()) as it:
        async with aclosing(it.relay.stream(it.order, BODY, it.attempts)) as chunks:
            async for chunk in chunks:
                if chunk.usage is not None:
                    break
        assert it.tried == [("a", OK)] and not it.attempts[0].estimated


@both
async def test_a_silent_pool_is_hedged_and_the_loser_is_accounted_for(streaming):
    async with bench(Answer(delay=60), Answer(), Answer(), hedge_seconds=0.05) as it:
        assert await it.ask(streaming) == "b"
        assert [(each.pool, each.role, each.status) for each in it.attempts] == [
            ("a", Role.ANSWER, CANCELLED),
            ("b", Role.HEDGE, OK),
        ]
        assert all(attempt.cost for attempt in it.attempts)
        await until(lambda: it.upstreams["a"].calls[0].gone)
        assert it.received == [1, 1, 0] and it.busy() == [0, 0, 0]


@both
async def test_the_pool_that_was_hedged_may_still_win(streaming):
    async with bench(Answer(delay=0.2), Answer(delay=60), hedge_seconds=0.05) as it:
        assert await it.ask(streaming) == "a"
        assert [(each.pool, each.role, each.status) for each in it.attempts] == [
            ("b", Role.HEDGE, CANCELLED),
            ("a", Role.ANSWER, OK),
        ]


@both
async def test_a_race_in_which_all_fail_goes_on_to_the_rest(streaming):
    slow = Answer(status=503, delay=0.1)
    async with bench(slow, slow, Answer(), hedge_seconds=0.05) as it:
        assert await it.ask(streaming) == "c"
        assert it.tried == [("a", ERROR), ("b", ERROR), ("c", OK)]


@both
async def test_nobody_is_hedged_who_answers_in_time_or_has_no_one_beside_him(streaming):
    async with bench(Answer(), Answer(), hedge_seconds=5.0) as it:
        await it.ask(streaming)
        assert it.received == [1, 0]
    async with bench(Answer(delay=0.2), failing(503), hedge_seconds=0.05, failures=1, clock=Clock()) as it:
        with pytest.raises(PoolError):
            await it.relay.complete(("b",), BODY, [])
        assert await it.ask(streaming) == "a"
        assert it.received == [1, 1]


@both
async def test_a_hedge_passes_over_pools_that_cool_down(streaming):
    async with bench(Answer(delay=60), failing(503), Answer(), hedge_seconds=0.05, failures=1, clock=Clock()) as it:
        with pytest.raises(PoolError):
            await it.relay.complete(("b",), BODY, [])
        assert await it.ask(streaming) == "c"


async def test_a_race_that_is_cancelled_leaves_nothing_behind():
    async with bench(Answer(delay=60), Answer(delay=60), hedge_seconds=0.05) as it:
        task = asyncio.create_task(it.complete())
        await until(lambda: it.received == [1, 1])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(it.tried) == [("a", CANCELLED), ("b", CANCELLED)] and it.busy() == [0, 0]
        await until(lambda: all(upstream.calls[0].gone for upstream in it.upstreams.values()))


@both
async def test_calls_at_once_are_bounded_and_more_wait_their_turn(streaming):
    async with bench(Answer(delay=0.02), concurrency=3) as it:
        answered = await asyncio.gather(*(it.ask(streaming) for _ in range(15)))
        assert answered == ["a"] * 15 and it.upstreams["a"].most_active == 3
        assert it.busy() == [0]


async def test_a_full_pool_sends_on_to_the_next():
    async with bench(Answer(delay=0.2), Answer(), concurrency=1) as it:
        answered = await asyncio.gather(*(it.complete() for _ in range(7)))
        assert sorted(reply.pool for reply in answered) == ["a"] * 5 + ["b"] * 2
        assert it.received == [5, 2]


async def test_full_pools_say_so():
    async with bench(Answer(delay=0.2), concurrency=1) as it:
        waiting = [asyncio.create_task(it.complete()) for _ in range(5)]
        await asyncio.sleep(0.05)
        (state,) = it.relay.states()
        assert (state.available, state.reason) == (False, "full") and state.retry_after
        with pytest.raises(PoolError) as caught:
            await it.complete()
        assert caught.value.fault is Fault.RATE_LIMITED and caught.value.retry_after
        await asyncio.gather(*waiting)


async def test_no_pools_at_all():
    async with bench(Answer()) as it:
        with pytest.raises(PoolError):
            await it.relay.complete((), BODY, it.attempts)


class Together:
    """Pools that answer at the same moment."""

    def __init__(self, name, config, gate):
        self.name = name
        self.settings = config
        self.gate = gate

    async def complete(self, body):
        await self.gate.wait()
        return Reply({}, "same", "stop", Usage(10, 1), self.name)

    async def stream(self, body):
        await self.gate.wait()
        yield Chunk({"choices": [{"delta": {"content": "same"}}]}, "same")
        yield Chunk({"choices": []}, usage=Usage(10, 1))

    async def close(self):
        pass


@both
async def test_a_dead_heat_has_one_winner_and_two_accounts(streaming):
    gate = asyncio.Event()
    async with bench(Answer(), hedge_seconds=0.02) as it:
        config = settings(it.upstreams["a"], hedge_seconds=0.02)
        it.relay = Relay({name: Together(name, config, gate) for name in "xy"})
        it.order = ("x", "y")
        asking = asyncio.create_task(it.ask(streaming))
        await until(lambda: it.busy() == [1, 1])
        gate.set()
        assert await asking in "xy"
        assert [attempt.status for attempt in it.attempts] == [CANCELLED, OK] and it.busy() == [0, 0]
        assert all(attempt.cost for attempt in it.attempts)


@both
@pytest.mark.parametrize("steps", range(1, 7))
async def test_a_dead_heat_whose_judge_is_called_away_leaves_nothing_behind(steps, streaming):
    """At whatever point of the event loop's work between the two answers and the decision."""
    gate = asyncio.Event()
    async with bench(Answer(), hedge_seconds=0.02) as it:
        config = settings(it.upstreams["a"], hedge_seconds=0.02)
        it.relay = Relay({name: Together(name, config, gate) for name in "xy"})
        it.order = ("x", "y")
        asking = asyncio.create_task(it.ask(streaming))
        await until(lambda: it.busy() == [1, 1])
        gate.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert it.busy() == [0, 0] and len(it.attempts) == 2


class Faulty:
    """A pool with a mistake in it."""

    def __init__(self, config):
        self.name = "faulty"
        self.settings = config

    async def complete(self, body):
        raise ZeroDivisionError("secret of the prompt")

    async def stream(self, body):
        raise ZeroDivisionError("secret of the prompt")
        yield

    async def close(self):
        pass


async def test_a_stream_that_cannot_be_read_is_closed_at_once():
    ended = []

    class Odd(Faulty):
        async def stream(self, body):
            try:
                yield Chunk({"choices": ["none"]})
            finally:
                ended.append(self.name)

    async with bench(Answer()) as it:
        it.relay = Relay({"faulty": Odd(settings(it.upstreams["a"]))})
        it.order = ("faulty",)
        stream = it.relay.stream(it.order, BODY, it.attempts)
        with pytest.raises(AttributeError) as caught:  # the traceback keeps its frames alive
            await anext(stream)
        assert caught and ended == ["faulty"] and it.busy() == [0]


@both
async def test_a_mistake_in_a_pool_is_raised_and_accounted_for(streaming):
    async with bench(Answer()) as it:
        it.relay = Relay({"faulty": Faulty(settings(it.upstreams["a"]))})
        it.order = ("faulty",)
        with pytest.raises(ZeroDivisionError):
            await it.ask(streaming)
        assert it.tried == [("faulty", ERROR)] and it.busy() == [0]
        assert it.attempts[0].error == "failed with ZeroDivisionError"


async def test_64_streams_while_a_pool_dies():
    """Each ends: elsewhere if it had not begun, else with an error; every call is accounted for, nothing is left."""
    before = len(asyncio.all_tasks())
    async with bench(
        Answer(text="word " * 2000, pace=0.02, usage="each"),
        Answer(text="elsewhere"),
        each={"a": {"concurrency": 32, "retries": 1}},
    ) as it:

        async def one() -> str:
            try:
                return (await it.streamed())[-1].pool
            except PoolError as error:
                return error.fault.value

        streams = [asyncio.create_task(one()) for _ in range(64)]
        await until(lambda: it.upstreams["a"].active == 32 and all(call.sent > 3 for call in it.upstreams["a"].calls))
        await it.upstreams["a"].stop()
        ends = await asyncio.wait_for(asyncio.gather(*streams), 20)

        assert sorted(ends) == ["b"] * 32 + ["broken"] * 32
        statuses = [attempt.status for attempt in it.attempts]
        assert statuses.count(PARTIAL) == statuses.count(OK) == 32
        assert statuses.count(ERROR) <= 6  # most of those that waited never asked a pool that was known to be dead
        partial = [attempt for attempt in it.attempts if attempt.status is PARTIAL]
        assert all(each.completion_tokens and not each.estimated for each in partial)
        assert all(each.cost for each in partial)
        assert it.busy() == [0, 0]
        assert [state.available for state in it.relay.states()] == [False, True]
        assert await it.ask(True) == "b"

        await it.upstreams["a"].start()
        it.upstreams["a"].script = Answer()
        await it.relay.close()
        await until(lambda: it.upstreams["b"].connections == 0)
    assert len(asyncio.all_tasks()) == before


MOODS = [
    Answer(),
    Answer(pace=0.002),
    Answer(delay=0.05),
    failing(503),
    failing(429),
    Answer(then="error", after=0),
    Answer(then="error", after=3),
    Answer(then="abort", after=2),
    Answer(then="close", after=4),
    Answer(then="hang", after=1),
    Answer(raw=b"nonsense"),
]


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_every_call_is_accounted_for_and_nothing_is_left(seed):
    chance = random.Random(seed)
    limits = {"concurrency": 8, "cooldown_seconds": 0.02, "retries": 1, "failures": 4, "hedge_seconds": 0.03}
    times = {"first_token_seconds": 0.3, "next_token_seconds": 0.3, "total_seconds": 1.0}
    before = len(asyncio.all_tasks())
    async with bench(*[lambda body, n: chance.choice(MOODS)] * 3, **limits, **times) as it:

        async def one() -> str:
            await asyncio.sleep(chance.random() * 0.5)
            try:
                async with asyncio.timeout(chance.choice([0.02, 5.0, 5.0])):
                    return await it.ask(chance.random() < 0.6)
            except (PoolError, TimeoutError) as error:
                return type(error).__name__

        ends = await asyncio.wait_for(asyncio.gather(*(one() for _ in range(120))), 30)
        assert {"a", "b", "c"} & set(ends)
        assert it.busy() == [0, 0, 0]
        assert [attempt.pool for attempt in it.attempts if attempt.status == OK]
        await until(lambda: not any(upstream.active for upstream in it.upstreams.values()))
        # a call that is given up while it is connecting is accounted for though nobody received it
        unsent = sum(attempt.status == CANCELLED for attempt in it.attempts)
        assert sum(it.received) <= len(it.attempts) <= sum(it.received) + unsent
        assert all(attempt.cost for attempt in it.attempts if attempt.status != ERROR)
    assert len(asyncio.all_tasks()) == before


async def test_costs_are_those_of_the_price_list():
    async with bench(Answer(prompt_tokens=70)) as it:
        reply = await it.complete()
        assert it.attempts[0].cost == cost(it.relay.states()[0].settings, reply.usage)
