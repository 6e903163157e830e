"""What a call is expected to cost before it is made. Pure; picodollars."""

from __future__ import annotations

from collections.abc import Iterable

from router import prices
from router.chat import Usage
from router.pools.base import PoolState
from router.settings import PoolSettings


def expected(pool: PoolState, prompt_tokens: int, answer_tokens: int) -> int:
    """One call: what the pool has cached at its cached price, the rest written to the cache, and the answer."""
    cached = min(pool.cached_tokens, prompt_tokens)
    written = 0 if pool.settings.price_cache_write is None else prompt_tokens - cached
    return prices.cost(pool.settings, Usage(prompt_tokens, answer_tokens, cached, written))


def at_most(pool: PoolSettings, prompt_tokens: int, max_tokens: int | None, choices: int = 1) -> int:
    """One call whose answers are as long as they may be; 0 where nothing was said about that."""
    return 0 if max_tokens is None else prices.cost(pool, Usage(prompt_tokens, choices * max_tokens))


def cache_value(pool: PoolState, prompt_tokens: int) -> int:
    """What reading this prompt from the pool's cache saves, once; 0 where cached tokens are no cheaper."""
    cached = min(pool.cached_tokens, prompt_tokens)
    written = 0 if pool.settings.price_cache_write is None else cached
    fresh = prices.cost(pool.settings, Usage(cached, 0, 0, written))
    return max(fresh - prices.cost(pool.settings, Usage(cached, 0, cached)), 0)


def lost(pools: Iterable[PoolState], chosen: str, prompt_tokens: int) -> int:
    """Cost of switching: the other pools' caches that are needed again and expire because the call goes elsewhere."""
    return round(
        sum(
            pool.expiring * cache_value(pool, prompt_tokens)
            for pool in pools
            if pool.name != chosen and pool.expiring > 0
        )
    )


def cascade(first: int, success: float, retry: int) -> int:
    """A checked subtask: one call, and another one of the pool escalated to where the verifier refuses the answer."""
    return first + round((1.0 - success) * retry)
