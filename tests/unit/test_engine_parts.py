"""The engine's pure decisions: who starts, who moves, when a completion ends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from contracts.messages import Finish, Sampling
from generator.engines.base import RequestRefused, SampleRequest
from generator.engines.completions import Completion, StopMatcher
from generator.engines.schedule import Demand, Limits, admit, check
from generator.engines.slots import compaction

LIMITS = Limits(slots=16, cache_tokens=1600, prefill_tokens=100, window=500, vocabulary=50)


def group(prompt: int = 10, slots: int = 4, span: int = 20) -> Demand:
    return Demand(prompt, slots, span)


@pytest.mark.parametrize(
    ("waiting", "active_slots", "active_span", "admitted"),
    [
        ([], 0, 0, 0),
        ([group()] * 3, 0, 0, 3),
        ([group()] * 5, 0, 0, 4),  # 16 slots
        ([group()] * 3, 12, 20, 1),
        ([group()] * 3, 13, 20, 0),
        ([group(slots=8), group(slots=16), group(slots=1)], 0, 0, 1),  # in order: the small one waits its turn
        ([group(prompt=40)] * 3, 0, 0, 2),  # prefill budget
        ([group(prompt=10), group(prompt=60)], 0, 0, 1),  # padding counts
        ([group(prompt=500, span=400), group()], 0, 0, 1),  # a long prompt goes alone
        ([group(slots=4, span=400)], 0, 0, 1),  # cache budget, exactly
        ([group(slots=4, span=401)], 0, 0, 0),
        ([group(slots=1, span=20)], 4, 400, 0),  # would stretch the rows of long ones
        ([group(slots=1, span=800)], 4, 20, 0),
    ],
)
def test_groups_start_in_order_within_the_limits(
    waiting: list[Demand], active_slots: int, active_span: int, admitted: int
) -> None:
    assert admit(waiting, active_slots, active_span, LIMITS) == admitted


def asked(prompt: list[int], group_size: int = 4, **sampling: Any) -> SampleRequest:
    return SampleRequest(prompt, group_size, Sampling(**({"max_tokens": 10} | sampling)), seed=0)


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (asked([]), "at least one"),
        (asked([5, 50]), "token ids in 0..49"),
        (asked([5, -1]), "token ids"),
        (asked([5] * 500), "window of 500"),
        (asked([5], group_size=17), "a group of 17"),
        (asked([5], group_size=0), "a group of 0"),
        (asked([5], temperature=math.nan), "temperature"),
        (asked([5], temperature=math.inf), "temperature"),
        (asked([5], temperature=-1.0), "temperature"),
        (asked([5], top_p=0.0), "top_p"),
        (asked([5], top_p=1.1), "top_p"),
        (asked([5], top_k=-1), "top_k"),
        (asked([5], max_tokens=0), "max_tokens"),
        (asked([5], stop=[""]), "stop string"),
        (asked([5], max_tokens=400), "above the cache's 1600"),
    ],
)
def test_a_request_that_can_never_be_sampled_is_refused(request_: SampleRequest, complaint: str) -> None:
    with pytest.raises(RequestRefused, match=complaint):
        check(request_, LIMITS)


def test_the_largest_requests_pass() -> None:
    check(asked([5] * 499, group_size=3, max_tokens=10**9), LIMITS)
    check(asked([49], group_size=16, temperature=0.0), LIMITS)


@pytest.mark.parametrize(
    ("active", "freed", "moves"),
    [
        (4, [], []),
        (4, [3], []),
        (4, [0], [(3, 0)]),
        (4, [0, 3], [(2, 0)]),
        (4, [1, 2], [(3, 1)]),
        (5, [0, 1], [(3, 0), (4, 1)]),
        (4, [0, 1, 2, 3], []),
    ],
)
def test_active_slots_become_a_prefix_again(active: int, freed: list[int], moves: list[tuple[int, int]]) -> None:
    assert compaction(active, freed) == moves


TEXTS = {1: "a", 2: "b", 3: "\n", 4: "st", 5: "op", 6: "x\ny", 7: " ", 8: "<eos>"}


def decode(tokens: list[int]) -> str:
    return "".join(TEXTS[token] for token in tokens)


@pytest.mark.parametrize(
    ("stops", "tokens", "ends_at"),
    [
        (["\n"], [1, 2, 3], 2),
        (["\n"], [1, 6], 1),  # inside a token
        (["stop"], [1, 4, 5], 2),  # across tokens
        (["stop"], [4, 4, 5], 2),
        (["stop"], [4, 7, 5, 1], None),
        (["zzz", "b a"], [2, 7, 1], 2),
        (["a" * 9], [1] * 9, 8),
        ([], [1, 2, 3], None),
    ],
)
def test_a_stop_string_ends_the_text_at_the_token_that_completes_it(
    stops: list[str], tokens: list[int], ends_at: int | None
) -> None:
    matcher = StopMatcher(stops, decode)
    before = [2] * 20  # a completion is longer than what is looked at
    found = [position for position, token in enumerate(before + tokens) if matcher.push(token)]
    assert found[:1] == ([] if ends_at is None else [len(before) + ends_at])


def completion(max_tokens: int = 5, prompt: int = 3, window: int = 100, seed: int = 1, index: int = 0) -> Completion:
    return Completion(index, prompt, Sampling(max_tokens=max_tokens, stop=["\n"]), seed, window, {8}, decode)


@pytest.mark.parametrize(
    ("made", "tokens", "finish"),
    [
        (completion(), [1, 2, 8], Finish.STOP),
        (completion(), [1, 3], Finish.STOP),
        (completion(), [1, 1, 1, 1, 1], Finish.LENGTH),
        (completion(), [1, 1, 1, 1, 8], Finish.STOP),  # an end at the last token allowed is an end
        (completion(window=5), [1, 1], Finish.LENGTH),  # the window is full
        (completion(max_tokens=1), [1], Finish.LENGTH),
    ],
)
def test_a_completion_ends_once_and_for_a_reason(made: Completion, tokens: list[int], finish: Finish) -> None:
    assert [made.accept(token) for token in tokens] == [None] * (len(tokens) - 1) + [finish]


def test_random_numbers_belong_to_seed_and_index() -> None:
    def numbers(**key: int) -> list[float]:
        one = completion(**key)
        return [one.uniform() for _ in range(3)]

    assert numbers(seed=1, index=0) == numbers(seed=1, index=0)
    assert len({tuple(numbers(seed=seed, index=index)) for seed in (1, 2) for index in (0, 1)}) == 4
    assert all(0 <= number < 1 for number in numbers())
