"""Turns of a conversation, in OpenAI's shape and, for tools, in Anthropic's. Pure; raises `ApiError` 400."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from router.chat import ApiError, Message

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
LONGEST_RESULT = 64 * 1024  # characters of a tool's result that are looked into for a mark of failure


def wrong(param: str | None, message: str) -> ApiError:
    """What is told about a parameter that cannot be used."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def read(turns: Any) -> tuple[Message, ...]:
    """The messages of a request, from its field of that name."""
    if not isinstance(turns, list) or not turns:
        raise wrong("messages", "must be an array with at least one message")
    return tuple(_message(turn, f"messages[{index}]") for index, turn in enumerate(turns))


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise wrong(where, "must be an object")
    role = turn.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(sorted(ROLES))}")
    calls, arguments = _calls(turn, where)
    content = turn.get("content")
    if isinstance(content, str):
        parts = _Parts([content])
    elif isinstance(content, list):
        parts = _parts(content, f"{where}.content")
    elif content is None and role == "assistant" and (calls or turn.get("refusal") or turn.get("audio")):
        parts = _Parts([])
    else:
        raise wrong(f"{where}.content", "must be a string or an array of parts; null only beside an assistant's calls")
    failed = parts.failed or (role in ("tool", "function") and (_failed(turn) or _failed_text(content)))
    return Message(
        role="tool" if role == "function" else role,
        text="\n".join(parts.texts) if len(parts.texts) != 1 else parts.texts[0],
        images=parts.others,
        tool_calls=(*calls, *parts.calls),
        arguments=(*arguments, *parts.arguments),
        is_error=failed,
    )


class _Parts:
    """What a message's content is made of."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.others = 0  # images, audio, files
        self.calls: list[str] = []
        self.arguments: list[str] = []
        self.failed = False


def _parts(content: list[Any], where: str) -> _Parts:
    """Parts in OpenAI's shape, and those for tools in Anthropic's."""
    parts = _Parts([])
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise wrong(f"{where}[{index}]", "must be an object with a type")
        if kind in ("text", "refusal"):
            if not isinstance(part.get(kind), str):
                raise wrong(f"{where}[{index}].{kind}", "must be a string")
            parts.texts.append(part[kind])
        elif kind == "tool_use":
            parts.calls.append(str(part.get("name", "")))
            parts.arguments.append(msgspec.json.encode(part.get("input", {})).decode())
        elif kind == "tool_result":
            within = part.get("content")
            if isinstance(within, str):
                parts.texts.append(within)
            elif isinstance(within, list):
                inner = _parts(within, f"{where}[{index}].content")
                parts.texts += inner.texts
                parts.others += inner.others
            parts.failed = parts.failed or _failed(part) or _failed_text(within)
        else:
            parts.others += 1
    return parts


def _calls(turn: Mapping[str, Any], where: str) -> tuple[list[str], list[str]]:
    """Names and arguments of the functions that an assistant's turn calls."""
    calls = turn.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", "must be an array")
    told = [call.get(str(call.get("type", "function"))) if isinstance(call, dict) else None for call in calls or ()] + (
        [turn["function_call"]] if turn.get("function_call") is not None else []
    )
    names, arguments = [], []
    for index, function in enumerate(told):
        name = function.get("name") if isinstance(function, dict) else None
        given = function.get("arguments", function.get("input", "")) if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(given, str):
            raise wrong(f"{where}.tool_calls[{index}]", "must have a function with a name and arguments as JSON text")
        names.append(name)
        arguments.append(given)
    return names, arguments


def _failed(marked: Mapping[str, Any]) -> bool:
    """Whether a tool's result says of itself that it is an error: as Anthropic, MCP and LangChain mark it."""
    return (
        marked.get("is_error") is True
        or marked.get("isError") is True
        or marked.get("status") == "error"
        or bool(marked.get("error"))
    )


def _failed_text(content: Any) -> bool:
    """The same marks inside the result's text: a JSON object, or Claude Code's tag."""
    if not isinstance(content, str):
        return False
    start = content[:64].lstrip()
    if start.startswith("<tool_use_error>"):
        return True
    if not start.startswith("{") or len(content) > LONGEST_RESULT:
        return False
    try:
        told = msgspec.json.decode(content.encode("utf-8", "replace"))
    except (msgspec.MsgspecError, RecursionError):
        return False
    return isinstance(told, dict) and _failed(told)
