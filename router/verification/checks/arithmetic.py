"""Arithmetic, exact and bounded."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import islice

from infra.grading import extract, numbers
from router.verification import answers
from router.verification.registry import Arithmetic
from router.verification.result import BadCheck, Result, failed, passed, undecided

MAX_BITS = 50_000  # of a numerator or denominator; some fifteen thousand digits
MAX_NUMBERS = 1000  # of an answer that are looked at
_NUMBER = re.compile(r"[-−]?\d{1,400}(?:,\d{3}){0,20}(?:\.\d{1,100})?")
_WRITTEN = {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "{": "(", "}": ")", "[": "(", "]": ")"}
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


def value(answer: str, arguments: Arithmetic) -> Result:
    """The answer's final number against the expression's value; undecided where that stands elsewhere in it."""
    exact = evaluated(arguments.expression)
    found = answers.number(answer)
    if found is None:
        return failed("There is no number in the answer.")
    if _is(found, exact):
        return passed()
    written = islice(_NUMBER.finditer(extract.without_reasoning(answer)), MAX_NUMBERS)
    if any(_is(number, exact) for match in written if (number := numbers.parse(match.group()))):
        return undecided("The answer writes the right value, but another number last.")
    return failed(f"{arguments.expression} is {_shown(exact)}, not {_shown(found.value)}.")


def evaluated(expression: str) -> Fraction:
    """The exact value. Raises `BadCheck` where the expression is none, or its value too large."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression.strip().rstrip("=? "))
    for written, meant in _WRITTEN.items():
        text = text.replace(written, meant)
    try:
        return _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise BadCheck(f"arithmetic: {expression[:80]!r} cannot be evaluated ({error})") from None


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            return -_evaluate(operand) if isinstance(sign, ast.USub) else _evaluate(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_evaluate(left), _evaluate(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_evaluate(left), _evaluate(right)))
    raise ValueError("only numbers, + - * / // % ** and parentheses")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent that is not whole")
    if base not in (0, 1, -1) and _bits(base) * abs(exponent) > MAX_BITS:
        raise ValueError("a power that is too large")
    return Fraction(base ** int(exponent))


def _bounded(number: Fraction) -> Fraction:
    if _bits(number) > MAX_BITS:
        raise ValueError("a value that is too large")
    return number


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _is(found: numbers.Number, exact: Fraction) -> bool:
    return numbers.same(found, numbers.Number(exact)) or _rounded(found.value, exact)


def _rounded(found: Fraction, exact: Fraction) -> bool:
    """Whether `found` is `exact` to as many decimals as it shows, two at least."""
    places = next((places for places in range(2, 31) if (found * 10**places).denominator == 1), None)
    return places is not None and exact.denominator != 1 and abs(found - exact) * 2 * 10**places <= 1


def _shown(number: Fraction) -> str:
    if number.denominator == 1 and _bits(number) < 400:
        return str(number.numerator)
    return f"about {float(number):.10g}" if _bits(number) < 900 else "another number"
