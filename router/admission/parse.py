"""From the bytes of a request to a `ChatRequest`. Pure; whatever cannot be used raises `ApiError` 400.

What the router does not look into travels on unchanged: whether a pool takes it is the pool's to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from router.admission.messages import read, wrong
from router.chat import ChatRequest, Message
from router.pools.counting import prompt_tokens

MAX_BYTES = 8 * 1024 * 1024  # of a request's body; longer ones are refused with 413 before they are read
LONG_BODY = 1024 * 1024  # bytes
MAX_CHOICES = 128
MAX_DEPTH = 100  # nested arrays and objects; what comes after us must not run out of stack
TOO_DEEP = f"arrays and objects in the body are nested more than {MAX_DEPTH} deep"

# An escape of a pair of surrogates, or of half a pair (group 2), behind escaped backslashes (group 1).
_SURROGATE = re.compile(
    rb"(?<!\\)((?:\\\\)*)\\u(?:[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|([dD][89a-fA-F][0-9a-fA-F]{2}))"
)
_decode = msgspec.json.Decoder().decode


def parse(raw: bytes, session: str = "") -> ChatRequest:
    """A chat request from the body of an HTTP request; `session` is the affinity header's value, if it came with one.

    Raises `ApiError` 400 with the parameter that is wrong.
    """
    body = json_object(raw)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise wrong("model", "you must provide a model: auto, auto-<threshold>, or the name of a pool")
    messages = read(body.get("messages"))
    stream = _flag(body, "stream")
    tools = _tools(body)
    json_mode, schema = _format(body.get("response_format"))
    _numbers(body)
    return ChatRequest(
        body=body,
        model=model,
        messages=messages,
        stream=stream,
        include_usage=_include_usage(body, stream),
        tools=tools,
        json_mode=json_mode,
        schema=schema,
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        choices=body.get("n") or 1,
        prompt_tokens=prompt_tokens(body),
        session=_session(session, body, messages),
    )


# --- the body as JSON -------------------------------------------------------------------------------------------------


def json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object that a request's body is. Raises `ApiError` 400."""
    try:
        body = _json(raw)
    except RecursionError:
        raise wrong(None, TOO_DEEP) from None
    except msgspec.MsgspecError as error:
        raise wrong(None, f"we could not parse the JSON body of your request: {error}") from None
    if not isinstance(body, dict):
        raise wrong(None, "the body of your request must be a JSON object")
    if _deep(body):
        raise wrong(None, TOO_DEEP)
    return body


def _json(raw: bytes) -> Any:
    """Decoded JSON. A surrogate without its other half, as from text cut in two, becomes U+FFFD."""
    try:
        return _decode(raw)
    except msgspec.DecodeError:
        repaired = _SURROGATE.sub(lambda match: match[1] + rb"\ufffd" if match[2] else match[0], raw)
        if repaired == raw:
            raise
        return _decode(repaired)


def _deep(body: dict[str, Any]) -> bool:
    """Whether arrays and objects are nested deeper than is allowed."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inside = (value.values() if type(value) is dict else value for value in level)
        level = [value for values in inside for value in values if type(value) is dict or type(value) is list]
        if not level:
            return False
    return True


# --- its fields -------------------------------------------------------------------------------------------------------


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(name, "must be true or false")
    return bool(value)


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise wrong("stream_options", "is only allowed when stream is true")
    if not isinstance(options, dict):
        raise wrong("stream_options", "must be an object")
    return _flag(options, "include_usage")


def _numbers(body: Mapping[str, Any]) -> None:
    for name, least, most in (("max_tokens", 1, None), ("max_completion_tokens", 1, None), ("n", 1, MAX_CHOICES)):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least or (most and value > most):
            raise wrong(name, f"must be a whole number from {least}" + (f" to {most}" if most else ""))
    for name, highest in (("temperature", 2.0), ("top_p", 1.0)):
        number = body.get(name)
        if number is None:
            continue
        if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number <= highest:
            raise wrong(name, f"must be a number from 0 to {highest:g}")


def _tools(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the tools on offer, those in the older field `functions` among them."""
    names = []
    for field, nested in (("tools", True), ("functions", False)):
        offered = body.get(field)
        if offered is None:
            continue
        if not isinstance(offered, list):
            raise wrong(field, "must be an array")
        for index, tool in enumerate(offered):
            where = f"{field}[{index}]"
            if not isinstance(tool, dict):
                raise wrong(where, "must be an object")
            told = tool.get(str(tool.get("type"))) if nested else tool
            name = told.get("name") if isinstance(told, dict) else None
            if not isinstance(name, str) or not name:
                raise wrong(where, "must have a type and, under that name, an object with the tool's name")
            names.append(name)
    return tuple(names)


def _format(wanted: Any) -> tuple[bool, dict[str, Any] | None]:
    """Whether an object is asked for, and its schema."""
    if wanted is None:
        return False, None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise wrong("response_format", "type must be text, json_object or json_schema")
    if kind != "json_schema":
        return kind == "json_object", None
    described = wanted.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("name"), str):
        raise wrong("response_format.json_schema", "must be an object with a name and a schema")
    schema = described.get("schema")
    if schema is not None and not isinstance(schema, dict):
        raise wrong("response_format.json_schema.schema", "must be an object")
    return True, schema


# --- the conversation -------------------------------------------------------------------------------------------------


def _session(header: str, body: Mapping[str, Any], messages: tuple[Message, ...]) -> str:
    """A name for the conversation, hashed, the same for all its turns.

    The affinity header, else the cache key that the application gave, else what stays the same while a conversation
    grows: its user's name, its system prompts before the first user turn, and that turn.
    """
    given = header or body.get("prompt_cache_key")
    if isinstance(given, str) and given:
        known = ["given", given]
    else:
        user = body.get("user")
        known = ["first", user if isinstance(user, str) else ""]
        for message in messages:
            known.append(message.text)
            if message.role == "user":
                break
    digest = blake2b(digest_size=12)
    for part in known:
        data = part.encode("utf-8", "replace")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
