"""Tokens of a call: as its pool reports them, and counted here where it does not, or not yet. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

import msgspec

from router.chat import Usage

# One token per 3.5 bytes of UTF-8: English prose has 4 to 5, code about 3.3, Chinese 3 per character. On the high side,
# because a window that is too small costs a call and one that is too large costs nothing.
BYTES_PER_TOKEN = 3.5
MESSAGE_TOKENS = 4  # role and separators
PICTURE_TOKENS = 765  # 1024 x 1024 in high detail, as OpenAI counts it; sounds and files are taken for pictures


def tokens(size: int) -> int:
    """Tokens of so many bytes of text; none only where there is no text."""
    return ceil(size / BYTES_PER_TOKEN)


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Tokens of what a model is given to read: messages, tools and the answer's schema."""
    messages = body.get("messages") or ()
    size, pictures = 0, 0
    for message in messages:
        text, shown = _content(message.get("content"))
        size += text + spoken(message)
        pictures += shown
    size += sum(len(encode(body[part])) for part in ("tools", "functions", "response_format") if body.get(part))
    return tokens(size) + MESSAGE_TOKENS * len(messages) + PICTURE_TOKENS * pictures


def _content(content: Any) -> tuple[int, int]:
    """Bytes of text, and pictures, in a content of several parts; those for tools are in Anthropic's shape."""
    size, pictures = 0, 0
    for part in content if isinstance(content, list) else ():
        match kind := part.get("type"):
            case "text" | "refusal":
                size += _size(part.get(kind))
            case "tool_use":
                size += _size(part.get("name")) + len(encode(part.get("input")))
            case "tool_result":
                within = part.get("content")
                text, shown = _content(within)
                size, pictures = size + text + _size(within), pictures + shown
            case _:
                pictures += 1
    return size, pictures


def spoken(message: Mapping[str, Any]) -> int:
    """Bytes that a model sampled, of a message or of a streamed delta: content, reasoning, refusals, calls."""
    size = 0
    for part in ("content", "reasoning_content", "reasoning", "refusal"):
        if text := message.get(part):
            size += _size(text)
    calls = message.get("tool_calls")
    made = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    for call in (*(each.get("function") or each.get("custom") for each in made), message.get("function_call")):
        if isinstance(call, dict):
            size += _size(call.get("name")) + _size(call.get("arguments", call.get("input")))
    return size


def completed(reported: Usage | None, body: Mapping[str, Any], size: int) -> Usage:
    """Usage of a call: as reported, and estimated from the prompt and `size` sampled bytes where it says nothing.

    A pool that reports no tokens although it read or said something reports nothing.
    """
    usage = reported or Usage()
    if usage.prompt and (usage.completion or not size):
        return usage
    return replace(
        usage,
        prompt=usage.prompt or prompt_tokens(body),
        completion=usage.completion or tokens(size),
        estimated=True,
    )


def usage_of(reported: Any) -> Usage | None:
    """The usage that a document reports; None where it reports none. What is no count says nothing."""
    if not isinstance(reported, dict):
        return None
    details = reported.get("prompt_tokens_details")
    details = details if isinstance(details, dict) else {}
    prompt = _count(reported.get("prompt_tokens"))
    cached = _count(details.get("cached_tokens")) or _count(reported.get("prompt_cache_hit_tokens"))
    written = _count(details.get("cache_creation_tokens")) or _count(reported.get("cache_creation_input_tokens"))
    cached = min(cached, prompt)
    return Usage(prompt, _count(reported.get("completion_tokens")), cached, min(written, prompt - cached))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53 else 0


def encode(value: Any) -> bytes:
    """JSON; lone surrogates, which UTF-8 cannot carry, become question marks."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def decode(data: bytes) -> Any:
    """JSON as lenient as upstreams need: halves of surrogate pairs and invalid UTF-8 pass. Raises `ValueError`."""
    try:
        try:
            return msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return json.loads(data.decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _size(text: Any) -> int:
    if not isinstance(text, str):
        return 0
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
