"""Hard filters: a pool that cannot take a request never gets it, and who asks is told what to do about it."""

from __future__ import annotations

from typing import Any

import pytest

from router.chat import ApiError
from router.policy.calibration import Calibration
from router.policy.filters import Screened, screen
from router.pools.base import PoolState
from tests.unit.router.policies import pool, question

DOWN = {"available": False, "reason": "cooling down", "retry_after": 7.5}


def screened(pools: list[PoolState], **fields: Any) -> Screened:
    return screen(question(**fields), pools, Calibration())


@pytest.mark.parametrize(
    ("fields", "changes", "word"),
    [
        ({"tools": True}, {"capabilities": {"json"}}, "tools"),  # goose 11054: a host without tools
        ({"json_mode": True}, {"capabilities": {"tools"}}, "json"),
        ({"images": True}, {}, "images"),
        ({"prompt_tokens": 92_208}, {"window": 65_536}, "window"),  # claude-code-router 252
        ({"prompt_tokens": 60_000, "max_tokens": 8_192}, {"window": 65_536}, "window"),  # no room for the answer
        ({"prompt_tokens": 65_000}, {"window": 65_536}, "window"),  # the estimate may be wrong by that much
        ({"allowed": frozenset({"strong"})}, {}, "tenant"),
        ({"minimum": "strong"}, {}, "tier"),
        ({"budget": 500_000_000}, {"price_in": 30.0}, "budget"),
        ({}, {"state": DOWN}, "cooling down"),
        ({}, {"state": {"available": False, "reason": "full"}}, "full"),
    ],
)
def test_a_pool_that_cannot_is_left_out_and_the_reason_said(
    fields: dict[str, Any], changes: dict[str, Any], word: str
) -> None:
    able = pool("strong", capabilities={"tools", "json", "images"}, price_in=0.1, price_out=0.1, price_cache_write=None)
    found = screened([pool("compact", **changes), able], **fields)
    assert [each.name for each in found.usable] == ["strong"]
    assert word in found.excluded["compact"]


@pytest.mark.parametrize(
    ("fields", "pools", "status", "code", "param"),
    [
        ({"prompt_tokens": 300_000}, [pool("a"), pool("strong")], 400, "context_length_exceeded", "messages"),
        # the small one is cooling down as well, which would not help
        ({"prompt_tokens": 300_000}, [pool("a", DOWN)], 400, "context_length_exceeded", "messages"),
        ({"images": True}, [pool("a"), pool("strong")], 400, "unsupported", "messages"),
        ({"tools": True}, [pool("a", capabilities={"json"})], 400, "unsupported", "tools"),
        ({"json_mode": True}, [pool("a", capabilities=set())], 400, "unsupported", "response_format"),
        ({"budget": 1}, [pool("a"), pool("strong")], 429, "insufficient_quota", None),
        ({"budget": 1, "minimum": "strong"}, [pool("a"), pool("strong")], 429, "insufficient_quota", None),
        ({"minimum": "strong"}, [pool("a", DOWN)], 429, "rate_limit_exceeded", None),
        ({"allowed": frozenset({"z"})}, [pool("a")], 403, "pool_not_allowed", "model"),
        ({}, [], 503, "no_pools", None),
    ],
)
def test_when_no_pool_can_the_error_says_why(
    fields: dict[str, Any], pools: list[PoolState], status: int, code: str, param: str | None
) -> None:
    with pytest.raises(ApiError) as caught:
        screened(pools, **fields)
    assert (caught.value.status, caught.value.code, caught.value.param) == (status, code, param)


def test_all_in_cooldown_says_when_the_first_is_back() -> None:  # litellm 27823
    later = pool("strong", {**DOWN, "retry_after": 30.0})
    with pytest.raises(ApiError) as caught:
        screened([pool("a", DOWN), later, pool("b", {**DOWN, "retry_after": 1.0}, window=10)])
    assert (caught.value.status, caught.value.retry_after) == (429, 7.5)  # b would be back first, and be too small


def test_only_what_a_key_may_use_counts_in_the_error() -> None:
    with pytest.raises(ApiError) as caught:
        screened([pool("a", window=10), pool("strong")], allowed=frozenset({"a"}))
    assert caught.value.code == "context_length_exceeded"


def test_a_full_pool_is_better_than_none_but_not_than_a_free_one() -> None:
    full = pool("a", {"available": False, "reason": "full"})
    assert [each.name for each in screened([full, pool("b", DOWN)]).usable] == ["a"]
    assert [each.name for each in screened([full, pool("b")]).usable] == ["b"]


def test_a_minimum_tier_that_nobody_has_does_not_refuse_the_request() -> None:
    assert [each.name for each in screened([pool("a"), pool("strong", DOWN)], minimum="strong").usable] == ["a"]


def test_the_budget_counts_what_is_cached() -> None:
    cost_uncached = 100_000 * 3_750_000
    warm = pool("strong", {"cached_tokens": 99_000})
    found = screened([warm, pool("strong-cold")], prompt_tokens=100_000, max_tokens=1, budget=cost_uncached // 2)
    assert [each.name for each in found.usable] == ["strong"]
