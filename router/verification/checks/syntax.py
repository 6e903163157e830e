"""Syntax of Python, JSON, TOML and YAML. Nothing is executed or constructed beyond plain values."""

from __future__ import annotations

import ast
import json
import re
import textwrap
import tomllib
import warnings
from collections.abc import Callable
from typing import Any

import yaml

from router.verification import answers
from router.verification.registry import Arguments, Json
from router.verification.result import Result, failed, passed, together, undecided

PYTHON = frozenset({"python", "py", "python3", "py3"})
_LOOKS_LIKE_PYTHON = re.compile(r"(?:def|class|import|from|async|@|if|for|while|with|try|print)\b|#!|\w+\s*(?:=|\()")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is linear and fifty times as fast


def python(answer: str, _: Arguments) -> Result:
    """Each Python block compiles; without a fence, the answer as a whole, if it is code at all."""
    found = [block.text for block in answers.code(answer, PYTHON) if not block.text.lstrip().startswith(">>>")]
    if found:
        errors = [error for text in found if (error := python_error(text))]
        return failed(errors[0]) if errors else passed()
    text = answers.plain(answer)
    if not text or not _LOOKS_LIKE_PYTHON.match(text):
        return undecided("There is no Python code in the answer.")
    error = python_error(text)
    return failed(error) if error else passed()


def python_error(text: str) -> str:
    """Why a program does not compile, with the line; empty if it does. Raises `RecursionError` or `MemoryError`."""
    try:
        with warnings.catch_warnings(action="ignore"):
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            compile(textwrap.dedent(text), "<answer>", "exec", flags=flags, dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").strip()[:120]
        return f"The Python code does not compile: {error.msg} (line {error.lineno}{f': {line}' if line else ''})."
    except ValueError as error:  # null bytes, lone surrogates
        return f"The Python code does not compile: {error}."
    return ""


def json_value(answer: str, arguments: Json) -> Result:
    """The answer is, or holds, one JSON value."""
    text = answers.json_text(answer, bare=arguments.bare)
    if not text:
        return failed("There is no JSON in the answer.")
    return _parsed(text, parse_json, "JSON")


def parse_json(text: str) -> Any:
    """The value of a JSON text, by the letter of RFC 8259. Raises `json.JSONDecodeError`."""

    def refuse(name: str) -> None:
        raise json.JSONDecodeError(f"{name} is not JSON", text, max(text.find(name), 0))

    return json.loads(text, parse_constant=refuse)


def toml(answer: str, _: Arguments) -> Result:
    """The TOML blocks, or the answer as a whole."""
    found = [block.text for block in answers.code(answer, frozenset({"toml"}))]
    if not found:
        text = answers.plain(answer)
        if not text or not re.search(r"^[ \t]*(?:\[|[\w\"'.-]+[ \t]*=)", text, re.MULTILINE):
            return undecided("There is no TOML in the answer.")
        found = [text]
    return _each(found, tomllib.loads, "TOML")


def yaml_documents(answer: str, _: Arguments) -> Result:
    """The YAML blocks, or the answer as a whole, if it is a mapping or a list."""
    found = [block.text for block in answers.code(answer, frozenset({"yaml", "yml"}))]
    if found:
        return _each(found, _yaml_events, "YAML")
    text = answers.plain(answer)
    if not text or not re.match(r"---|- |[{\[%]|[\w\"'./-]+:(?:\s|$)|#", text):
        return undecided("There is no YAML in the answer.")
    return _parsed(text, _yaml_events, "YAML")


def _yaml_events(text: str) -> None:
    # events, not nodes: aliases are not followed, so that a few lines cannot stand for billions of values
    anchors: set[str] = set()
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.DocumentStartEvent):
            anchors.clear()
        elif isinstance(event, yaml.AliasEvent) and event.anchor not in anchors:
            line = getattr(event.start_mark, "line", 0) + 1
            raise ValueError(f"the alias *{str(event.anchor)[:40]} is not defined (line {line})")
        elif isinstance(event, yaml.NodeEvent) and event.anchor:
            anchors.add(event.anchor)


def _each(texts: list[str], parse: Callable[[str], object], name: str) -> Result:
    return together(_parsed(text, parse, name) for text in texts)


def _parsed(text: str, parse: Callable[[str], object], name: str) -> Result:
    try:
        parse(text)
    except yaml.MarkedYAMLError as error:
        line = getattr(error.problem_mark, "line", 0) + 1
        return failed(f"It is not valid {name}: {error.problem} (line {line}).")
    except ValueError as error:  # json's and tomllib's errors among them
        if "integer string conversion" in str(error):
            return undecided("It holds a number of more digits than this check reads.")
        return failed(f"It is not valid {name}: {error}.")
    except yaml.YAMLError as error:
        return failed(f"It is not valid {name}: {error}.")
    return passed()
