"""How an agent's session fares, from its conversation alone: what it does, what failed, whether it turns in circles.

The whole of it is computed again from the messages of each request, so it needs no memory and survives restarts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from router.chat import Message
from router.decomposition.plan import Kind
from router.decomposition.text import clipped, holds_result, last_spoken
from router.decomposition.tools import Deed, catalogue

LATCH = 3  # failed turns that are still open: then the session stays on strong pools until a verification passes
WINDOW = 12  # calls that the shares of deeds are taken over
REPEATS = 3  # identical calls with nothing written between them: the agent turns in circles

_SEEN = 600  # turns, from the end, that are looked at
_SHOWN = 2400  # characters of a result that are looked at

_EXIT = re.compile(
    r"(?:exit(?:ed)?(?:[ _]?(?:code|status))?(?: with)?(?: code| status)?|return[ _]?code|Process exited with code)"
    r"['\"]?\s*[:=>]?\s*['\"]?(-?\d{1,3})\b",
    re.IGNORECASE,
)
_RETURN = re.compile(r"<(?:returncode|exit_code|exitcode)>\s*(-?\d{1,3})")
_REFUSED = re.compile(
    r"\s*(?:<tool_use_error>|<error>|\{?\"?(?:error|Error|ERROR)\b\"?\s*[:!]|Error executing|Failed to|"
    r"Tool (?:execution )?failed|"
    r"The tool execution failed|InputValidationError|Invalid (?:arguments|parameters)|No replacement was performed|"
    r"String to replace not found|Unknown tool|File (?:has not been read|does not exist)|Permission denied)"
)
_BROKEN = re.compile(
    r"Traceback \(most recent call last\)|\b[1-9]\d* (?:failed|errors?|failures?)\b|^FAILED\b|^FAIL[:\s]|\bFAILED \(|"
    r"BUILD FAILED|"
    r"npm ERR!|^error(?:\[E\d+\])?:|: error(?: TS\d+)?:|^E {3}|panicked at|Segmentation fault|command not found|"
    r"make: \*\*\*|AssertionError|SyntaxError|ModuleNotFoundError|fatal: |✗|✖|Tests:\s+[1-9]\d* failed",
    re.MULTILINE,
)
_PASSED = re.compile(
    r"\b[1-9]\d* (?:passed|passing|tests? passed)\b|^OK\b|\bok\s+\S+\s+[\d.]+s|test result: ok|"
    r"All checks passed|Success: no issues|BUILD SUCCESS|0 (?:errors?|failures|problems)\b|Tests:\s+\d+ passed|PASSED|"
    r"✓|no errors found|All tests passed",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class Trajectory:
    """Where an agent stands."""

    kind: Kind | None  # of the turn that comes next; None = no agent's turn
    severity: float = 0.0  # 0..1: open failures, of LATCH
    spinning: float = 0.0  # 0..1: identical calls with nothing written between them, of REPEATS
    latched: bool = False  # stays on strong pools until a verification passes
    hard: bool = False  # what failed last was a verification, or it has failed before
    figures: dict[str, float] = field(default_factory=dict)  # for the routing policy; empty = no agent

    @property
    def minimum(self) -> str:
        """Tier below which the session must not go."""
        return "strong" if self.latched else ""


@dataclass
class _Turn:
    """One turn of the agent: its calls and what they gave."""

    deeds: list[Deed]
    shells: list[bool]
    keys: list[tuple[str, str]]
    failed: set[Deed] = field(default_factory=set)
    passed: bool = False
    answered: int = 0
    written: bool = False  # calls stand in the text, so only a result that follows shows that they were calls


def follow(messages: Sequence[Message], tools: bool) -> Trajectory:
    """The trajectory of a conversation; `tools` = whether functions are on offer."""
    turns = list(_turns(messages[-_SEEN:]))
    if not turns:
        return Trajectory(Kind.PLANNING if tools else None)
    open_failures: Counter[Deed] = Counter()
    latched = False
    repeated: Counter[tuple[str, str]] = Counter()
    most = streak = 0
    for turn in turns:
        streak = streak + 1 if turn.failed else 0
        open_failures.update(turn.failed)
        done = set(turn.deeds) - turn.failed if turn.answered else set()
        for deed in done - {Deed.VERIFYING}:
            open_failures.pop(deed, None)
        if turn.passed and not turn.failed:
            open_failures.clear()
            latched = False
        repeated.update(turn.keys)
        most = max((repeated[key] for key in turn.keys), default=0)
        if Deed.PRODUCING in done:
            repeated.clear()
            most = 0
        latched |= open_failures.total() >= LATCH or most > REPEATS
    last = turns[-1]
    recent = Counter([deed for turn in turns[-WINDOW:] for deed in turn.deeds][-WINDOW:])
    total = max(recent.total(), 1)
    severity = min(open_failures.total() / LATCH, 1.0)
    spinning = min(max(most - 1, 0) / (REPEATS - 1), 1.0)
    said = last_spoken(messages)
    ended_by_user = said >= 0 and all(_silent(message) for message in messages[said + 1 :])
    figures = {
        "turns": float(len(turns)),
        **{deed.value: recent[deed] / total for deed in Deed if deed is not Deed.OTHER},
        "failed": float(bool(last.failed)),
        "streak": float(min(streak, 10)),
        "severity": severity,
        "spinning": spinning,
        "latched": float(latched),
    }
    # Keeping a list of what is to be done is no step of its own: what comes next follows from the step before.
    step = next((turn for turn in reversed(turns) if turn.failed or set(turn.deeds) != {Deed.PLANNING}), None)
    kind = Kind.PLANNING if ended_by_user else _kind(step, spinning) if step else Kind.EXPLORING
    hard = Deed.VERIFYING in last.failed or severity > 0.5 or spinning > 0.5 or latched
    return Trajectory(kind, severity, spinning, latched, hard, figures)


def _silent(message: Message) -> bool:
    """Whether a turn behind what a person said changes nothing about it: a host's reminder, no tool's result."""
    return message.role in ("user", "system", "developer") and not holds_result(message.text)


def _kind(last: _Turn, spinning: float) -> Kind:
    """What comes next is most often more of what was done last."""
    if last.failed or spinning >= 1:
        return Kind.RECOVERING
    if Deed.VERIFYING in last.deeds:
        return Kind.VERIFYING
    if Deed.PRODUCING in last.deeds:
        return Kind.PRODUCING
    return Kind.EXPLORING


def _turns(messages: Sequence[Message]) -> Iterator[_Turn]:
    """Turns that called tools, each with the fate of its calls; results belong to calls in their order."""
    known = catalogue()
    turn: _Turn | None = None
    for message in messages:
        if message.role == "assistant":
            if turn and (turn.answered or not turn.written):
                yield turn
            calls = list(zip(message.tool_calls, (*message.arguments, *[""] * len(message.tool_calls)), strict=False))
            written = not calls
            calls = calls or list(_written_calls(message.text))
            turn = None
            if calls:
                turn = _Turn(
                    [known.deed(name, arguments) for name, arguments in calls],
                    [known.runs_commands(name) for name, _ in calls],
                    [(name, arguments[:2000]) for name, arguments in calls],
                    written=written,
                )
        elif turn and (message.role in ("tool", "function") or (message.role == "user" and holds_result(message.text))):
            at = min(turn.answered, len(turn.deeds) - 1)
            turn.answered += 1
            deed, shell = turn.deeds[at], turn.shells[at]
            if failed(message, deed, shell):
                turn.failed.add(deed)
            elif deed is Deed.VERIFYING:
                turn.passed = True
    if turn and (turn.answered or not turn.written):
        yield turn


def failed(message: Message, deed: Deed, shell: bool) -> bool:
    """Whether a tool's result says that the call failed.

    What a reading tool gives is a file's text, which may well hold a traceback: only its own refusal counts. A command
    that explores may exit with 1 because it found nothing.
    """
    if message.is_error:
        return True
    text = clipped(message.text, _SHOWN)
    if _REFUSED.match(text):
        return True
    found = None
    if shell or deed is Deed.VERIFYING:
        found = _RETURN.search(text) or _EXIT.search(text[:400]) or _EXIT.search(text[-400:])
    if found:
        code = int(found[1])
        return code != 0 and not (deed is Deed.EXPLORING and code == 1)
    if deed is Deed.VERIFYING or (shell and deed is not Deed.EXPLORING):
        return bool(_BROKEN.search(text)) and not (deed is not Deed.VERIFYING and _PASSED.search(text))
    return False


# Hosts without a function-calling interface have their calls written out in the text.
_XML = re.compile(
    r"<(read_file|write_to_file|replace_in_file|apply_diff|insert_content|search_files|list_files|execute_command|"
    r"list_code_definition_names|search_and_replace|browser_action|use_mcp_tool|new_task|switch_mode)>"
)
_FENCED = re.compile(r"```(?:bash|sh|shell|mswea_bash_command)\n(.{0,4000}?)```", re.DOTALL)


def _written_calls(text: str) -> Iterator[tuple[str, str]]:
    """Calls written out in an assistant's text: XML tags of tools, or one fenced command."""
    text = text[-8000:]
    for found in _XML.finditer(text):
        close = text.find(f"</{found[1]}>", found.end())
        inner = text[found.end() : close if close >= 0 else found.end() + 2000]
        command = re.search(r"<command>(.{0,2000}?)</command>", inner, re.DOTALL)
        yield found[1], json.dumps({"command": command[1]}) if command else inner
        return
    fenced = _FENCED.findall(text) if "```" in text else []
    if len(fenced) == 1:
        yield "bash", json.dumps({"command": fenced[0].strip()})
