"""POST /v1/chat/completions: a chat request in, an answer or a stream of its pieces out.

It speaks ASGI itself: what a framework does for a parameter costs more than everything here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from router.admission.keys import Keys
from router.admission.parse import LONG_BODY, MAX_BYTES, parse
from router.answering import Answering
from router.chat import ApiError, Usage
from router.gateway import headers as h
from router.gateway.body import ClientGone, read_body, unless_gone
from router.gateway.errors import error_headers, error_object
from router.gateway.stream import Events
from router.ledger.account import answers
from router.pools.counting import encode
from router.prices import DOLLAR
from router.record import Record

CUT_SECONDS = 2.0  # for telling those whose answers are cut off
# told to those who come while the router stops, to be answered by another one, or in its next life
RETRY_SECONDS = 2.0
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass on each event as it comes
]

log = structlog.get_logger(__name__)


class Completions:
    """The endpoint, an ASGI application; knows how many requests it is answering."""

    def __init__(self, answering: Answering, keys: Keys) -> None:
        self.draining = False  # no further request is let in
        self.running: set[asyncio.Task[Any]] = set()
        self._cut = False  # what still runs is cut off
        self._answering = answering
        self._pools = answering.settings.pools
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None, "the server runs each request in a task"
        self.running.add(task)
        try:
            with self._told_when_cut():
                await self._answer(scope, receive, send)
        except ApiError as error:
            await _respond(send, error.status, error_object(error), error_headers(error))
        except ClientGone:
            pass  # nobody is there to be told
        finally:
            self.running.discard(task)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.draining:
            raise _stopped()
        given = Headers(scope=scope)
        caller = self._keys.caller(given.get(h.AUTHORIZATION))
        raw = await read_body(receive, given.get("content-length"), MAX_BYTES)
        session = given.get(h.SESSION, "")
        # A long body is read beside the event loop, so that others' answers do not wait for it.
        request = await asyncio.to_thread(parse, raw, session) if len(raw) > LONG_BODY else parse(raw, session)
        record = self._answering.begin(request, caller, given)
        if record.request.stream:
            await self._stream(record, receive, send)
        else:
            await self._plain(record, receive, send)

    async def drained(self, seconds: float) -> None:
        """Wait until all running requests have been answered; cut off what takes longer than `seconds`."""
        if self.running:
            _, late = await asyncio.wait(self.running, timeout=seconds)
            self._cut = True
            for task in late:
                task.cancel()
            if late:
                log.warning("requests took too long to finish and were cut off", requests=len(late))
                await asyncio.wait(late, timeout=CUT_SECONDS)

    @contextmanager
    def _told_when_cut(self) -> Iterator[None]:
        """What is cut off by `drained` is told so, in place of a connection that just ends."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._cut or task is None:
                raise
            task.uncancel()
            raise _stopped() from None

    async def _plain(self, record: Record, receive: Receive, send: Send) -> None:
        try:
            with self._told_when_cut():
                async with unless_gone(receive):
                    reply = await self._answering.answer(record)
        except ApiError as error:
            await self._refuse(send, record, error)
            return
        told = _usage(reply.usage, reply.body.get("usage"), record.cost)
        body = {**reply.body, "id": record.id, "model": reply.model or reply.pool, "usage": told}
        await _respond(send, 200, body, h.told(record, self._pools))

    async def _stream(self, record: Record, receive: Receive, send: Send) -> None:
        events = Events(send, lambda: EVENT_STREAM + h.told(record, self._pools))
        try:
            with self._told_when_cut():
                async with unless_gone(receive), events:
                    await self._tell(record, events)
        except ApiError as error:
            if not events.started:
                await self._refuse(send, record, error)
                return
            await events.data(encode(error_object(error)))
        await events.end()

    async def _tell(self, record: Record, events: Events) -> None:
        """The chunks of an answer, its usage where that was asked for, what it cost, and that it is whole."""
        base, usage, reported = dict[str, Any](), None, None
        async with aclosing(self._answering.stream(record)) as chunks:
            async for chunk in chunks:
                record.streaming = chunk.pool
                base = {**chunk.body, "id": record.id}
                if "usage" in base:  # its own chunk at the end, for those who asked for it
                    reported = base.pop("usage") or reported
                if chunk.usage is not None:
                    usage = chunk.usage
                if base.get("choices"):
                    await events.data(encode(base))
        if record.request.include_usage:
            told = _usage(usage or _counted(record), reported, record.cost)
            await events.data(encode({**base, "choices": [], "usage": told}))
        await events.comment(f"{h.COST}={h.dollars(record.cost)} {h.ATTEMPTS}={len(record.attempts)}")
        await events.data(b"[DONE]")

    async def _refuse(self, send: Send, record: Record, error: ApiError) -> None:
        headers = [*h.told(record, self._pools), *error_headers(error)]
        await _respond(send, error.status, error_object(error), headers)


def _stopped() -> ApiError:
    return ApiError(503, "the router is stopping; try again", type="server_error", retry_after=RETRY_SECONDS)


async def _respond(send: Send, status: int, body: dict[str, Any], headers: h.Raw) -> None:
    data = encode(body)
    always = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": always + headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})


def _usage(usage: Usage, reported: Any, cost: int) -> dict[str, Any]:
    """OpenAI's usage object: what the pool said in it, the tokens as they were counted, and what it all cost."""
    told = reported if isinstance(reported, dict) else {}
    details = told.get("prompt_tokens_details")
    body = usage.body()
    if isinstance(details, dict):
        body["prompt_tokens_details"] = details | body["prompt_tokens_details"]
    return {**told, **body, "cost": cost / DOLLAR}


def _counted(record: Record) -> Usage:
    """Tokens of the calls that made up the answer, for a stream whose pool did not say."""
    parts = answers(record.attempts)
    return Usage(
        prompt=sum(part.prompt_tokens for part in parts),
        completion=sum(part.completion_tokens for part in parts),
        cached=sum(part.cached_tokens for part in parts),
    )
