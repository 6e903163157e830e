"""POST /v1/feedback: what became of an answer in the world. Pure.

    {"request_id": "chatcmpl-…", "score": 0.9, "passed": true, "correction": "…", "comment": "…"}

`request_id` is the completion's id; at least one of score (0 to 1), passed and correction must be there.
"""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import Annotated

import msgspec

from contracts.errors import InvalidMessage
from contracts.routing import Feedback
from router.admission.messages import wrong
from router.admission.parse import json_object

MAX_BYTES = 512 * 1024


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of the request."""

    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    score: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    passed: bool | None = None
    correction: str = ""
    comment: Annotated[str, msgspec.Meta(max_length=10_000)] = ""


def read(raw: bytes, run: str, key: str) -> Feedback:
    """Feedback of the API key named `key`; the same id when the same is said again. Raises `ApiError` 400."""
    body = json_object(raw)
    try:
        said = msgspec.convert(body, Said)
        digest = blake2b(msgspec.json.encode([key, said]), digest_size=12).hexdigest()
        feedback = Feedback(
            id=f"feedback-{digest}",
            run=run,
            request_id=said.request_id,
            key=key,
            score=said.score,
            passed=said.passed,
            correction=said.correction,
            comment=said.comment,
            at_ns=time.time_ns(),
        )
        feedback.check()
    except (msgspec.ValidationError, InvalidMessage) as error:
        raise wrong(None, str(error)) from None
    return feedback
