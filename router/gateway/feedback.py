"""POST /v1/feedback: what became of an answer in the world. Pure.

    {"request_id": "chatcmpl-…", "score": 0.9, "passed": true, "correction": "…", "comment": "…"}

`request_id` is the completion's id; at least one of score (0 to 1), passed and correction must be there.
"""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from contracts.routing import Feedback
from router.admission.parse import json_object
from router.chat import ApiError

MAX_BYTES = 512 * 1024
MUST_BE = {
    "request_id": "the id of an answer, 1 to 100 characters",
    "score": "a number from 0 to 1",
    "passed": "true or false",
    "correction": "text",
    "comment": "text of at most 10,000 characters",
}


class Said(msgspec.Struct, frozen=True):
    """The body of the request; `MUST_BE` says the same to people."""

    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    score: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    passed: bool | None = None
    correction: str = ""
    comment: Annotated[str, msgspec.Meta(max_length=10_000)] = ""


def read(raw: bytes, run: str, key: str) -> Feedback:
    """Feedback of the API key named `key`; the same id when the same is said again. Raises `ApiError` 400."""
    said = _said(json_object(raw))
    digest = blake2b(msgspec.json.encode([key, said]), digest_size=12).hexdigest()
    return Feedback(
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


def _said(body: dict[str, Any]) -> Said:
    for name in body:
        if name not in MUST_BE:
            known = ", ".join(MUST_BE)
            raise ApiError(400, f"unknown parameter {name[:100]!r}: feedback takes {known}", param=name[:100])
    for field in msgspec.structs.fields(Said):
        if field.name in body or field.required:
            try:
                msgspec.convert(body.get(field.name), field.type)
            except msgspec.ValidationError:
                raise ApiError(400, f"{field.name} must be {MUST_BE[field.name]}", param=field.name) from None
    said = msgspec.convert(body, Said)
    if said.score is None and said.passed is None and not said.correction:
        raise ApiError(400, "give at least one of score, passed, correction")
    return said
