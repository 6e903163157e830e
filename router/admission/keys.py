"""Who asks, and how much they may. Pure: the clock is passed in, and what was spent comes from the ledger."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256

from infra.errors import UserError
from router.chat import ApiError
from router.prices import DOLLAR
from router.settings import KeySettings


@dataclass(frozen=True)
class Caller:
    """One application or team."""

    name: str = ""  # the operator's name for its key; empty where the gateway is open to everyone
    pools: frozenset[str] | None = None  # it may use; None = all
    budget: int | None = None  # picodollars per calendar month; None = without limit


EVERYONE = Caller()


class Bucket:
    """A token bucket (Turner 1986): `rate` units per minute, as many at once.

    What was not known before, as an answer's length, may be taken afterwards and leaves a debt.
    """

    def __init__(self, rate: int, now: float) -> None:
        self._rate = rate
        self._level = float(rate)
        self._at = now

    def _refill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at) * self._rate / 60, self._rate)
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken; 0 = now. What exceeds the capacity is let in when the bucket is full."""
        self._refill(now)
        return max(min(amount, self._rate) - self._level, 0.0) * 60 / self._rate

    def take(self, amount: float, now: float) -> None:
        """Take it, or give a negative amount back."""
        self._refill(now)
        self._level = min(self._level - amount, self._rate)


class Keys:
    """The API keys of the settings, and the limits that each has left. `now` is in seconds of a monotonic clock."""

    def __init__(self, settings: Mapping[str, KeySettings], environment: Mapping[str, str], now: float) -> None:
        """Raises `UserError` where a key's variable is missing or two keys are the same."""
        self._callers: dict[bytes, Caller] = {}
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        for name, key in settings.items():
            secret = environment.get(key.variable, "")
            if not secret:
                raise UserError(
                    f"router.keys.{name}: environment variable {key.variable} is not set; it must hold the API key"
                )
            digest = _digest(secret)
            if digest in self._callers:
                raise UserError(f"router.keys.{name}: same API key as {self._callers[digest].name}; give each its own")
            budget = round(key.budget_usd * DOLLAR) or None
            self._callers[digest] = Caller(name, key.pools or None, budget)
            if key.requests_per_minute:
                self._requests[name] = Bucket(key.requests_per_minute, now)
            if key.tokens_per_minute:
                self._tokens[name] = Bucket(key.tokens_per_minute, now)

    @property
    def open(self) -> bool:
        """Whether everyone may ask, because no key is configured."""
        return not self._callers

    def caller(self, authorization: str | None) -> Caller:
        """Whose key this header bears. Raises `ApiError` 401. The time it takes tells nothing about the keys."""
        if self.open:
            return EVERYONE
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise ApiError(
                401, "you did not provide an API key: send the header Authorization: Bearer KEY", code="invalid_api_key"
            )
        digest, found = _digest(secret.strip()), None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise ApiError(401, "incorrect API key provided", code="invalid_api_key")
        return found

    def named(self, name: str) -> Caller:
        """The caller whose key bears this name: for those who ask over the bus. Raises `ApiError` 401."""
        found = next((caller for caller in self._callers.values() if caller.name == name), None)
        if found is None:
            raise ApiError(401, f"there is no API key named {name[:100]!r}", code="invalid_api_key")
        return found

    def admit(self, caller: Caller, tokens: int, spent: int, now: float, today: datetime) -> int | None:
        """Let a request in and take its `tokens`, an estimate, from its limits; picodollars left to it, or None.

        `spent` are the picodollars of this key this month. Raises `ApiError` 429 that says when to come again.
        """
        left = None if caller.budget is None else caller.budget - spent
        if left is not None and left <= 0:
            raise ApiError(
                429,
                f"you exceeded the monthly budget of the key {caller.name}, which is renewed on the first (UTC)",
                type="insufficient_quota",
                code="insufficient_quota",
                retry_after=seconds_to_next_month(today),
            )
        requests, used = self._requests.get(caller.name), self._tokens.get(caller.name)
        waits = {
            "requests": requests.wait(1, now) if requests else 0.0,
            "tokens": used.wait(tokens, now) if used else 0.0,
        }
        kind = max(waits, key=lambda each: waits[each])
        if waits[kind] > 0:
            raise ApiError(
                429,
                f"rate limit reached: {kind} per minute of the key {caller.name}; try again in {waits[kind]:.1f} s",
                type=kind,
                code="rate_limit_exceeded",
                retry_after=waits[kind],
            )
        if requests:
            requests.take(1, now)
        if used:
            used.take(tokens, now)
        return left

    def settle(self, caller: Caller, estimated: int, used: int, now: float) -> None:
        """Correct what `admit` took once it is known how many tokens prompt and answer really had."""
        bucket = self._tokens.get(caller.name)
        if bucket:
            bucket.take(used - estimated, now)


def seconds_to_next_month(today: datetime) -> float:
    """Seconds until budgets are renewed: midnight (UTC) before the first of the next month."""
    utc = today.astimezone(UTC)
    renewed = datetime(utc.year + utc.month // 12, utc.month % 12 + 1, 1, tzinfo=UTC)
    return (renewed - utc).total_seconds()


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "replace")).digest()
