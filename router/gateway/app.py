"""The gateway's addresses: OpenAI's, and a few of our own."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.routing import Route

from infra.errors import UserError
from router.admission import models
from router.admission.keys import Caller, Keys
from router.answering import Answering
from router.chat import ApiError
from router.gateway import errors, feedback
from router.gateway import headers as h
from router.gateway.body import read_body
from router.gateway.completions import Completions
from router.ledger.books import Books

Told = Callable[[], tuple[bool, str]]  # whether it is so, and a sentence


def make_app(
    answering: Answering, completions: Completions, keys: Keys, books: Books, *, alive: Told, ready: Told
) -> FastAPI:
    """The application. `alive` and `ready` are what /healthz and /readyz tell."""
    app = FastAPI(
        title="Tailrace",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # what is measured is in router.instruments
    )
    errors.install(app)
    app.router.routes.append(Route("/v1/chat/completions", completions, methods=["POST"]))
    pools, started = answering.settings.pools, int(time.time())

    def caller(request: Request) -> Caller:
        return keys.caller(request.headers.get(h.AUTHORIZATION))

    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        return _json(models.listing(pools, caller(request), started))

    @app.get("/v1/models/{model:path}")
    async def one_model(request: Request, model: str) -> Response:
        who = caller(request)
        models.asked(model, pools, who, 0.0)
        return _json(models.described(model, started))

    @app.post("/v1/feedback")
    async def take_feedback(request: Request) -> Response:
        who = caller(request)
        raw = await read_body(request.receive, request.headers.get("content-length"), feedback.MAX_BYTES)
        said = feedback.read(raw, answering.run, who.name)
        try:
            key = await asyncio.to_thread(books.key_of, said.request_id)
        except (UserError, sqlite3.Error) as error:  # the file is gone, or locked
            raise ApiError(503, "the ledger cannot be read at present", type="server_error", retry_after=1.0) from error
        if key != who.name:
            raise ApiError(404, f"there is no answer {said.request_id!r} of this key", param="request_id")
        books.feedback(said)
        return _json({"id": said.id, "object": "feedback", "request_id": said.request_id})

    @app.get("/healthz")
    async def healthz() -> Response:
        return _told(alive)

    @app.get("/readyz")
    async def readyz() -> Response:
        return _told(ready)

    return app


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _told(told: Told) -> Response:
    good, sentence = told()
    return Response(sentence + "\n", status_code=200 if good else 503, media_type="text/plain")
