"""Errors as OpenAI's clients expect them, whatever raised them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from router.chat import ApiError, internal
from router.gateway import headers as h


def error_object(error: ApiError) -> dict[str, Any]:
    """The body of an error, and of an error event in a stream."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_headers(error: ApiError) -> h.Raw:
    """Headers that say whether and when to try again, and that the connection ends where that is so."""
    told = []
    if error.retry_after is not None:
        told.append((h.RETRY_AFTER, str(max(math.ceil(error.retry_after), 1))))
    if error.code == "insufficient_quota":
        told.append((h.SHOULD_RETRY, "false"))
    if error.status in (408, 413):  # what is left of the body is not read
        told.append(("connection", "close"))
    return [(name.encode(), value.encode()) for name, value in told]


def error_response(error: ApiError) -> Response:
    """The whole response."""
    body = msgspec.json.encode(error_object(error))
    response = Response(body, status_code=error.status, media_type="application/json")
    response.raw_headers += error_headers(error)
    return response


def install(app: FastAPI) -> None:
    """Give every error of `app` this shape: its own, unknown paths and methods, and what nobody expected."""

    async def told(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path[:200]}"
        sentences = {404: f"unknown address: {where}", 405: f"method not allowed: {where}"}
        response = error_response(ApiError(error.status_code, sentences.get(error.status_code, str(error.detail))))
        response.headers.update(error.headers or {})
        return response

    async def unexpected(_: Request, error: Exception) -> Response:
        return error_response(internal())

    app.add_exception_handler(ApiError, told)
    app.add_exception_handler(404, refused)
    app.add_exception_handler(405, refused)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(Exception, unexpected)
