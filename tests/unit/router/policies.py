"""What the tests of the routing policy share: pools with the prices of 2026, and questions."""

from __future__ import annotations

from typing import Any

from contracts.routing import Demand
from router.decomposition.plan import Kind
from router.policy.decision import Question
from router.pools.base import PoolState
from router.settings import PoolSettings

STRONG: dict[str, Any] = {
    "tier": "strong", "price_in": 3.0, "price_out": 15.0, "price_cached": 0.3, "price_cache_write": 3.75,
    "window": 200_000,
}  # fmt: skip
COMPACT: dict[str, Any] = {
    "tier": "compact", "price_in": 0.15, "price_out": 0.6, "price_cached": 0.03, "window": 128_000,
}  # fmt: skip


def pool(name: str, state: dict[str, Any] | None = None, **settings: Any) -> PoolState:
    """A pool priced like its name's first letters say: strong…, anything else compact."""
    base = STRONG if name.startswith("strong") else COMPACT
    return PoolState(name, PoolSettings(**(base | settings)), **(state or {}))


def question(text: str = "what does this function do?", **fields: Any) -> Question:
    return Question(
        **(
            {"text": text, "kind": Kind.CODE, "demand": Demand.MECHANICAL, "prompt_tokens": 1000, "tolerance": 0.1}
            | fields
        )
    )
