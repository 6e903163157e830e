"""What of a turn a person really said: injected blocks, wrappers and tools' output set apart. Pure, linear."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from router.chat import Message

CAP = 4000  # characters of a turn that are looked at: three quarters from its start, the rest from its end

# Blocks that agents' hosts put into user turns; what they hold was said by no one.
_INJECTED = (
    "system-reminder", "system_reminder", "system-notification", "system_warning", "environment_details",
    "environment_context", "environment", "env", "user_instructions", "permissions instructions", "ide_opened_file",
    "ide_selection", "ide_diagnostics", "additional_data", "attached_files", "open_and_recently_viewed_files",
    "current_file", "git_status", "gitstatus", "project_layout", "workspace_info", "custom_instructions", "rules",
    "command-name", "command-message", "command-args", "command-contents", "local-command-stdout",
    "local-command-stderr", "local-command-caveat", "bash-input", "bash-stdout", "bash-stderr", "task-notification",
    "user-prompt-submit-hook", "session-start-hook", "post-tool-use-hook", "tool_result", "tool_results",
    "function_results", "function_result", "tool_output", "claudemd", "repository_context", "file_content",
)  # fmt: skip
# Tags around what was said: only the tags go.
_WRAPPERS = ("user_query", "user_message", "user_request", "task", "feedback", "answer", "query", "userrequest")

_TAG = re.compile(
    r"<(/?)("
    + "|".join(map(re.escape, sorted(_INJECTED + _WRAPPERS, key=len, reverse=True)))
    + r")(?:\s[^<>]{0,200})?>",
    re.IGNORECASE,
)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)$")

# How a host that has no tool role of its own begins a turn that holds a tool's result.
_RESULT = re.compile(
    r"\[[\w.-]{1,64}(?: for [^\]]{0,400})?\] Result\b|<returncode>|OBSERVATION:|Observation:|"
    r"EXECUTION RESULT|Tool (?:result|output)\b|\[Request interrupted by user|Caveat: The messages below"
)


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands behind its opening fence, what it holds, and the line before it."""

    info: str
    text: str
    before: str  # the last line of prose above it, where file names stand; empty = none


def spoken(text: str) -> str:
    """A user turn without injected blocks; wrappers are taken off. A tag that is never closed hides nothing."""
    if "<" not in text:
        return text.strip()
    lowered = text.lower()
    if len(lowered) != len(text):  # a letter that is longer in lower case
        lowered = text
    last: dict[str, int] = {}  # where each name is closed for the last time: what is open behind it is never closed
    kept: list[str] = []
    at = 0
    for tag in _TAG.finditer(text):
        if tag.start() < at:
            continue
        name = tag[2].lower()
        end = tag.end()
        if not tag[1] and name in _INJECTED:
            close = f"</{name}>"
            if name not in last:
                last[name] = lowered.rfind(close)
            if end <= last[name]:
                end = lowered.index(close, end) + len(close)
        kept.append(text[at : tag.start()])
        at = end
    kept.append(text[at:])
    return "".join(kept).strip()


def holds_result(text: str) -> bool:
    """Whether a user turn is a tool's result that its host had no better role for."""
    return _RESULT.match(text.lstrip()[:600]) is not None


def last_spoken(messages: Sequence[Message], before: int | None = None) -> int:
    """Index of the last user turn in which a person said something, before index `before`; -1 = none."""
    for index in range((len(messages) if before is None else before) - 1, -1, -1):
        message = messages[index]
        if message.role == "user" and (message.images or (spoken(message.text) and not holds_result(message.text))):
            return index
    return -1


def clipped(text: str, cap: int = CAP) -> str:
    """Start and end of a text, `cap` characters in all: what is asked stands at either."""
    if len(text) <= cap:
        return text
    tail = cap // 4
    return f"{text[: cap - tail]}\n{text[-tail:]}"


def parts(text: str) -> tuple[str, list[Block]]:
    """Prose without fenced blocks and quoted lines, and the blocks. A fence that is never closed runs to the end."""
    prose: list[str] = []
    blocks: list[Block] = []
    held: list[str] = []
    fence, info, before = "", "", ""
    for line in text.split("\n"):
        found = _FENCE.match(line) if "```" in line or "~~~" in line else None
        if fence:
            if found and found[1].startswith(fence) and not found[2].strip():
                blocks.append(Block(info, "\n".join(held), before))
                fence, held = "", []
            else:
                held.append(line)
        elif found:
            fence, info = found[1], found[2].strip()
            before = next((each.strip() for each in reversed(prose[-3:]) if each.strip()), "")
            prose.append("")
        elif not line.lstrip().startswith(">"):
            prose.append(line)
    if fence:
        blocks.append(Block(info, "\n".join(held), before))
    return "\n".join(prose), blocks


def fenced(text: str, info: str = "") -> str:
    """A text between fences longer than any in it, so that nothing in it can end them."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{info}\n{text}\n{fence}"
