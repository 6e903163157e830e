"""Calls of tools in what a model writes, in the form most open models are trained on. Pure.

`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as in the chat templates of Hermes and Qwen. What does not have
this form is text like any other.
"""

from __future__ import annotations

import json
import re
from typing import Any

MARK = "<tool_call>"
_OPENING = re.compile(r"<tool_call>\s*(?=\{)")
_CLOSING = re.compile(r"\s*(?:</tool_call>|\Z)\s*")
_JSON = json.JSONDecoder()


class ToolText:
    """The text of an answer that may call tools: shown up to the first call."""

    def __init__(self) -> None:
        self._held = ""  # is, or may be, the beginning of a call

    def push(self, text: str) -> str:
        """The text that can be shown now and could not before."""
        self._held += text
        place = self._held.find(MARK)
        if place < 0:
            place = len(self._held) - _overlap(self._held)
        shown, self._held = self._held[:place], self._held[place:]
        return shown

    def end(self, name: str) -> tuple[str, list[dict[str, Any]]]:
        """What is left: text, or calls as OpenAI shapes them, whose ids begin with `name`."""
        held, self._held = self._held, ""
        calls = _calls(held)
        return ("" if calls else held), [
            {"id": f"{name}-{number}", "type": "function", "function": call}
            for number, call in enumerate(calls, start=1)
        ]


def _calls(text: str) -> list[dict[str, str]]:
    """Name and arguments, as JSON text, of the calls that a text consists of; none where there is anything else."""
    found: list[dict[str, str]] = []
    place = 0
    while place < len(text):
        opening = _OPENING.match(text, place)
        if opening is None:
            return []
        try:
            call, place = _JSON.raw_decode(text, opening.end())
            name, arguments = call.get("name"), call.get("arguments", {})
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        except (ValueError, RecursionError):
            return []
        closing = _CLOSING.match(text, place)
        if closing is None or not isinstance(name, str) or not isinstance(arguments, dict | str):
            return []
        found.append({"name": name, "arguments": written})
        place = closing.end()
    return found


def _overlap(text: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of a call."""
    return next((size for size in range(min(len(MARK) - 1, len(text)), 0, -1) if text.endswith(MARK[:size])), 0)
