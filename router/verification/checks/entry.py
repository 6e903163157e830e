"""The one function that the sandbox calls; its imports are what every worker holds ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.verification.check import Check
from router.verification.checks import arithmetic, diff, schema, shell, sql, syntax, unit_tests
from router.verification.registry import VERIFIERS, validate
from router.verification.result import BadCheck, Result, sentence, undecided

CHECKS: dict[str, Callable[[str, Any], Result]] = {
    "python": syntax.python,
    "json": syntax.json_value,
    "toml": syntax.toml,
    "yaml": syntax.yaml_documents,
    "sql": sql.statements,
    "shell": shell.script,
    "tests": unit_tests.run,
    "arithmetic": arithmetic.value,
    "schema": schema.conforms,
    "diff": diff.applies,
    "tool_call": schema.calls,
}
assert CHECKS.keys() == VERIFIERS.keys()


def run(payload: dict[str, Any]) -> dict[str, str]:
    """Sandbox entry. `payload`: {name, arguments, answer, token}; returns {verdict, reason, token} or {refused, token}.

    The token comes back, so that what the answer's code writes into the report of its call is no verdict.
    """
    name, token = payload["name"], payload["token"]
    try:
        result = CHECKS[name](payload["answer"], validate(Check(name, payload["arguments"])))
    except BadCheck as error:
        return {"refused": sentence(str(error)), "token": token}
    except (RecursionError, MemoryError):
        result = undecided("It is nested too deeply, or too large, to be checked.")
    return {"verdict": result.verdict.value, "reason": result.reason, "token": token}
