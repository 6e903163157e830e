"""Who may ask, and how much."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from infra.errors import UserError
from router.admission.keys import EVERYONE, Keys, seconds_to_next_month
from router.chat import ApiError
from router.settings import KeySettings

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
SECRETS = {"KEY_A": "secret-a", "KEY_B": "secret-b", "SAME": "secret-a"}


def keys(now: float = 0.0, **settings: KeySettings) -> Keys:
    return Keys(settings, SECRETS, now)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("Bearer secret-a", "a"),
        ("bearer  secret-b ", "b"),
        ("Bearer secret-c", None),
        ("Bearer ", None),
        ("secret-a", None),
        ("Basic secret-a", None),
        ("Bearer s\u00e9cret", None),
        ("", None),
        (None, None),
    ],
)
def test_callers(header: str | None, name: str | None) -> None:
    known = keys(a=KeySettings(variable="KEY_A", pools=frozenset({"x"})), b=KeySettings(variable="KEY_B"))
    if name is not None:
        assert known.caller(header).name == name
        return
    with pytest.raises(ApiError) as raised:
        known.caller(header)
    assert (raised.value.status, raised.value.code) == (401, "invalid_api_key")
    assert "secret" not in raised.value.message and "s\u00e9cret" not in raised.value.message


def test_without_keys_the_gateway_is_open() -> None:
    assert keys().open and keys().caller(None) == EVERYONE == keys().caller("Bearer whatever")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"a": KeySettings(variable="NOT_SET")}, ("router.keys.a", "NOT_SET")),
        ({"a": KeySettings(variable="KEY_A"), "b": KeySettings(variable="SAME")}, ("router.keys.b", "same")),
    ],
)
def test_keys_that_cannot_be(settings: dict[str, KeySettings], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as raised:
        keys(**settings)
    assert all(word in str(raised.value) for word in words) and "secret-a" not in str(raised.value)


def refused(known: Keys, tokens: int, spent: int, now: float) -> ApiError:
    with pytest.raises(ApiError) as raised:
        known.admit(known.caller("Bearer secret-a"), tokens, spent, now, NOON)
    assert raised.value.status == 429
    return raised.value


def test_requests_per_minute() -> None:
    known = keys(a=KeySettings(variable="KEY_A", requests_per_minute=2))
    caller = known.caller("Bearer secret-a")
    assert known.admit(caller, 9, 0, 0.0, NOON) is None
    known.admit(caller, 9, 0, 0.0, NOON)
    error = refused(known, 9, 0, 0.0)
    assert (error.code, error.type, error.retry_after) == ("rate_limit_exceeded", "requests", 30.0)
    assert refused(known, 9, 0, 10.0).retry_after == pytest.approx(20.0)  # those that were refused cost nothing
    known.admit(caller, 9, 0, 30.0, NOON)
    refused(known, 9, 0, 31.0)


def test_tokens_per_minute_count_answers_too() -> None:
    known = keys(a=KeySettings(variable="KEY_A", tokens_per_minute=600))
    caller = known.caller("Bearer secret-a")
    known.admit(caller, 100, 0, 0.0, NOON)
    known.settle(caller, 100, 700, 0.0)  # the answer was long: a debt of 100
    error = refused(known, 100, 0, 0.0)
    assert (error.type, error.retry_after) == ("tokens", pytest.approx(20.0))
    known.admit(caller, 100, 0, 20.0, NOON)
    known.settle(caller, 100, 0, 20.0)  # it failed before anything was read
    known.admit(caller, 100, 0, 20.0, NOON)
    known.admit(caller, 10_000, 0, 80.0, NOON)  # more than fits is let in when nothing else is
    refused(known, 1, 0, 81.0)


def test_a_budget() -> None:
    known = keys(a=KeySettings(variable="KEY_A", budget_usd=1.5))
    caller = known.caller("Bearer secret-a")
    assert known.admit(caller, 9, 500_000_000_000, 0.0, NOON) == 10**12
    error = refused(known, 9, 1_500_000_000_000, 0.0)
    assert (error.code, error.type, error.retry_after) == ("insufficient_quota", "insufficient_quota", 12 * 3600)


@pytest.mark.parametrize(
    ("today", "seconds"),
    [
        (NOON, 12 * 3600),
        (datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC), 1),
        (datetime(2026, 2, 28, tzinfo=UTC), 86400),
        (datetime(2026, 12, 1, 1, tzinfo=timezone(timedelta(hours=2))), 3600),  # still November in UTC
    ],
)
def test_the_next_month(today: datetime, seconds: float) -> None:
    assert seconds_to_next_month(today) == seconds
