"""A finished answer in pieces, for whoever asked for a stream. Pure."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from router.chat import Chunk, Reply

PIECE = 64  # characters of a finished answer per chunk


async def pieces(reply: Reply) -> AsyncGenerator[Chunk, None]:
    """`chunks_of` for where an answer is awaited piece by piece."""
    for chunk in chunks_of(reply):
        yield chunk


def chunks_of(reply: Reply) -> Iterator[Chunk]:
    """A finished answer in pieces, as if it came just now; the last one bears the usage."""
    base = {key: value for key, value in reply.body.items() if key not in ("choices", "usage")}
    base["object"] = "chat.completion.chunk"
    for position, choice in enumerate(reply.body.get("choices", [])):
        index = choice.get("index", position)
        for delta in _deltas(choice.get("message") or {}):
            body = {**base, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}
            text = delta.get("content") if position == 0 else None
            yield Chunk(body, text=text or "", pool=reply.pool)
        finish = choice.get("finish_reason") or "stop"
        body = {**base, "choices": [{"index": index, "delta": {}, "finish_reason": finish}]}
        yield Chunk(body, finish=finish if position == 0 else None, pool=reply.pool)
    yield Chunk(
        {**base, "choices": [], "usage": reply.body.get("usage")},
        usage=reply.usage,
        policy=reply.policy,
        rollout=reply.rollout,
        pool=reply.pool,
    )


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    text, calls = message.get("content"), message.get("tool_calls")
    others = {key: value for key, value in message.items() if key not in ("content", "tool_calls", "role")}
    yield {"role": "assistant", "content": "" if isinstance(text, str) else None, **others}
    if isinstance(text, str):
        for start in range(0, len(text), PIECE):
            yield {"content": text[start : start + PIECE]}
    for index, call in enumerate(calls or ()):
        yield {"tool_calls": [{"index": index, **call}]}
