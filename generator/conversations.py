"""From a conversation to the tokens of a prompt. Pure, and slow for long ones: call it from a thread."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from contracts.messages import Task, Turn
from infra import models


def encode(tokenizer: PreTrainedTokenizerFast, task: Task) -> list[int]:
    """Token ids of a task's conversation, through the model's chat template.

    A model without one gets the contents of the turns as plain text, one below the other. Raises `ValueError`, with a
    sentence for the application, for a conversation that the template refuses, and for tools that it has no place for.
    """
    tools = _json(task.tools, "tools") if task.tools else None
    template = tokenizer.chat_template
    if tools and "tools" not in str(template or ""):
        raise ValueError("this model's chat template has no place for tools")
    if template is None:
        return models.encode_prompt(tokenizer, "\n".join(turn.content for turn in task.turns))
    try:
        return models.encode_prompt(tokenizer, [message_of(turn) for turn in task.turns], tools)
    except (TemplateError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"this model's chat template refuses the conversation: {error}") from error


def message_of(turn: Turn) -> dict[str, Any]:
    """A turn as chat templates expect it: the arguments of tool calls as objects, not as text."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        message["tool_calls"] = [_call(call) for call in _json(turn.tool_calls, "tool_calls")]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    return message


def content_hash(turns: Sequence[Turn], tools: str) -> str:
    """16 hex digits over all that was said: the same question has the same hash everywhere."""
    said = json.dumps([[turn.role, turn.content, turn.tool_calls, turn.tool_call_id] for turn in turns] + [tools])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _call(call: Any) -> Any:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _json(text: str, what: str) -> list[Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None
    if not isinstance(found, list):
        raise ValueError(f"{what} must be an array")
    return found
