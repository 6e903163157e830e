"""Unit tests that must run and pass, in the sandbox: the answer's code against given tests, or the other way round.

What does not count as passing: no test, an exit before the end, objects that equal anything, a changed test framework,
another `assert` or other builtins, bytes written into the sandbox's report. Code that searches its own process for the
verifier can still forge a verdict, as it could in any runner that shares its interpreter.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import sys
import types
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from router.verification import answers
from router.verification.checks import pytest_subset
from router.verification.checks.collect import Collected, asserts_when_executed, collect, declared
from router.verification.checks.equality import Equality, Trick
from router.verification.checks.programs import run_examples
from router.verification.checks.syntax import PYTHON, python_error
from router.verification.registry import Tests
from router.verification.result import BadCheck, Result, failed, passed, sentence, undecided

_CANDIDATE, _TESTS = "solution", "tests_of_solution"
_EXITS = ("_exit", "abort", "execv", "execve")


class Left(SystemExit):
    """The code wanted to end the process, past `finally` and `atexit`."""


def run(answer: str, arguments: Tests) -> Result:
    """The verdict of the tests. Raises `BadCheck` where given tests or the given subject are none."""
    source = _code(answer)
    if source is None:
        return failed("There is no Python code in the answer.")
    if error := python_error(source):
        return failed(error)
    given = arguments.code or arguments.subject
    if given and (error := python_error(given)):
        raise BadCheck(f"tests: {error}")
    with _guarded():
        if arguments.examples:
            return run_examples(source, arguments.examples)
        if arguments.code and not declared(ast.parse(arguments.code)):
            raise BadCheck("tests: the code holds no test")
        candidate, tests = (source, arguments.code) if arguments.code else (arguments.subject, source)
        return _run(candidate, tests, arguments.entry)


def _code(answer: str) -> str | None:
    """The answer's Python blocks as one program; those that define nothing are left out where others do."""
    found = [block.text for block in answers.code(answer, PYTHON)]
    if not found:
        text = answers.plain(answer)
        return text if text and not python_error(text) and _defines(text) else None
    return "\n\n".join([text for text in found if _defines(text)] or found)


def _defines(text: str) -> bool:
    if python_error(text):
        return True  # it must not be left out because it is broken
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assert)
    return any(isinstance(node, kinds) for node in ast.parse(text).body)


@contextmanager
def _guarded() -> Iterator[None]:
    """Exits raise, and our own modules are out of sight, while the code runs."""

    def leave(*status: Any) -> NoReturn:
        raise Left(*(value for value in status if isinstance(value, int)))

    kept = {name: getattr(os, name) for name in _EXITS}
    posix = sys.modules[os.name]
    for name in _EXITS:
        setattr(os, name, leave)
        setattr(posix, name, leave)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("router", "infra", "contracts")]:
        del sys.modules[name]
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(os, name, function)


def _run(candidate: str, tests: str, entry: str) -> Result:
    clean = dict(vars(builtins))
    equality = Equality()
    equality.replace_assert_equal()
    framework = dict(vars(unittest.TestCase))
    tree = equality.replaced(ast.parse(tests))
    namespace: dict[str, Any] = {"__name__": _TESTS, "__builtins__": clean, equality.NAME: equality}
    stage, ran = "when it is loaded", 0
    try:
        module = _module(candidate)
        _alias(module, tree)
        sys.settrace(None)
        sys.setprofile(None)
        namespace = {k: v for k, v in vars(module).items() if not k.startswith("__")} | namespace
        stage = "in the tests' own code"
        exec(compile(tree, "<tests>", "exec", dont_inherit=True), namespace)
        ran += asserts_when_executed(tree)
        for each in collect(tree, namespace, entry):
            stage = f"in {each.name}"
            ran += _one(each)
    except Trick as error:
        return failed(f"The code pretends to be right: {error}.")
    except BaseException as error:  # whatever hostile code raises, SystemExit included
        return _reason(error, stage, equality.unequal)
    if vars(unittest.TestCase) != framework:
        return failed("The code changes the test framework.")
    if not ran:
        return failed("No test ran.")
    if not _asserts(tree):
        return failed("The tests assert nothing.")
    return passed(f"{ran} tests passed.")


def _module(candidate: str) -> types.ModuleType:
    """The code under test as an executed module."""
    module = types.ModuleType(_CANDIDATE)
    sys.modules[_CANDIDATE] = module
    sys.modules["pytest"] = pytest_subset.module()
    unittest.main = lambda *_, **__: None  # type: ignore[assignment]  # the tests are run here
    module.__dict__["__builtins__"] = dict(vars(builtins))
    exec(compile(candidate, "<code>", "exec", dont_inherit=True), module.__dict__)
    return module


def _alias(module: types.ModuleType, tests: ast.Module) -> None:
    """Where tests take names that the module has from one that nobody knows, they mean this module."""
    used: dict[str, set[str]] = {}
    for node in ast.walk(tests):
        if isinstance(node, ast.ImportFrom) and node.module:
            used.setdefault(node.module, set()).update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name
                uses = (each for each in ast.walk(tests) if isinstance(each, ast.Attribute))
                found = {each.attr for each in uses if ast.unparse(each.value) == name}
                used.setdefault(alias.name, set()).update(found)
    for name, taken in used.items():
        if (taken & vars(module).keys() or "*" in taken) and not _exists(name):
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                sys.modules[".".join(parts[:end])] = module


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _one(test: Collected) -> int:
    """Runs one test; 1, or 0 if it skipped itself."""
    try:
        test.run()
    except (pytest_subset.Skipped, unittest.SkipTest):
        return 0
    return 1


def _reason(error: BaseException, stage: str, unequal: str) -> Result:
    if isinstance(error, pytest_subset.Unsupported):
        return undecided(f"The tests need {error}, which this check does not offer.")
    if isinstance(error, SystemExit):
        return failed(f"The code ended the process {stage}, before all tests had run.")
    if isinstance(error, ModuleNotFoundError):
        return undecided(f"The code needs the module {error.name}, which is not there.")
    if isinstance(error, MemoryError):
        return undecided(f"The code ran out of memory {stage}.")
    if isinstance(error, PermissionError | BlockingIOError):
        return undecided(f"The code needs what the sandbox does not allow ({stage}: {_text(error)}).")
    line = _line(error)
    where = f"{stage}{f' (line {line} of the tests)' if line else ''}"
    text = _text(error) or (unequal if isinstance(error, AssertionError) else "")
    return failed(f"The code fails {where}: {type(error).__name__}{f': {text}' if text else ''}.")


def _text(error: BaseException) -> str:
    try:
        return sentence(str(error))[:200]
    except BaseException:  # of a class of the code's own
        return ""


def _line(error: BaseException) -> int | None:
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<tests>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _asserts(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Attribute) and (node.attr.startswith("assert") or node.attr in ("raises", "fail")))
        for node in ast.walk(tree)
    )
