"""The tests that a module declares: test functions, unittest's and pytest's classes, and HumanEval's `check`."""

from __future__ import annotations

import ast
import asyncio
import inspect
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from router.verification.checks.pytest_subset import Unsupported, arguments_of


@dataclass(frozen=True)
class Collected:
    """One test; `run` returns when it has passed, and raises otherwise."""

    name: str
    run: Callable[[], Any]


CHECK = "check"  # HumanEval's name for the function that is given the one to test
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def declared(tree: ast.Module) -> bool:
    """Whether a module's own text declares any test, asserts outside of functions included."""
    return asserts_when_executed(tree) or bool(_tests(tree))


def asserts_when_executed(tree: ast.Module) -> bool:
    """Whether a module tests by being executed: asserts outside of functions, or a call of its own `check`."""
    outside = [node for node in tree.body if not isinstance(node, _NAMED)]
    return any(isinstance(inner, ast.Assert) or _calls_check(inner) for node in outside for inner in ast.walk(node))


def _calls_check(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == CHECK


def _tests(tree: ast.Module) -> list[str]:
    """Names of a module's tests; its `check` is one where it has no others and does not call it itself."""
    names = list(dict.fromkeys(node.name for node in tree.body if isinstance(node, _NAMED) and _is_test(node)))
    if not names and not asserts_when_executed(tree):
        names = [CHECK for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == CHECK][:1]
    return names


def _is_test(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name.startswith("test")
    return isinstance(node, ast.ClassDef) and (
        node.name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in node.bases)
    )


def collect(tree: ast.Module, namespace: dict[str, Any], entry: str) -> Iterator[Collected]:
    """The tests of an executed module, in order: only what its own text declares, never what the tested code brings."""
    for name in _tests(tree):
        found = namespace.get(name)
        if name == CHECK:
            yield Collected(name, partial(_check, found, namespace, entry))
        elif isinstance(found, type) and issubclass(found, unittest.TestCase):
            for method in unittest.defaultTestLoader.getTestCaseNames(found):
                yield Collected(f"{name}.{method}", partial(_case, found, method))
        elif isinstance(found, type):
            for method in [each for each in vars(found) if each.startswith("test")]:
                yield from _cases(f"{name}.{method}", partial(_bound, found, method), namespace)
        else:
            yield from _cases(name, partial(namespace.__getitem__, name), namespace)


def _bound(kind: type, method: str) -> Any:
    """The method of a new instance, set up."""
    instance = kind()
    setup = getattr(instance, "setup_method", None)
    if setup is not None:
        setup()
    return getattr(instance, method)


def _cases(name: str, make: Callable[[], Any], namespace: dict[str, Any]) -> Iterator[Collected]:
    for case in getattr(make(), "cases", [{}]):
        yield Collected(name, partial(_function, make, case, namespace))


def _function(make: Callable[[], Any], case: dict[str, Any], namespace: dict[str, Any]) -> None:
    test = make()
    with ExitStack() as stack:
        result = test(**arguments_of(test, namespace, case, stack))
        if inspect.iscoroutine(result):
            asyncio.run(result)


def _check(function: Any, namespace: dict[str, Any], entry: str) -> None:
    parameters = len(inspect.signature(function).parameters)
    if not parameters:
        function()
    elif not entry:
        raise Unsupported("the name of the function that check() is given")
    elif entry not in namespace:
        raise NameError(f"there is no function {entry}")
    else:
        function(namespace[entry])


def _case(kind: type[unittest.TestCase], method: str) -> None:
    result = unittest.TestResult()
    kind(method).run(result)
    if result.skipped:
        raise unittest.SkipTest("")
    failures = [*result.failures, *result.errors]
    if failures or result.unexpectedSuccesses or not result.testsRun:
        last = failures[0][1].strip().split("\n")[-1] if failures else "it was expected to fail"
        raise AssertionError(last[:300])
