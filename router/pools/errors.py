"""What is told of a call that failed: to applications an `ApiError`, to books and logs a sentence of our own. Pure."""

from __future__ import annotations

from router.chat import ApiError
from router.pools.base import Fault, PoolError

STATUS = {
    Fault.RATE_LIMITED: 429,
    Fault.UNAVAILABLE: 503,
    Fault.TIMEOUT: 504,
    Fault.BROKEN: 502,
    Fault.REFUSED: 400,
    Fault.TOO_LONG: 400,
    Fault.UNAUTHORISED: 502,  # our key, not the application's
}


def api_error(error: PoolError) -> ApiError:
    """What an application is told when no pool answered: of its own faults the upstream's words, of others ours."""
    status = STATUS[error.fault]
    if error.fault is Fault.TOO_LONG:
        return ApiError(status, str(error), code="context_length_exceeded", param="messages")
    if error.fault is Fault.REFUSED:
        theirs = error.body or {}
        told = {name: theirs[name] for name in ("code", "param") if isinstance(theirs.get(name), str)}
        return ApiError(error.status if error.status and 400 <= error.status < 500 else status, str(error), **told)
    if error.fault is Fault.RATE_LIMITED:
        wait = 1.0 if error.retry_after is None else error.retry_after
        return ApiError(status, str(error), type="rate_limit_error", code="rate_limit_exceeded", retry_after=wait)
    message = "an upstream refused the router" if error.fault is Fault.UNAUTHORISED else str(error)
    code = f"upstream_{error.fault.value}"
    return ApiError(status, message, type="server_error", code=code, retry_after=error.retry_after)


def sentence(error: BaseException) -> str:
    """What went wrong, in words of our own: an upstream's may repeat the prompt."""
    if not isinstance(error, PoolError):
        return f"failed with {type(error).__name__}"
    words = error.fault.value.replace("_", " ")
    return words if error.status is None else f"{words} (HTTP {error.status})"
