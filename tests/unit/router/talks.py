"""Conversations for tests: what was said, as the gateway would hand it over."""

from __future__ import annotations

import json
from typing import Any

from router.chat import ChatRequest, Message


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def call(name: str, **arguments: Any) -> Message:
    """An assistant's turn that calls one function."""
    return Message("assistant", "", tool_calls=(name,), arguments=(json.dumps(arguments),))


def result(text: str, is_error: bool = False) -> Message:
    return Message("tool", text, is_error=is_error)


def request(*messages: Message | str, **fields: Any) -> ChatRequest:
    """A request of these turns; a string is a user's. Names of ChatRequest's fields go there, others into the body."""
    turns = tuple(user(each) if isinstance(each, str) else each for each in messages)
    known = {name: fields.pop(name) for name in list(fields) if name in ChatRequest.__dataclass_fields__}
    body = {"model": "auto", "messages": [{"role": each.role, "content": each.text} for each in turns], **fields}
    return ChatRequest(body, "auto", turns, **known)
