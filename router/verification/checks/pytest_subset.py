"""As much of pytest's interface as small tests use. Whatever else they ask for raises `Unsupported`."""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class Unsupported(BaseException):
    """The tests need something that is not here; says nothing about what they test."""


class Skipped(BaseException):
    """The test does not want to run."""


class _Raised:
    value: BaseException

    def match(self, pattern: str) -> bool:
        assert re.search(pattern, str(self.value)), f"{pattern!r} not found in {str(self.value)!r}"
        return True

    @property
    def type(self) -> type[BaseException]:
        return type(self.value)


@contextmanager
def _raises(expected: Any, match: str | None) -> Iterator[_Raised]:
    raised = _Raised()
    try:
        yield raised
    except expected as error:
        raised.value = error
        if match is not None:
            raised.match(match)
        return
    raise AssertionError(f"did not raise {getattr(expected, '__name__', expected)}")


def raises(expected: Any, *arguments: Any, match: str | None = None, **named: Any) -> Any:
    """A context manager; or, given a function and its arguments, calls it."""
    if not arguments:
        return _raises(expected, match)
    with _raises(expected, match) as raised:
        arguments[0](*arguments[1:], **named)
    return raised


class approx:
    """Equal to a number, or to a list or dictionary of them, within 1e-6 of it."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self._expected = expected
        self._tolerances = {"rel_tol": 1e-6 if rel is None and abs is None else rel or 0.0, "abs_tol": abs or 1e-12}

    def __eq__(self, other: object) -> bool:
        return self._close(self._expected, other)

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"

    __hash__ = None  # type: ignore[assignment]

    def _close(self, expected: Any, found: Any) -> bool:
        if isinstance(expected, dict):
            same = isinstance(found, dict) and found.keys() == expected.keys()
            return same and all(self._close(item, found[key]) for key, item in expected.items())
        if isinstance(expected, list | tuple):
            same = isinstance(found, list | tuple) and len(found) == len(expected)
            return same and all(map(self._close, expected, found))
        if isinstance(expected, int | float) and isinstance(found, int | float):
            return math.isclose(found, expected, **self._tolerances)
        return bool(expected == found)


def parametrize(names: str | list[str] | tuple[str, ...], rows: Any, **_: Any) -> Callable[[Any], Any]:
    """Runs the test once per row."""
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def mark(test: Any) -> Any:
        values = [getattr(row, "values", row) for row in rows]
        cases = [dict(zip(split, value if len(split) > 1 else (value,), strict=True)) for value in values]
        test.cases = [{**old, **new} for old in getattr(test, "cases", [{}]) for new in cases]
        return test

    return mark


def fixture(function: Any = None, **_: Any) -> Any:
    """A fixture of function scope, whatever scope it asks for."""
    if function is None:
        return lambda inner: fixture(inner)
    function.is_fixture = True
    return function


def skip(reason: str = "") -> None:
    """Leave the test."""
    raise Skipped(reason)


def fail(reason: str = "") -> None:
    """Fail the test."""
    raise AssertionError(reason)


@contextmanager
def _lasting(fixture: Iterator[Any]) -> Iterator[Any]:
    yield from fixture


def arguments_of(test: Any, namespace: dict[str, Any], given: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """What a test or a fixture is called with: `given`, and the fixtures it names, which end with `stack`."""
    found = {}
    for name, parameter in inspect.signature(test).parameters.items():
        if name in given:
            found[name] = given[name]
        elif getattr(namespace.get(name), "is_fixture", False):
            made = namespace[name](**arguments_of(namespace[name], namespace, given, stack))
            found[name] = stack.enter_context(_lasting(made)) if inspect.isgenerator(made) else made
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise Unsupported(f"the fixture {name}")
    return found


def module() -> types.ModuleType:
    """What `import pytest` gives."""
    made = types.ModuleType("pytest")
    made.__dict__.update(raises=raises, approx=approx, fixture=fixture, skip=skip, fail=fail)
    made.__dict__["mark"] = types.SimpleNamespace(parametrize=parametrize)

    def missing(name: str) -> Any:
        raise Unsupported(f"pytest.{name}") if not name.startswith("__") else AttributeError(name)

    made.__dict__["__getattr__"] = missing
    return made
