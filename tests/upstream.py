"""A real HTTP server that speaks OpenAI's chat completions and behaves as a test tells it.

In a test::

    async with Upstream(Answer(text="hello")) as upstream:             # the same to every call
    async with Upstream([Answer(status=503), Answer()]) as upstream:   # one after the other, the last one for ever
    async with Upstream(lambda body, n: Answer(text=str(n))) as upstream:
        upstream.url    # http://127.0.0.1:port/v1
        upstream.calls  # what it received, and whether the client went away

As a process: `python -m tests.upstream --port 0 --answer '{"text": "hi", "pace": 0.01}'` prints its address;
`GET /calls` there tells what it received.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Literal

import msgspec
from aiohttp import web

CALLS = 1000  # remembered; older ones are forgotten


@dataclass(frozen=True)
class Answer:
    """What happens to one call. A chunk is one word of `text`, or one piece of a tool call."""

    text: str = "All is well."
    tool_calls: Sequence[Mapping[str, str]] = ()  # {"name": …, "arguments": JSON text}
    finish: str = ""  # finish_reason; empty = tool_calls or stop
    model: str = ""  # that it says it is; empty = the one asked for
    prompt_tokens: int = 0  # 0 = a quarter of the prompt's characters
    completion_tokens: int = 0  # 0 = the number of chunks
    cached_tokens: int = 0
    usage: Literal["reported", "none", "zero", "finish", "each"] = "reported"
    # reported: as OpenAI does, in a stream only if asked and in a chunk of its own; finish: on the chunk with the
    # finish_reason; each: so far, on every chunk; zero: {0, 0, 0}
    status: int = 200
    error: Mapping[str, Any] | None = None  # the error object; None = one that fits
    headers: Mapping[str, str] = field(default_factory=dict)  # of the response: Retry-After, …
    delay: float = 0.0  # seconds before the first byte; 3600 = it never answers
    pace: float = 0.0  # seconds before each chunk, or before each segment of a plain answer
    after: int = 0  # chunks (plain: bytes) sent before `then` happens
    then: Literal["", "close", "abort", "hang", "error"] = ""  # close: cleanly, too early; abort: RST
    raw: bytes | None = None  # the body, as it stands, in place of all of the above
    split: int = 0  # bytes per TCP segment; 0 = whole chunks


@dataclass
class Call:
    """One request as it arrived, and how it ended."""

    body: dict[str, Any]
    headers: dict[str, str]
    connection: int = 0  # port of the client's side
    sent: int = 0  # chunks
    gone: bool = False  # the client closed its side before the answer was whole
    done: bool = False  # the handler has ended


Script = Answer | Sequence[Answer] | Callable[[dict[str, Any], int], Answer]


class Upstream:
    """The server. `script` may be replaced at any time."""

    def __init__(self, script: Script | None = None, *, port: int = 0) -> None:
        self.script: Script = script or Answer()
        self.calls: deque[Call] = deque(maxlen=CALLS)
        self.count = 0  # calls so far
        self.active = 0  # calls being answered
        self.most_active = 0
        self._port = port
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        assert self._port, "not started"
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def connections(self) -> int:
        """Connections that clients hold open, kept-alive ones included."""
        assert self._runner is not None and self._runner.server is not None, "not started"
        return len(self._runner.server.connections)

    async def start(self) -> Upstream:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/calls", self._told)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=1024).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """Die: every connection is cut, nobody listens any more. `start` brings it back on the same port."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            for site in list(runner.sites):
                await site.stop()
            if runner.server is not None:
                for connection in list(runner.server.connections):
                    if connection.transport is not None:
                        connection.transport.abort()
            await runner.cleanup()

    async def __aenter__(self) -> Upstream:
        return await self.start()

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    def _next(self, body: dict[str, Any]) -> Answer:
        number, self.count = self.count, self.count + 1
        if isinstance(self.script, Answer):
            return self.script
        if callable(self.script):
            return self.script(body, number)
        return self.script[min(number, len(self.script) - 1)]

    async def _told(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode([asdict(call) for call in self.calls]))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())  # as lenient as it gets: lone surrogates too
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        call = Call(body, dict(request.headers), peer[1] if peer else 0)
        self.calls.append(call)
        answer = self._next(body)
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            if answer.delay:
                await asyncio.sleep(answer.delay)
            if body.get("stream") and answer.status == 200 and (answer.raw is None):
                return await _stream(request, body, answer, call)
            return await _plain(request, body, answer, call)
        except (asyncio.CancelledError, ConnectionResetError):
            call.gone = True
            raise
        finally:
            call.done = True
            self.active -= 1


async def _plain(request: web.Request, body: dict[str, Any], answer: Answer, call: Call) -> web.StreamResponse:
    streamed = bool(body.get("stream")) and answer.status == 200
    headers = {"content-type": "text/event-stream" if streamed else "application/json", **answer.headers}
    whole = answer.raw if answer.raw is not None else msgspec.json.encode(_document(body, answer))
    if not (answer.then in {"close", "abort", "hang"} or answer.split or answer.pace):
        return web.Response(status=answer.status, body=whole, headers=headers)
    response = web.StreamResponse(status=answer.status, headers=headers)
    response.content_length = len(whole)
    await response.prepare(request)
    cut = whole[: answer.after] if answer.then else whole
    step = answer.split or max(len(cut), 1)
    for start in range(0, len(cut), step):
        await asyncio.sleep(answer.pace or 0.001)  # so that the next segment is one of its own
        await response.write(cut[start : start + step])
        call.sent += 1
    return await _end(request, response, answer)


async def _stream(request: web.Request, body: dict[str, Any], answer: Answer, call: Call) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", **answer.headers})
    await response.prepare(request)
    for chunk in _chunks(body, answer):
        if answer.then and call.sent == answer.after:
            break
        if answer.pace:
            await asyncio.sleep(answer.pace)
        await _write(response, b"data: " + msgspec.json.encode(chunk) + b"\n\n", answer.split)
        call.sent += 1
    if answer.then == "error":
        await _write(response, b"data: " + msgspec.json.encode({"error": _error(answer)}) + b"\n\n", answer.split)
    if answer.then in {"", "error"}:
        await _write(response, b"data: [DONE]\n\n", answer.split)
    return await _end(request, response, answer)


async def _write(response: web.StreamResponse, data: bytes, split: int) -> None:
    if not split:
        await response.write(data)
        return
    for start in range(0, len(data), split):
        await response.write(data[start : start + split])
        await asyncio.sleep(0.001)


async def _end(request: web.Request, response: web.StreamResponse, answer: Answer) -> web.StreamResponse:
    if answer.then == "hang":
        await asyncio.sleep(3600)
    if answer.then in {"close", "abort"} and request.transport is not None:
        await asyncio.sleep(0.01)  # what was written goes out first
        if request.transport is not None:
            (request.transport.abort if answer.then == "abort" else request.transport.close)()
        return response
    with suppress(ConnectionResetError):
        await response.write_eof()
    return response


def _error(answer: Answer) -> dict[str, Any]:
    if answer.error is not None:
        return dict(answer.error)
    kind = {429: "rate_limit_error", 401: "authentication_error"}.get(answer.status, "server_error")
    return {"message": f"scripted failure {answer.status}", "type": kind, "param": None, "code": None}


def _usage(body: dict[str, Any], answer: Answer, chunks: int) -> dict[str, Any]:
    if answer.usage == "zero":
        return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    prompt = answer.prompt_tokens or len(msgspec.json.encode(body.get("messages"))) // 4
    completion = chunks if answer.usage == "each" else answer.completion_tokens or chunks
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _finish(answer: Answer) -> str:
    return answer.finish or ("tool_calls" if answer.tool_calls else "stop")


def _pieces(answer: Answer) -> list[str]:
    return re.findall(r"\s*\S+|\s+$", answer.text)


def _document(body: dict[str, Any], answer: Answer) -> dict[str, Any]:
    if answer.status != 200 or answer.then == "error":
        return {"error": _error(answer)}
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": dict(each)} for i, each in enumerate(answer.tool_calls)
        ]
    document = {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": answer.model or body.get("model", ""),
        "choices": [{"index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": None}],
    }
    if answer.usage != "none":
        document["usage"] = _usage(body, answer, max(len(_pieces(answer)), 1))
    return document


def _deltas(answer: Answer) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    for piece in _pieces(answer):
        yield {"content": piece}
    for index, call in enumerate(answer.tool_calls):
        head = {"index": index, "id": f"call_{index}", "type": "function"}
        yield {"tool_calls": [{**head, "function": {"name": call["name"], "arguments": ""}}]}
        arguments = call["arguments"]
        for start in range(0, len(arguments), 8):
            yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[start : start + 8]}}]}


def _chunks(body: dict[str, Any], answer: Answer) -> Iterator[dict[str, Any]]:
    base = {
        "id": "chatcmpl-scripted",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": answer.model or body.get("model", ""),
    }
    count = 0
    for count, delta in enumerate(_deltas(answer)):  # the first one only bears the role
        chunk = {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        if answer.usage == "each":
            chunk["usage"] = _usage(body, answer, count)
        yield chunk
    last = {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(answer)}]}
    if answer.usage in {"finish", "each"}:
        last["usage"] = _usage(body, answer, count)
    yield last
    if answer.usage in {"reported", "zero"} and (body.get("stream_options") or {}).get("include_usage"):
        yield {**base, "choices": [], "usage": _usage(body, answer, count)}


async def _serve(port: int, answer: Answer) -> None:
    async with Upstream(answer, port=port) as upstream:
        print(upstream.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="an OpenAI-compatible upstream that answers as it is told")
    parser.add_argument("--port", type=int, default=0, help="0 = any free one; the address is printed")
    parser.add_argument("--answer", default="{}", help="fields of Answer as JSON")
    arguments = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(arguments.port, msgspec.json.decode(arguments.answer, type=Answer)))
