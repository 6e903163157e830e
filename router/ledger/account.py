"""What a request cost, and what the strongest model would have cost. Pure; in picodollars, so that sums are exact.

**Cost** is the sum of all attempts: retries, failures, answers that broke off, hedges, planning and joining included.

**Counterfactual** is one call of the strongest pool with the request's prompt and an answer as long as the one given.
It supposes that the strongest model would have succeeded at once and written as much. Of the prompt it reads from its
cache the share that was read from one here, or, where that is more, what the session's turns before have left in the
cache of whichever pool served them: without a router they would all lie in one. Two more rules keep it from flattering
the router. Where the answer came from the strongest pool itself, by a call without a failure's text in it and with the
session in its own cache, that call is the counterfactual: nothing was saved and nothing lost. Where no answer was given
there is nothing to compare with: the counterfactual is 0, and what the failure cost counts as loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from contracts.base import INT64_MAX
from contracts.routing import Attempt, Role, RouteOutcome, Status
from router.chat import Usage
from router.prices import cost
from router.settings import PoolSettings

WHOLE = ""  # the subtask that is the request as it stands
ANSWERING = {Role.ANSWER, Role.ESCALATION, Role.HEDGE}
PROMPT_WEIGHT = 3  # prompt tokens for each sampled one, when prices of pools are compared
LONGEST = 500  # characters of a model's name or an error's sentence


@dataclass(frozen=True)
class Account:
    """The bill of one request, in picodollars."""

    cost: int  # of all attempts
    counterfactual: int  # of one call of the strongest pool
    pool: str  # that gave the answer, or the dearest part of it; empty when none did

    @property
    def saved(self) -> int:
        """What was saved against the strongest pool; negative where trying elsewhere cost more."""
        return self.counterfactual - self.cost


@dataclass(frozen=True)
class Facts:
    """What an outcome says that its attempts do not."""

    request_id: str
    run: str
    key: str  # name of the API key; empty = nobody's
    session: str  # of the conversation, hashed
    requested: str  # the model that was asked for
    kind: str  # of the request
    prompt_tokens: int  # of the request as it was sent, estimated
    allowed: Collection[str] | None = None  # pools that the key may use; None = all
    cached: Mapping[str, int] = field(default_factory=dict)  # pool -> prompt tokens of the session in its cache before


def strongest(pools: Mapping[str, PoolSettings], tokens: int, allowed: Collection[str] | None = None) -> str:
    """The pool that everything would be sent to without a router; empty where there is none.

    The dearest one of tier strong that the key may use and whose window holds `tokens`, three prompt tokens counted for
    each sampled one; without one of that tier, the dearest of all. Of equals, the first by name. Price stands for
    strength here: what a person would have bought who wanted no wrong answers.
    """
    candidates = {name: pool for name, pool in pools.items() if allowed is None or name in allowed}
    for narrower in (
        lambda pool: pool.tier == "strong",
        lambda pool: pool.window >= tokens,
    ):
        candidates = {name: pool for name, pool in candidates.items() if narrower(pool)} or candidates
    return min(candidates, key=lambda name: (-_blended(candidates[name]), name), default="")


def account(
    attempts: Sequence[Attempt],
    pools: Mapping[str, PoolSettings],
    *,
    prompt_tokens: int,
    answered: bool = True,
    allowed: Collection[str] | None = None,
    cached: Mapping[str, int] | None = None,
) -> Account:
    """The bill of a request from all its attempts; `prompt_tokens` is the estimate for the request as it was sent.

    `answered` is whether the application got an answer, or a part of one; `allowed` and `cached` are as in `Facts`.
    """
    total = min(sum(attempt.cost for attempt in attempts), INT64_MAX)
    parts = answers(attempts) if answered else []
    if not parts:
        return Account(total, 0, "")
    given = next((part for part in parts if part.role == Role.JOIN), None)
    pool = max(parts, key=lambda part: (part.tier == "strong", part.cost)).pool
    length = given.completion_tokens if given else sum(part.completion_tokens for part in parts)
    whole = parts[0].subtask == WHOLE
    prompt = (_prompt(attempts) if whole else 0) or prompt_tokens
    best = strongest(pools, prompt + length, allowed)
    if not best:  # pools were taken out of the settings: what was paid is all that is known
        return Account(total, total, pool)
    caches = cached or {}
    warm = max(caches.values(), default=0)
    if whole and parts[0].pool == best and parts[0].role != Role.ESCALATION and caches.get(best, 0) >= warm:
        return Account(total, parts[0].cost, pool)
    read = sum(part.cached_tokens for part in parts) * prompt // max(sum(part.prompt_tokens for part in parts), 1)
    warm = warm * prompt // max(prompt_tokens, 1)  # estimated as `prompt_tokens` is
    usage = Usage(prompt=prompt, completion=length, cached=min(max(read, warm), prompt))
    return Account(total, cost(pools[best], usage), pool)


def answers(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts that made up the answer: of each subtask the last that succeeded, else the last that wrote anything.

    The call that joined them is one more. In order of their subtasks' first appearance. Where the request was answered
    as it stands after its parts had failed, what the parts have written is no part of the answer.
    """
    found: dict[tuple[str, bool], Attempt] = {}
    for attempt in attempts:
        if attempt.role not in ANSWERING and attempt.role != Role.JOIN:
            continue
        part = (attempt.subtask, attempt.role == Role.JOIN)
        if attempt.status == Status.OK or (
            attempt.completion_tokens and attempt.status in (Status.PARTIAL, Status.CANCELLED)
        ):
            former = found.get(part)
            if former is None or former.status != Status.OK or attempt.status == Status.OK:
                found[part] = attempt
    whole = found.get((WHOLE, False))
    return [whole] if whole else list(found.values())


def outcome(
    facts: Facts,
    attempts: Sequence[Attempt],
    pools: Mapping[str, PoolSettings],
    *,
    status: str,
    decisions: Sequence[str],
    seconds: float,
    overhead_seconds: float,
    at_ns: int,
    error: str = "",
) -> RouteOutcome:
    """The record of a request that has ended, however it did. `status` is a `Status`; times in seconds and unix ns."""
    bill = account(
        attempts,
        pools,
        prompt_tokens=facts.prompt_tokens,
        answered=status != Status.ERROR,
        allowed=facts.allowed,
        cached=facts.cached,
    )
    return RouteOutcome(
        request_id=facts.request_id,
        run=facts.run,
        key=facts.key,
        session=facts.session,
        requested=_plain(facts.requested),
        pool=bill.pool,
        kind=facts.kind,
        status=status,
        decisions=list(decisions),
        attempts=[
            msgspec.structs.replace(each, model=_plain(each.model), error=_plain(each.error)) for each in attempts
        ],
        cost=bill.cost,
        counterfactual=bill.counterfactual,
        error=_plain(error),
        seconds=seconds,
        overhead_seconds=overhead_seconds,
        at_ns=at_ns,
    )


def _plain(text: str) -> str:
    """What an upstream or an application says about itself, in a length and in characters that can be written down."""
    return text[:LONGEST].encode("utf-8", "replace").decode()


def _prompt(attempts: Sequence[Attempt]) -> int:
    """Tokens of the request's own prompt as a pool counted them, 0 where none did.

    Parts have prompts of their own, and escalations carry a failure's text, so the first call for the whole counts.
    """
    calls = (a for a in attempts if a.subtask == WHOLE and a.role in (Role.ANSWER, Role.HEDGE))
    counted = (call.prompt_tokens for call in calls if not call.estimated)
    return next((tokens for tokens in counted if tokens), 0)


def _blended(pool: PoolSettings) -> float:
    return (PROMPT_WEIGHT * pool.price_in + pool.price_out) / (PROMPT_WEIGHT + 1)
