"""The verifiers by name: what each needs, and what it can and cannot say.

A new one is a struct of arguments here, a line in `VERIFIERS`, and a function in `router.verification.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from router.verification.check import Check
from router.verification.result import BadCheck

MAX_ARGUMENT_CHARACTERS = 2_000_000  # of all texts in a check's arguments


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a verifier that needs nothing but the answer."""

    def check(self) -> None:
        """Raises `BadCheck` where a value makes no sense; must be cheap."""


class Json(Arguments, frozen=True):
    """Of `json`."""

    bare: bool = False  # the whole answer must be it; or else it may stand in a fence or in prose


class Schema(Arguments, frozen=True):
    """Of `schema`."""

    schema: dict[str, Any] | bool  # JSON Schema; references must stay inside it
    bare: bool = False  # as for `json`


class Sql(Arguments, frozen=True):
    """Of `sql`."""

    dialect: str = ""  # as sqlglot names it: postgres, mysql, sqlite, ...; empty = any


class Arithmetic(Arguments, frozen=True):
    """Of `arithmetic`."""

    expression: str  # numbers, + - * / // % ** and parentheses, as people or Python write them

    def check(self) -> None:
        if not self.expression.strip() or len(self.expression) > 1000:
            raise BadCheck("arithmetic: the expression must have 1 to 1000 characters")


class Diff(Arguments, frozen=True):
    """Of `diff`."""

    files: dict[str, str]  # text by path


class ToolCall(Arguments, frozen=True):
    """Of `tool_call`."""

    tools: dict[str, dict[str, Any]]  # JSON schema of the parameters by function


class Example(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a program is given on standard input, and must write to standard output."""

    input: str
    output: str


class Tests(Arguments, frozen=True):
    """Of `tests`: exactly one of `code`, `subject` and `examples`."""

    code: str = ""  # tests that the answer's code must pass: functions test_*, unittest, asserts, or check(candidate)
    subject: str = ""  # code that the answer's tests must pass on
    examples: tuple[Example, ...] = ()  # the answer is a program
    entry: str = ""  # name of the function that check(candidate) gets

    def check(self) -> None:
        if (bool(self.code.strip()) + bool(self.subject.strip()) + bool(self.examples)) != 1:
            raise BadCheck("tests: exactly one of code, subject and examples must be given")
        if self.entry and not self.entry.isidentifier():
            raise BadCheck("tests: entry must be the name of a function")
        if len(self.examples) > 100:
            raise BadCheck("tests: at most 100 examples")


@dataclass(frozen=True)
class Verifier:
    """One verifier as others see it."""

    arguments: type[Arguments]
    processes: int = 0  # that it starts beside itself, where the sandbox can bound them


# Beside each: what it means that an answer passes, and what cannot be seen.
VERIFIERS: dict[str, Verifier] = {
    "python": Verifier(Arguments),  # every Python block compiles, by this interpreter's version; nothing is run
    "json": Verifier(Json),  # it is JSON as RFC 8259 has it; nothing about its contents
    "toml": Verifier(Arguments),  # it is TOML 1.0; nothing about its contents
    "yaml": Verifier(Arguments),  # it is YAML 1.1 with every alias defined; tags and types are not looked at
    "sql": Verifier(Sql),  # every statement parses; whether tables and columns exist is not known
    "shell": Verifier(Arguments, processes=1),  # bash can parse it; whether the commands exist is not known
    "tests": Verifier(Tests),  # the tests ran and passed; code that inspects its own process could still forge that
    "arithmetic": Verifier(Arithmetic),  # the answer's final number is the value, rounded to the decimals it shows
    "schema": Verifier(Schema),  # the JSON conforms to the schema; `format` is not looked at
    "diff": Verifier(Diff),  # every hunk or search block applies to the files; what the change does is not known
    "tool_call": Verifier(ToolCall),  # each call names a function on offer, with arguments that conform to its schema
}


def validate(check: Check) -> Arguments:
    """The arguments of a check. Raises `BadCheck`; what only the verifier itself can see comes when it runs."""
    verifier = VERIFIERS.get(check.name)
    if verifier is None:
        raise BadCheck(f"there is no verifier {check.name[:40]!r}; there are {', '.join(VERIFIERS)}")
    try:
        arguments = msgspec.convert(check.arguments, verifier.arguments)
        size = len(msgspec.json.encode(check.arguments))
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise BadCheck(f"{check.name}: {str(error)[:200]}") from None
    if size > MAX_ARGUMENT_CHARACTERS:
        raise BadCheck(f"{check.name}: arguments of {size} bytes, more than {MAX_ARGUMENT_CHARACTERS}")
    arguments.check()
    return arguments
