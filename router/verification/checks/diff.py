"""Whether a change applies: unified diffs, and blocks that say what to search and what to put in its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.verification import answers
from router.verification.registry import Diff
from router.verification.result import Result, failed, passed

_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_SEARCH = re.compile(r"<{5,9} ?SEARCH\s*")
_NAME = re.compile(r"[\w./@+-]+")
_DIVIDER = re.compile(r"={5,9}\s*")
_REPLACE = re.compile(r">{5,9} ?REPLACE\s*")


class _Wrong(Exception):
    """The change does not apply; the text says why."""


@dataclass
class _Change:
    """Lines that must be there in this order, and what they become, near `line` (from 0) if that is known."""

    path: str
    old: list[str]
    new: list[str]
    line: int = 0
    creates: bool = False


@dataclass
class _Files:
    """Texts as lines by path."""

    given: dict[str, str]
    lines: dict[str, list[str]] = field(default_factory=dict)

    def find(self, path: str) -> str | None:
        """The name of a file, which a change may write with another prefix; the only file where it names none."""
        if not path:
            return next(iter(self.given)) if len(self.given) == 1 else None
        path = path.strip("`*:\"'# ").removeprefix("./")
        names = [name for name in self.given if name == path or path == name.removeprefix("./")]
        names += [name for name in self.given if path.endswith(f"/{name}") or name.endswith(f"/{path}")]
        if not names and len(self.given) == 1 and not _NAME.fullmatch(path):
            names = list(self.given)  # a sentence stands before the change, not a name
        return names[0] if names else None

    def apply(self, change: _Change) -> None:
        name = self.find(change.path)
        if change.creates and not change.old:
            if name is not None and self.given[name].strip():
                raise _Wrong(f"It creates {change.path[:80]}, which exists")
            self.given.setdefault(change.path, "")
            self.lines[change.path] = change.new
            return
        if name is None:
            raise _Wrong(f"It changes {change.path[:80] or 'a file without naming it'}, which is not there")
        lines = self.lines.setdefault(name, _split(self.given[name]))
        at = _position(lines, change.old, change.line)
        if at is None:
            first = next((line for line in change.old if line.strip()), "")
            raise _Wrong(f"The lines to change are not in {name[:80]} as written, from {first.strip()[:100]!r}")
        lines[at : at + len(change.old)] = change.new


def applies(answer: str, arguments: Diff) -> Result:
    """Every part of the change applies, one after another; positions may be off, as for patch(1), contents may not."""
    try:
        text = answers.extract.without_reasoning(answer)
        changes = list(_blocks(text)) if _SEARCH.search(text) else list(_hunks(_diff_text(answer)))
        if not changes:
            return failed("There is no change in the answer: neither a unified diff nor search and replace blocks.")
        if all(change.old == change.new for change in changes):
            return failed("The change changes nothing.")
        files = _Files(dict(arguments.files))
        for change in changes:
            files.apply(change)
    except _Wrong as error:
        return failed(f"The change does not apply: {error}.")
    return passed(f"{len(changes)} changes apply.")


def _split(text: str) -> list[str]:
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []


def _position(lines: list[str], wanted: list[str], near: int) -> int | None:
    """Where `wanted` stands in `lines`, nearest to `near`."""
    if not wanted:
        return min(near, len(lines))
    last = len(lines) - len(wanted)
    found = [at for at in range(last + 1) if lines[at] == wanted[0] and lines[at : at + len(wanted)] == wanted]
    return min(found, key=lambda at: abs(at - near), default=None)


def _diff_text(answer: str) -> str:
    found = answers.code(answer, frozenset({"diff", "patch", "udiff"}))
    return "\n".join(block.text for block in found) if found else answers.extract.without_reasoning(answer)


def _hunks(text: str) -> Iterator[_Change]:
    """The hunks of a unified diff. Raises `_Wrong` where one has other lengths than its head says."""
    lines = text.replace("\r\n", "\n").split("\n")
    source = target = ""
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if line.startswith("--- ") and position < len(lines) and lines[position].startswith("+++ "):
            source, target = _path(line), _path(lines[position])
            position += 1
        elif head := _HUNK.match(line):
            start, old_count, _, new_count = (int(group) if group else 1 for group in head.groups())
            old, new, position = _body(lines, position, old_count, new_count)
            creates = source == "/dev/null"
            yield _Change(target if creates else source, old, new, max(start - 1, 0), creates)


def _body(lines: list[str], position: int, old_count: int, new_count: int) -> tuple[list[str], list[str], int]:
    old: list[str] = []
    new: list[str] = []
    while len(old) < old_count or len(new) < new_count:
        line = lines[position] if position < len(lines) else "@@"
        kind = line[:1] or " "  # an empty line of context whose space was lost
        if kind not in " +-\\" or (position == len(lines) - 1 and not line):
            break
        position += 1
        if kind in " -":
            old.append(line[1:])
        if kind in " +":
            new.append(line[1:])
    if (len(old), len(new)) != (old_count, new_count):
        raise _Wrong(f"A hunk announces {old_count} and {new_count} lines and has {len(old)} and {len(new)}")
    if position < len(lines) and lines[position][:1] in ("+", "-") and not lines[position].startswith(("--- ", "+++ ")):
        raise _Wrong(f"A hunk announces {old_count} and {new_count} lines and has more")
    return old, new, position


def _path(line: str) -> str:
    path = line[4:].split("\t")[0].strip()
    return path[2:] if path[:2] in ("a/", "b/") else path


def _blocks(text: str) -> Iterator[_Change]:
    """Search and replace blocks, each under the name of its file. Raises `_Wrong` where one is not finished."""
    lines = text.replace("\r\n", "\n").split("\n")
    path, before, position = "", "", 0
    while position < len(lines):
        line = lines[position].strip()
        position += 1
        if not _SEARCH.fullmatch(line):
            before = line if line and not line.startswith(("```", "~~~")) else before
            continue
        path, before = before or path, ""
        middle = _next(lines, position, _DIVIDER)
        end = _next(lines, middle + 1, _REPLACE)
        old, new = lines[position:middle], lines[middle + 1 : end]
        yield _Change(path, old, new, creates=not old)
        position = end + 1


def _next(lines: list[str], start: int, pattern: re.Pattern[str]) -> int:
    found = next((at for at in range(start, len(lines)) if pattern.fullmatch(lines[at])), None)
    if found is None:
        raise _Wrong("A search and replace block is not finished")
    return found
