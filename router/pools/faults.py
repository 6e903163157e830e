"""What an upstream's failure means: status, headers and error object to a `PoolError`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Any

from router.chat import Usage
from router.pools.base import Fault, PoolError

# How servers say that a prompt does not fit: OpenAI, Azure and vLLM; llama.cpp; Anthropic; Mistral; Groq; Gemini; …
_TOO_LONG = re.compile(
    r"context[ _](length|window|size)|(prompt|input|request|messages?) (is|are|was) too (long|large)"
    r"|too many (input )?tokens|max_model_len|input token count|reduce the length",
    re.IGNORECASE,
)
_LONGEST_MESSAGE = 2000  # characters of an upstream's words that are passed on

_BY_STATUS = {
    401: Fault.UNAUTHORISED,
    402: Fault.UNAUTHORISED,  # the operator's account is empty
    403: Fault.UNAUTHORISED,
    404: Fault.UNAUTHORISED,  # the operator's address or model name
    405: Fault.UNAUTHORISED,
    408: Fault.TIMEOUT,
    409: Fault.UNAVAILABLE,
    413: Fault.TOO_LONG,
    425: Fault.UNAVAILABLE,
    429: Fault.RATE_LIMITED,
}
_BY_WORD = {  # of an error's code or type
    "context_length_exceeded": Fault.TOO_LONG,
    "string_above_max_length": Fault.TOO_LONG,
    "rate_limit_exceeded": Fault.RATE_LIMITED,
    "rate_limit_error": Fault.RATE_LIMITED,
    "insufficient_quota": Fault.RATE_LIMITED,
    "too_many_requests": Fault.RATE_LIMITED,
    "overloaded_error": Fault.UNAVAILABLE,
    "server_error": Fault.UNAVAILABLE,
    "api_error": Fault.UNAVAILABLE,
    "internal_server_error": Fault.UNAVAILABLE,
    "service_unavailable": Fault.UNAVAILABLE,
    "timeout": Fault.TIMEOUT,
    "invalid_api_key": Fault.UNAUTHORISED,
    "authentication_error": Fault.UNAUTHORISED,
    "permission_error": Fault.UNAUTHORISED,
    "invalid_request_error": Fault.REFUSED,
    "badrequesterror": Fault.REFUSED,
}


def error_object(document: Any) -> dict[str, Any] | None:
    """The error that a JSON document reports, whatever status it came with; None where it reports none.

    `{"error": {…}}` as OpenAI does, `{"error": "…"}` as others do, `{"object": "error", …}` as vLLM did.
    """
    if not isinstance(document, dict):
        return None
    error = document.get("error")
    if isinstance(error, dict) and error:
        return error
    if isinstance(error, str) and error:
        return {"message": error}
    return document if document.get("object") == "error" else None


def failure(
    pool: str,
    error: Mapping[str, Any] | None,
    *,
    status: int = 200,
    retry_after: float | None = None,
    usage: Usage | None = None,
) -> PoolError:
    """What a response that is no answer means; `error` is its error object, where it had one, with keys redacted.

    Only faults that are the application's speak in the upstream's words; else these might tell of the operator's.
    """
    error = error or {}
    message = str(error.get("message") or "")[:_LONGEST_MESSAGE]
    fault = fault_of(error, status)
    if fault in (Fault.REFUSED, Fault.TOO_LONG):
        told = message or f"{pool} refused the request (HTTP {status})"
        body = {"message": told, **{part: error.get(part) for part in ("type", "param", "code")}}
        return PoolError(fault, told, status=status, usage=usage, body=body)
    where = f"HTTP {status}" if status != 200 else "an error inside a response of HTTP 200"
    return PoolError(fault, f"{pool}: {where}", status=status, retry_after=retry_after, usage=usage)


def fault_of(error: Mapping[str, Any], status: int) -> Fault:
    """The fault that an error object and the HTTP status stand for; inside a 200 the object alone speaks."""
    code = error.get("code")
    if status == 200 and isinstance(code, int) and 400 <= code <= 599:
        status = code
    words = [str(error.get(part) or "").lower() for part in ("code", "type")]
    if status in (200, 400, 413, 422) or "context_length_exceeded" in words:
        too_long = Fault.TOO_LONG in map(_BY_WORD.get, words) or _TOO_LONG.search(str(error.get("message") or ""))
        if too_long or status == 413:
            return Fault.TOO_LONG
    if status == 200:
        return next((_BY_WORD[word] for word in words if word in _BY_WORD), Fault.BROKEN)
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return Fault.REFUSED if 400 <= status < 500 else Fault.UNAVAILABLE


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that `Retry-After` asks for (RFC 9110, 10.2.3: seconds or a date), or OpenAI's finer `retry-after-ms`.

    A date is taken relative to the response's own `Date`, else to `now` (unix seconds). None where nothing is said.
    """
    finer = _number(headers.get("retry-after-ms"))
    if finer is not None:
        return finer / 1000
    said = headers.get("retry-after")
    if said is None:
        return None
    seconds = _number(said)
    if seconds is not None:
        return seconds
    until = _date(said)
    if until is None:
        return None
    sent = _date(headers.get("date"))
    return max((until - (sent or datetime.fromtimestamp(now, UTC))).total_seconds(), 0.0)


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None


def _date(text: str | None) -> datetime | None:
    try:
        date = parsedate_to_datetime(text or "")
    except ValueError:
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
