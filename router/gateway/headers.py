"""Every header that the gateway reads or writes, in one place.

Asked by applications:

    authorization           Bearer <API key>
    x-tailrace-session      any text; requests with the same one are turns of one conversation, and stay on a pool
                            whose prompt cache holds it

Given with every answer of /v1/chat/completions:

    x-tailrace-request-id   id of the answer, of its decision and outcome on the bus, and for POST /v1/feedback
    x-tailrace-model        pool that answered; of several, the one whose part needed most
    x-tailrace-tier         its tier: compact or strong
    x-tailrace-decision     why this pool: policy, named, affinity, explored, only_pool, verifier; fallback where the
                            pool that was decided on could not answer
    x-tailrace-cost         US dollars of all calls made for the answer, failed ones included
    x-tailrace-overhead-ms  milliseconds spent in the router itself
    x-tailrace-attempts     calls made for the answer, failed ones included
    x-tailrace-session      the conversation's name, hashed, as in decisions and outcomes

A stream's headers are sent with its first chunk (or after a few seconds of silence), and say what is known by then:
attempts that had failed, the pool that answers, the router's time so far. What an answer cost is known at its end: a
stream's last line before `data: [DONE]` is the comment

    : x-tailrace-cost=0.000213 x-tailrace-attempts=2

which clients of server-sent events skip, and its chunk with usage, where one was asked for, has `usage.cost` in US
dollars, as a plain answer has.

Errors may bear

    retry-after             whole seconds after which it is worth trying again
    x-should-retry: false   where trying again is of no use before a budget is renewed; OpenAI's clients heed it
"""

from __future__ import annotations

from collections.abc import Mapping

from router.prices import DOLLAR
from router.record import Record
from router.settings import PoolSettings

Raw = list[tuple[bytes, bytes]]

AUTHORIZATION = "authorization"
SESSION = "x-tailrace-session"
REQUEST_ID = "x-tailrace-request-id"
MODEL = "x-tailrace-model"
TIER = "x-tailrace-tier"
DECISION = "x-tailrace-decision"
COST = "x-tailrace-cost"
OVERHEAD = "x-tailrace-overhead-ms"
ATTEMPTS = "x-tailrace-attempts"
RETRY_AFTER = "retry-after"
SHOULD_RETRY = "x-should-retry"

FALLBACK = "fallback"


def dollars(picodollars: int) -> str:
    """An amount in plain decimals, without trailing zeros."""
    return f"{picodollars // DOLLAR}.{picodollars % DOLLAR:012d}".rstrip("0").rstrip(".")


def told(record: Record, pools: Mapping[str, PoolSettings]) -> Raw:
    """The headers of an answer, or of the error in its place, as far as they are known now."""
    outcome = record.outcome
    pool = outcome.pool if outcome is not None else record.streaming
    values = {
        REQUEST_ID: record.id,
        SESSION: record.request.session,
        MODEL: pool,
        TIER: pools[pool].tier if pool in pools else "",
        DECISION: _why(record, pool),
        COST: dollars(outcome.cost) if outcome is not None else "",
        OVERHEAD: f"{1000 * (outcome.overhead_seconds if outcome is not None else record.overhead):.3f}",
        ATTEMPTS: str(len(record.attempts) + (outcome is None and pool != "")),
    }
    return [(name.encode(), value.encode()) for name, value in values.items() if value]


def _why(record: Record, pool: str) -> str:
    """The reason of the last decision, where its pool is the one that answers."""
    if not record.decisions:
        return ""
    decided = {each.pool for each in record.decisions}
    return record.decisions[-1].reason if not pool or pool in decided else FALLBACK
