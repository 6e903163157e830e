"""When a pool is left alone, and for how long; how many calls may run and wait."""

import asyncio

import pytest

from router.pools.health import LONGEST_RETRY_AFTER, Breaker, Full, Slots, State


def tripped(now: float = 0.0) -> Breaker:
    breaker = Breaker(failures=1, cooldown=10.0)
    assert breaker.admit(now)
    breaker.failed(now)
    return breaker


@pytest.mark.parametrize(
    "ends,expected",
    [
        ("ff", State.CLOSED),
        ("fff", State.COOLING),
        ("ffsff", State.CLOSED),  # in a row
        ("ffsfff", State.COOLING),
        ("ffaf", State.COOLING),  # who goes away says nothing about the pool
        ("aaaa", State.CLOSED),
    ],
)
def test_it_trips_after_failures_in_a_row(ends, expected):
    breaker = Breaker(failures=3, cooldown=10.0)
    for end in ends:
        assert breaker.admit(0.0)
        {"f": lambda: breaker.failed(0.0), "s": lambda: breaker.succeeded(0.0), "a": breaker.abandoned}[end]()
    assert breaker.state(0.0) is expected
    assert breaker.admit(0.0) is (expected is State.CLOSED)
    assert breaker.retry_after(0.0) == (0.0 if expected is State.CLOSED else 10.0)


def test_cooldowns_double_up_to_eight_times():
    breaker, now, waits = tripped(), 0.0, []
    for _ in range(6):
        wait = breaker.retry_after(now)
        waits.append(wait)
        assert not breaker.admit(now + wait - 0.01)
        now += wait
        assert breaker.admit(now)
        breaker.failed(now)
    assert waits == [10, 20, 40, 80, 80, 80]


def test_one_call_finds_out_whether_the_pool_is_back():
    breaker = tripped()
    assert breaker.admit(10.0)
    assert breaker.state(10.0) is State.HALF_OPEN
    assert not breaker.admit(10.0)
    assert breaker.retry_after(10.0) > 0
    breaker.abandoned()  # it told nothing: the next one may try
    assert breaker.admit(11.0)
    breaker.succeeded(11.0)
    assert all(breaker.admit(11.0) for _ in range(5))


def test_a_long_answer_keeps_a_pool_that_is_back_from_nobody_for_long():
    breaker = tripped()
    assert breaker.admit(10.0)
    assert not breaker.admit(19.0)
    assert breaker.admit(20.0)  # the first one is still about it
    assert not breaker.admit(20.0)
    breaker.succeeded(21.0)
    assert all(breaker.admit(21.0) for _ in range(5))


def test_success_makes_the_next_cooldown_short_again():
    breaker = tripped()
    assert breaker.admit(10.0)
    breaker.failed(10.0)
    assert breaker.admit(30.0)
    breaker.succeeded(30.0)
    assert breaker.admit(30.0)
    breaker.failed(30.0)
    assert breaker.retry_after(30.0) == 10.0


def test_a_first_token_lets_others_in_but_a_failure_after_it_trips_again():
    breaker = Breaker(failures=3, cooldown=10.0)
    for _ in range(3):
        assert breaker.admit(0.0)
        breaker.failed(0.0)
    assert breaker.admit(10.0)
    breaker.spoke(10.0)
    assert breaker.admit(10.0)
    breaker.failed(11.0)
    assert breaker.retry_after(11.0) == 20.0


def test_calls_that_die_together_are_one_failure():
    breaker = Breaker(failures=3, cooldown=10.0)
    assert all(breaker.admit(0.0) for _ in range(64))
    for _ in range(64):
        breaker.failed(1.0)
    assert breaker.retry_after(1.0) == 10.0


@pytest.mark.parametrize(
    "asked,expected", [(3.0, 10.0), (30.0, 30.0), (0.0, 0.0), (None, 0.0), (1e9, LONGEST_RETRY_AFTER)]
)
def test_what_the_pool_asks_for_is_honoured_at_once(asked, expected):
    breaker = Breaker(failures=3, cooldown=10.0)
    assert breaker.admit(0.0)
    breaker.failed(0.0, retry_after=asked)
    assert breaker.retry_after(0.0) == expected


@pytest.mark.parametrize("ends", ["succeeded", "spoke"])
def test_calls_from_before_do_not_shorten_a_cooldown(ends):
    """Of many at once, one is told to come back later; the others go well, and the pool is left alone all the same."""
    breaker = Breaker(failures=3, cooldown=10.0)
    assert all(breaker.admit(0.0) for _ in range(3))
    breaker.failed(1.0, retry_after=30.0)
    getattr(breaker, ends)(2.0)
    assert breaker.retry_after(2.0) == 29.0
    getattr(breaker, ends)(31.0)
    assert all(breaker.admit(31.0) for _ in range(2))


def test_a_wrong_key_trips_at_once():
    breaker = Breaker(failures=3, cooldown=10.0)
    assert breaker.admit(0.0)
    breaker.failed(0.0, at_once=True)
    assert not breaker.admit(0.0)


async def test_slots_are_bounded_and_so_is_their_queue():
    slots = Slots(concurrency=2, waiting=1)
    await slots.take(1.0)
    await slots.take(1.0)
    third = asyncio.create_task(slots.take(1.0))
    await asyncio.sleep(0)
    assert slots.full
    with pytest.raises(Full):
        await slots.take(1.0)
    slots.give()
    await third
    assert (slots.taken, slots.waiting, slots.full) == (2, 0, False)


async def test_waiting_for_a_slot_has_an_end_and_leaves_nothing_behind():
    slots = Slots(concurrency=1, waiting=1)
    await slots.take(1.0)
    with pytest.raises(TimeoutError):
        await slots.take(0.01)
    waiting = asyncio.create_task(slots.take(1.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    slots.give()
    await slots.take(0.01)
    assert (slots.taken, slots.waiting) == (1, 0)
