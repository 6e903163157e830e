"""`==` in tests: as Python has it, but not taken in by objects that equal anything, and able to say what differed."""

from __future__ import annotations

import ast
import unittest
from typing import Any
from unittest import mock

SHOWN = 60  # characters of a value


class Trick(BaseException):
    """The code pretends to be right."""


class Equality:
    """Called in place of `==`. `unequal` describes the last two values that were not equal."""

    NAME = "__equal__"

    def __init__(self) -> None:
        self.unequal = ""

    def __call__(self, left: Any, right: Any) -> Any:
        result = left == right
        if result is True:
            for side in (left, right):
                if _equals_anything(side):
                    raise Trick(f"a {type(side).__name__} equals anything")
        elif result is False:
            self.unequal = f"{_shown(left)} == {_shown(right)} does not hold"
        return result

    def replaced(self, tests: ast.Module) -> ast.Module:
        """The tests with `a == b` as a call of what their namespace holds under `NAME`."""
        return ast.fix_missing_locations(_Replaced().visit(tests))

    def replace_assert_equal(self) -> None:
        """unittest's `assertEqual` asks this as well; call it before any code of the answer's runs."""

        def assert_equal(case: unittest.TestCase, first: Any, second: Any, msg: Any = None) -> None:
            if not self(first, second):
                raise case.failureException(msg or self.unequal)

        unittest.TestCase._baseAssertEqual = assert_equal  # type: ignore[attr-defined]


class _Replaced(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
            return node
        function = ast.Name(Equality.NAME, ast.Load())
        return ast.copy_location(ast.Call(function, [node.left, *node.comparators], []), node)


def _equals_anything(value: Any) -> bool:
    if value is mock.ANY:
        return False
    try:
        return (value == _Nothing()) is True
    except Exception:  # it compares with its own kind alone
        return False


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # of a class of the code's own
        text = type(value).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


class _Nothing:
    """Equal to nothing but itself."""
