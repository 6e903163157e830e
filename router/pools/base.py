"""The protocol between the router and whatever answers: a request in, a reply or a stream of chunks out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from router.chat import Chunk, Reply, Usage
from router.settings import PoolSettings


class Fault(StrEnum):
    """What went wrong with a call, as far as it matters for what to do next."""

    RATE_LIMITED = "rate_limited"  # 429: elsewhere, or later
    UNAVAILABLE = "unavailable"  # 5xx, no connection, nobody there: elsewhere, or again
    TIMEOUT = "timeout"  # no first token, or no next one, in time
    BROKEN = "broken"  # closed early, invalid JSON, an error inside a stream
    REFUSED = "refused"  # 4xx that any pool would give: the application's fault, not tried again
    TOO_LONG = "too_long"  # the prompt does not fit the window: a larger pool may take it
    UNAUTHORISED = "unauthorised"  # our key, address or model name there: the operator's fault, elsewhere


class PoolError(Exception):
    """A call failed. `usage` is what it had cost by then."""

    def __init__(
        self,
        fault: Fault,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        usage: Usage | None = None,
        body: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.fault = fault
        self.status = status  # HTTP status, where there was one
        self.retry_after = retry_after  # seconds, where it was said
        self.usage = usage or Usage()
        self.body = body  # the upstream's own error object, for faults that are the application's


@dataclass(frozen=True)
class PoolState:
    """One pool at this moment."""

    name: str
    settings: PoolSettings
    available: bool = True  # not cooling down, not open, not full
    reason: str = ""  # why not
    cached_tokens: int = 0  # of this session's prompt, believed to lie in its prompt cache
    retry_after: float = 0.0  # seconds until it may be available again
    expiring: float = 0.0  # P(what it has cached is needed again, and will be gone unless this call goes there)


class Pool(Protocol):
    """One place that answers; health, concurrency, retries and prices are kept around it, not in it."""

    name: str
    settings: PoolSettings

    async def complete(self, body: dict[str, Any]) -> Reply:
        """The whole answer to a chat request. Cancellation stops the upstream. Raises `PoolError`."""

    def stream(self, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes; closing the iterator stops the upstream. Raises `PoolError`, also in mid-stream.

        The last chunk, and no other, bears the usage and has no choices: it is there whether or not it was asked for.
        """

    async def close(self) -> None:
        """Release connections."""
