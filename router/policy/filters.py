"""Hard filters: which pools can take a request at all, and what the application is told when none can. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from router.chat import ApiError
from router.policy import cost
from router.policy.calibration import Calibration
from router.policy.decision import Question
from router.pools.base import PoolState

SAFETY = 1.1  # prompts are estimated without the pools' own tokenizers
ANSWER_ROOM = 256  # tokens kept free for an answer whose length nobody limits
RETRY_SECONDS = 1.0  # said where a pool does not know when it will be back
FULL = "full"  # the reason of a pool that has no free slot


class Obstacle(IntEnum):
    """Why a pool cannot take a request; the higher, the less the application can do about it by waiting."""

    UNAVAILABLE = 1
    BUDGET = 2
    TIER = 3
    WINDOW = 4
    JSON = 5
    TOOLS = 6
    IMAGES = 7
    TENANT = 8


@dataclass(frozen=True)
class Screened:
    """Pools that can take the request, and what is in the way of the others."""

    usable: tuple[PoolState, ...]
    obstacles: dict[str, dict[Obstacle, str]]  # pool -> what is in its way, and that in words

    @property
    def excluded(self) -> dict[str, str]:
        """Pool -> its weightiest obstacle in words: for the decision's record."""
        return {name: found[max(found)] for name, found in self.obstacles.items()}


def screen(question: Question, pools: Sequence[PoolState], calibration: Calibration) -> Screened:
    """Sort pools into those that can take the request and the others. Raises `ApiError` when none can.

    A pool without a free slot is better than none: its queue is bounded. So is one below the minimum tier.
    """
    obstacles = {pool.name: _obstacles(question, pool, calibration) for pool in pools}
    for tolerable in (frozenset[Obstacle](), frozenset({Obstacle.TIER})):
        for crowded in (False, True):
            usable = tuple(
                pool
                for pool in pools
                if all(_passes(found, pool, tolerable, crowded) for found in obstacles[pool.name])
            )
            if usable:
                names = {pool.name for pool in usable}
                return Screened(usable, {name: found for name, found in obstacles.items() if name not in names})
    raise _refusal(question, pools, obstacles)


def _passes(obstacle: Obstacle, pool: PoolState, tolerable: frozenset[Obstacle], crowded: bool) -> bool:
    return obstacle in tolerable or (crowded and obstacle is Obstacle.UNAVAILABLE and pool.reason == FULL)


def tokens_needed(question: Question) -> int:
    """Window that a request takes up: its prompt with a margin for the estimate, and its answer."""
    return math.ceil(question.prompt_tokens * SAFETY) + (question.max_tokens or ANSWER_ROOM)


def _obstacles(question: Question, pool: PoolState, calibration: Calibration) -> dict[Obstacle, str]:
    settings, found = pool.settings, dict[Obstacle, str]()
    if question.allowed is not None and pool.name not in question.allowed:
        found[Obstacle.TENANT] = "tenant: not allowed for this key"
    for wanted, obstacle in (
        (question.images and "images", Obstacle.IMAGES),
        (question.tools and "tools", Obstacle.TOOLS),
        (question.json_mode and "json", Obstacle.JSON),
    ):
        if wanted and wanted not in settings.capabilities:
            found[obstacle] = f"{wanted}: it has none"
    if (needed := tokens_needed(question)) > settings.window:
        found[Obstacle.WINDOW] = f"window: {needed} of {settings.window} tokens"
    if question.minimum == "strong" and settings.tier != "strong":
        found[Obstacle.TIER] = f"tier: {settings.tier}, {question.minimum} is needed"
    if question.budget is not None:
        price = cost.expected(pool, question.prompt_tokens, calibration.answer_tokens(question))
        if price > question.budget:
            found[Obstacle.BUDGET] = f"budget: {price} of {question.budget} picodollars left"
    if not pool.available:
        found[Obstacle.UNAVAILABLE] = f"unavailable: {pool.reason or 'no reason given'}"
    return found


def _refusal(question: Question, pools: Sequence[PoolState], obstacles: dict[str, dict[Obstacle, str]]) -> ApiError:
    """What the application is told: by the pool that comes closest, as it is there that something can be done."""
    if not pools:
        return ApiError(503, "no pools are configured", type="server_error", code="no_pools")
    worst = {name: max(set(found) - {Obstacle.TIER}) for name, found in obstacles.items()}  # the tier is no reason
    nearest = min(worst.values())
    close = [pool for pool in pools if worst[pool.name] is nearest]
    match nearest:
        case Obstacle.UNAVAILABLE:
            wait = min(pool.retry_after or RETRY_SECONDS for pool in close)
            message = f"all pools that could answer are unavailable ({_listed(close)}); try again in {wait:.1f} s"
            return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after=wait)
        case Obstacle.BUDGET:
            message = "the budget left does not pay for this request on any pool that could answer it"
            return ApiError(429, message, type="insufficient_quota", code="insufficient_quota")
        case Obstacle.WINDOW:
            largest = max(pool.settings.window for pool in close)
            answer = f" and {question.max_tokens} for the answer" if question.max_tokens else ""
            message = (
                f"the largest window is {largest} tokens; this request needs about {question.prompt_tokens} for its "
                f"prompt{answer}, with a margin {tokens_needed(question)}"
            )
            return ApiError(400, message, code="context_length_exceeded", param="messages")
        case Obstacle.TENANT:
            message = "this key may use none of the pools that were asked for"
            return ApiError(403, message, type="permission_error", code="pool_not_allowed", param="model")
        case _:
            wanted = {Obstacle.IMAGES: "messages", Obstacle.TOOLS: "tools", Obstacle.JSON: "response_format"}[nearest]
            name = {"messages": "images", "tools": "tools", "response_format": "JSON mode"}[wanted]
            return ApiError(400, f"no pool that could answer supports {name}", code="unsupported", param=wanted)


def _listed(pools: Sequence[PoolState]) -> str:
    return ", ".join(f"{pool.name}: {pool.reason or 'unavailable'}" for pool in pools)
