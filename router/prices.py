"""What a call costs. Pure; in picodollars (1e-12 USD), so that sums are exact."""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache

from contracts.base import INT64_MAX
from router.chat import Usage
from router.settings import PoolSettings

DOLLAR = 10**12  # picodollars
PER_TOKEN = 1_000_000  # picodollars of one token at one dollar per million


def cost(pool: PoolSettings, usage: Usage) -> int:
    """Picodollars of a call: plain prompt tokens, those read from and written to the cache, and sampled ones.

    At most what a message can hold, nine million dollars: an upstream may report any number of tokens.
    """
    plain = max(usage.prompt - usage.cached - usage.cache_written, 0)
    picodollars = (
        plain * _rate(pool.price_in)
        + usage.cached * _rate(pool.price_in if pool.price_cached is None else pool.price_cached)
        + usage.cache_written * _rate(pool.price_in if pool.price_cache_write is None else pool.price_cache_write)
        + usage.completion * _rate(pool.price_out)
    )
    return min(picodollars, INT64_MAX)


@lru_cache(maxsize=1024)
def _rate(dollars_per_million: float) -> int:
    """Picodollars per token; through the shortest decimal, so that 0.07 means seven hundredths."""
    return int(Decimal(repr(dollars_per_million)) * PER_TOKEN)
