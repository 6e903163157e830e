"""What an agent's tool calls do: explore, produce, verify or plan. Names and commands are data (tools.toml). Pure."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

_ARGUMENTS = 4000  # characters of a call's arguments that are looked at
_SEPARATOR = re.compile(r"\|\||&&|[;|\n]")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=\S*$")
_WRITES = re.compile(r"(?<![0-9&<>=-])>{1,2}(?!&|=|>)\s*(?!/dev/null)[\w./~$\"']|<<-?\s*['\"]?\w+")
_MESSAGE = re.compile(r'"(?:command|cmd|CommandLine|script|code)"\s*:\s*"((?:[^"\\]|\\.)*)')


class Deed(StrEnum):
    """What a call does."""

    EXPLORING = "exploring"
    PRODUCING = "producing"
    VERIFYING = "verifying"
    PLANNING = "planning"
    OTHER = "other"


class Catalogue:
    """Tools and commands that are known."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._tools = {
            name: deed for deed in ("exploring", "producing", "verifying", "planning") for name in data[deed]
        }
        self._verbs = {verb: Deed(deed) for deed, verbs in data["verbs"].items() for verb in verbs}
        self._shells = frozenset(data["shell"])
        self._editors = frozenset(data["editor"])
        self._command_arguments = tuple(data["arguments"]["command"])
        commands = data["commands"]
        self._commands = {
            name: Deed(deed) for deed in ("exploring", "producing", "verifying") for name in commands[deed]
        }
        self._wrappers = frozenset(commands["wrappers"])
        self._valued = frozenset(commands["wrappers_with_value"])
        self._pairs = frozenset(commands["pairs"])
        self._pythons = frozenset(commands["pythons"])

    def runs_commands(self, name: str) -> bool:
        """Whether a tool runs whatever command it is given, so that its result is a program's output."""
        return _plain(name) in self._shells

    def deed(self, name: str, arguments: str) -> Deed:
        """What a call of this function with these arguments (JSON text, perhaps broken) does."""
        plain = _plain(name)
        if plain in self._editors:
            command = self._command(arguments)
            return Deed.EXPLORING if command.startswith("view") else Deed.PRODUCING
        if plain in self._shells:
            return self.command(self._command(arguments))
        if plain in self._tools:
            return Deed(self._tools[plain])
        snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", _last(name)).lower()
        first = re.split(r"[_\-. ]", snake, maxsplit=1)[0]
        return self._verbs.get(first, Deed.OTHER)

    def command(self, command: str) -> Deed:
        """What a shell command does, by the first words of its parts: verifying before producing before exploring."""
        found = Deed.OTHER
        if command.lstrip().startswith("*** Begin Patch"):
            return Deed.PRODUCING
        if _WRITES.search(command):
            found = Deed.PRODUCING
        for part in _SEPARATOR.split(command[:_ARGUMENTS])[:40]:
            deed = self._part(part.split())
            if deed is Deed.VERIFYING:
                return deed
            if deed is Deed.PRODUCING or (deed is Deed.EXPLORING and found is Deed.OTHER):
                found = deed
        return found

    def _part(self, found: list[str]) -> Deed:
        while found:
            if " ".join(found[:2]) in self._pairs or found[0] in self._valued:
                found = found[2:]
            elif (
                (found[0] in self._wrappers and " ".join(found[:2]) not in self._commands and len(found) > 1)
                or _ASSIGNMENT.match(found[0])
                or (found[0].startswith("-") and found[0] != "-m")
            ):
                found = found[1:]
            else:
                break
        if not found:
            return Deed.OTHER
        first = found[0].rsplit("/", 1)[-1] if not found[0].startswith("./") else found[0]
        if first in self._pythons:
            rest = [word for word in found[1:] if word == "-m" or not word.startswith("-")]
            script = rest[0].rsplit("/", 1)[-1] if rest else ""
            keys = [" ".join(rest[:2]), " ".join([script, *rest[1:2]]), script]
            if deed := next((self._commands[key] for key in keys if key in self._commands), None):
                return deed
            return Deed.VERIFYING if script.startswith("test_") or script.endswith("_test.py") else Deed.OTHER
        for key in (" ".join([first, *found[1:3]]), " ".join([first, *found[1:2]]), first):
            if key in self._commands:
                return self._commands[key]
        return Deed.VERIFYING if re.fullmatch(r"\./(?:.*/)?(?:run_?)?tests?(?:\.\w+)?", first) else Deed.OTHER

    def _command(self, arguments: str) -> str:
        """The command in a call's arguments, unwrapped from `bash -lc`; as much as can be read of broken ones."""
        try:
            given = json.loads(arguments) if len(arguments) <= 4 * _ARGUMENTS else None
        except ValueError:
            given = None
        except RecursionError:
            return ""
        if isinstance(given, dict):
            given = next((given[name] for name in self._command_arguments if name in given), "")
        elif given is None:
            start = _MESSAGE.search(arguments[:_ARGUMENTS])
            given = start[1].replace("\\n", "\n").replace('\\"', '"') if start else arguments[:_ARGUMENTS]
        if isinstance(given, list):
            words = [str(word) for word in given[:50]]
            return words[2] if len(words) > 2 and words[1] in ("-lc", "-c", "-ic") else " ".join(words)
        text = str(given)
        wrapped = re.match(r"(?:\S*/)?(?:ba|z)?sh\s+-l?c\s+", text)
        if wrapped:
            try:
                return (shlex.split(text[wrapped.end() : _ARGUMENTS]) or [""])[0]
            except ValueError:
                return text[wrapped.end() :]
        return text


def _last(name: str) -> str:
    """A function's name without the server that offers it: mcp__files__read_file, files.read_file."""
    return re.split(r"__|[.:/]", name[-128:])[-1]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _last(name).lower())


@cache
def catalogue() -> Catalogue:
    """The one of this package."""
    return Catalogue(tomllib.loads((resources.files(__package__) / "tools.toml").read_text("utf-8")))
