"""Any upstream that speaks OpenAI's chat completions over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import aiohttp

from infra import telemetry
from infra.errors import UserError
from router.chat import Chunk, Reply, Usage
from router.pools import sse
from router.pools.base import Fault, PoolError
from router.pools.counting import completed, decode, encode, spoken, usage_of
from router.pools.faults import error_object, failure, retry_after
from router.settings import PoolSettings

LONGEST_BODY = 32 * 2**20  # bytes of a plain answer
LONGEST_ERROR = 64 * 2**10  # bytes of an error's body; more is not read
CONNECT_SECONDS = 10.0  # from the look-up of the name to the end of TLS's handshake
ERROR_SECONDS = 5.0  # for an error's body; what has not come by then is not read
LAST_BYTES_SECONDS = 0.1  # a stream's end of body follows its [DONE]; its connection is used again if it does so soon

# What goes wrong with a connection or with what comes over it; OSError covers TimeoutError.
_FAILURES = (aiohttp.ClientError, OSError, sse.Oversized)


class OpenAIPool:
    """One upstream; its connections are made when they are first needed, and kept.

    The last chunk of a stream, and no other, bears the usage: it has no choices, and is given whether or not the
    application asked for it. Usage that the upstream does not report is estimated.
    """

    def __init__(self, name: str, settings: PoolSettings, api_key: str = "") -> None:
        self.name = name
        self.settings = settings
        self._address = f"{settings.url.rstrip('/')}/chat/completions"
        self._key = api_key.strip()
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def from_environment(cls, name: str, settings: PoolSettings, environment: Mapping[str, str]) -> Self:
        """With the API key that its settings name. Raises `UserError` where that is not set, or there is no address."""
        if not settings.url.startswith(("http://", "https://")):
            raise UserError(f"router.pools.{name}: an openai pool needs a url, from http(s):// up to and including /v1")
        key = environment.get(settings.key_variable, "").strip() if settings.key_variable else ""
        if settings.key_variable and not key:
            raise UserError(
                f"router.pools.{name}: the environment variable {settings.key_variable} is not set; "
                "set it to the upstream's API key, or leave key_variable empty"
            )
        return cls(name, settings, key)

    async def complete(self, body: dict[str, Any]) -> Reply:
        """The whole answer; its body has a usage, if an estimated one. Raises `PoolError`."""
        plain = {part: value for part, value in body.items() if part not in ("stream", "stream_options")}
        asked = {**plain, "model": self.settings.model or self.name}
        until = asyncio.get_running_loop().time() + self.settings.total_seconds
        tally = _Tally(self.name, asked)
        async with self._sent(asked, until, tally) as response:
            document = self._parsed(await self._whole(response, until, LONGEST_BODY), tally)
        return tally.reply(document)

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes; the usage is the last chunk. Raises `PoolError`, also in mid-stream."""
        options = body.get("stream_options")
        asked = {
            **body,
            "model": self.settings.model or self.name,
            "stream": True,
            "stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True},
        }
        clock = asyncio.get_running_loop().time
        until = clock() + self.settings.total_seconds
        token_by = min(clock() + self.settings.first_token_seconds, until)
        tally = _Tally(self.name, asked)
        async with self._sent(asked, token_by, tally) as response:
            if response.content_type == "application/json":
                self._parsed(await self._whole(response, token_by, LONGEST_BODY), tally)
                raise PoolError(Fault.BROKEN, f"{self.name}: did not stream", usage=tally.usage())
            parser, received, ended = sse.Parser(), b"-", False
            while received and not ended:
                try:
                    received = await _read(response, token_by)
                except _FAILURES:
                    if not tally.finished:
                        raise
                    received = b""  # everything was said by then
                size = tally.size
                for event in parser.feed(received) if received else parser.end():
                    if not (data := event.data.strip()):
                        continue
                    if data == b"[DONE]":
                        ended = True
                        break
                    chunk = tally.chunk(self._parsed(data, tally, event.name))
                    if chunk is not None:
                        yield chunk
                if tally.size > size:  # comments and empty chunks keep nobody waiting
                    token_by = min(clock() + self.settings.next_token_seconds, until)
            if not (tally.finished or (ended and tally.size)):
                raise PoolError(Fault.BROKEN, f"{self.name}: the stream ended too early", usage=tally.usage())
            yield tally.last()
            with suppress(*_FAILURES):
                await _read(response, clock() + LAST_BYTES_SECONDS)

    async def close(self) -> None:
        """Release connections."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    @asynccontextmanager
    async def _sent(self, body: dict[str, Any], until: float, tally: _Tally) -> AsyncIterator[aiohttp.ClientResponse]:
        """A good response; leaving it early cuts the connection, so that the upstream stops at once.

        What goes wrong with sending and, inside the context, with reading becomes a `PoolError` with the usage so far.
        """
        response: aiohttp.ClientResponse | None = None
        headers: dict[str, str] = {}
        telemetry.inject(headers)
        try:
            async with asyncio.timeout_at(until):
                response = await self._connected().post(
                    self._address, data=encode(body), headers=headers, allow_redirects=False
                )
            if not 200 <= response.status < 300:
                raise await self._refused(response)
            yield response
        except _FAILURES as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):  # not one of connecting
                raise PoolError(Fault.TIMEOUT, f"{self.name}: no token in time", usage=tally.usage()) from None
            kind, usage = (Fault.UNAVAILABLE, None) if response is None else (Fault.BROKEN, tally.usage())
            raise PoolError(kind, f"{self.name}: {type(error).__name__}", usage=usage) from None
        finally:
            if response is not None:
                response.close()

    async def _refused(self, response: aiohttp.ClientResponse) -> PoolError:
        """What a status that is no success means."""
        until = asyncio.get_running_loop().time() + ERROR_SECONDS
        document: Any = None
        with suppress(ValueError, *_FAILURES):  # what it would have said about its failure
            document = decode(await self._whole(response, until, LONGEST_ERROR))
        wait = retry_after(response.headers, time.time())
        return failure(self.name, self._redacted(error_object(document)), status=response.status, retry_after=wait)

    async def _whole(self, response: aiohttp.ClientResponse, until: float, longest: int) -> bytes:
        """A whole body, of at most `longest` bytes, that does not stop in the middle for long."""
        clock = asyncio.get_running_loop().time
        body = bytearray()
        pause = self.settings.next_token_seconds
        while received := await _read(response, min(until, clock() + pause) if body else until):
            body += received
            if len(body) > longest:
                raise sse.Oversized(f"a body is longer than {longest} bytes")
        return bytes(body)

    def _parsed(self, data: bytes, tally: _Tally, name: str = "") -> dict[str, Any]:
        """A document that reports no error."""
        try:
            document = decode(data)
        except ValueError:
            raise PoolError(Fault.BROKEN, f"{self.name}: sent invalid JSON", usage=tally.usage()) from None
        error = error_object(document)
        if error is not None or name == "error":
            raise failure(self.name, self._redacted(error), usage=tally.usage())
        if not isinstance(document, dict):
            raise PoolError(Fault.BROKEN, f"{self.name}: sent no object", usage=tally.usage())
        return document

    def _redacted(self, error: dict[str, Any] | None) -> dict[str, Any] | None:
        """An upstream may repeat the key it was given. Of the error object only texts and numbers are kept."""
        if not error or not self._key:
            return error
        return {
            part: value.replace(self._key, "[key]") if isinstance(value, str) else value
            for part, value in error.items()
            if isinstance(value, str | int)
        }

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "tailrace"}
            if self._key:
                headers["authorization"] = f"Bearer {self._key}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the relay's slots are the limit
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
            )
        return self._session


class _Tally:
    """What one call has given so far."""

    def __init__(self, pool: str, body: dict[str, Any]) -> None:
        self.size = 0  # bytes sampled
        self._pool = pool
        self._body = body
        self._ended: set[str] = set()  # choices that have their finish_reason
        self._reported: Usage | None = None
        self._words: Any = None  # the upstream's own usage object
        self._base: dict[str, Any] = {}  # id, model, … of the last chunk

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish_reason."""
        return len(self._ended) >= (self._body.get("n") or 1)

    def usage(self) -> Usage:
        return completed(self._reported, self._body, self.size)

    def reply(self, document: dict[str, Any]) -> Reply:
        choice = self._noted(document, "message")
        if choice is None:
            raise PoolError(Fault.BROKEN, f"{self._pool}: answered without a choice", usage=self.usage())
        message = choice["message"]
        return Reply(
            body={**document, "usage": self._told()},
            text=_text(message),
            finish=str(choice.get("finish_reason") or ""),
            usage=self.usage(),
            model=str(document.get("model") or ""),
            tool_calls=tuple(message.get("tool_calls") or ()),
            pool=self._pool,
        )

    def chunk(self, document: dict[str, Any]) -> Chunk | None:
        """None for what says nothing to an application: usage is told in the end."""
        self._base = document
        choice = self._noted(document, "delta")
        if not document.get("choices"):
            return None
        if choice is None:
            return Chunk(document, pool=self._pool)  # of another choice than the first
        finish = choice.get("finish_reason")
        return Chunk(document, _text(choice["delta"]), finish if isinstance(finish, str) else None, pool=self._pool)

    def last(self) -> Chunk:
        body = {**self._base, "choices": [], "usage": self._told()}
        return Chunk(body, usage=self.usage(), pool=self._pool)

    def _told(self) -> Any:
        usage = self.usage()
        return usage.body() if usage.estimated else self._words

    def _noted(self, document: dict[str, Any], part: str) -> dict[str, Any] | None:
        """The first choice, after counting all of them and taking the usage out."""
        words = document.pop("usage", None)
        reported = usage_of(words)
        if reported is not None:
            self._reported, self._words = reported, words
        choices = document.get("choices") or []
        first = None
        for choice in choices if isinstance(choices, list) else [None]:
            if not isinstance(choice, dict):
                raise PoolError(Fault.BROKEN, f"{self._pool}: sent a choice that is none", usage=self.usage())
            if not isinstance(choice.get(part), dict):
                choice[part] = {}  # as on last chunks of some upstreams
            calls = choice[part].get("tool_calls") or []
            if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
                raise PoolError(Fault.BROKEN, f"{self._pool}: sent calls that are none", usage=self.usage())
            self.size += spoken(choice[part])
            if choice.get("finish_reason"):
                self._ended.add(str(choice.get("index")))
            if choice.get("index", 0) == 0:
                first = choice
        return first


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


async def _read(response: aiohttp.ClientResponse, until: float) -> bytes:
    """What has come, empty at the end. Raises `TimeoutError` at `until`, in the loop's time."""
    async with asyncio.timeout_at(until):
        return await response.content.readany()
