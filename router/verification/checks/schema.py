"""Conformity to JSON schemas: of answers, and of the arguments of tool calls."""

from __future__ import annotations

import json
import re
from typing import Any

import referencing
import referencing.exceptions
from jsonschema import exceptions, validators
from jsonschema.protocols import Validator

from router.verification import answers
from router.verification.checks.syntax import parse_json
from router.verification.registry import Schema, ToolCall
from router.verification.result import BadCheck, Result, failed, passed, together, undecided

_WRITTEN_CALL = re.compile(r"<tool_call>|<function[=_]|\[TOOL_CALLS\]|^\s*\{\s*\"(?:name|tool|function)\"\s*:")


def conforms(answer: str, arguments: Schema) -> Result:
    """The JSON in the answer against the schema."""
    validator = _validator(arguments.schema)
    text = answers.json_text(answer, bare=arguments.bare)
    if not text:
        return failed("There is no JSON in the answer.")
    return _judged(text, validator, "The answer")


def calls(answer: str, arguments: ToolCall) -> Result:
    """`answer`: the turn's tool calls as a JSON list, as OpenAI writes them; or the text of a turn without any."""
    on_offer = {name: _validator(parameters or {}) for name, parameters in arguments.tools.items()}
    turn = json.loads(answer)
    if not turn["calls"]:
        if _WRITTEN_CALL.search(turn["text"]):
            return failed("The tool call stands in the text of the answer; it must be made as a tool call.")
        return undecided("The answer calls no tool.")
    return together(_call(call, on_offer) for call in turn["calls"])


def _call(call: Any, on_offer: dict[str, Validator]) -> Result:
    if isinstance(call, dict) and call.get("type") == "custom":
        return undecided("It calls a custom tool, whose input is free text.")
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        return failed("A tool call has no function name.")
    if name not in on_offer:
        return failed(f"There is no tool {name[:60]!r}; there are {', '.join(on_offer)}.")
    text = function.get("arguments") or "{}"
    if not isinstance(text, str):
        return failed(f"The arguments of {name[:60]} must be JSON text.")
    result = _judged(text, on_offer[name], f"The arguments of {name[:60]}")
    if result == passed() and not isinstance(parse_json(text), dict):
        return failed(f"The arguments of {name[:60]} must be a JSON object.")
    return result


def _validator(schema: Any) -> Validator:
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except exceptions.SchemaError as error:
        raise BadCheck(f"the JSON schema is not valid: {error.message[:200]}") from None
    except RecursionError:
        raise BadCheck("the JSON schema is nested too deeply") from None
    return kind(schema, registry=referencing.Registry())  # an empty registry: nothing is ever fetched


def _judged(text: str, validator: Validator, what: str) -> Result:
    try:
        error = exceptions.best_match(validator.iter_errors(parse_json(text)))
    except json.JSONDecodeError as problem:
        return failed(f"{what} is not valid JSON: {problem}.")
    except ValueError:
        return undecided(f"{what} holds a number of more digits than this check reads.")
    except referencing.exceptions.Unresolvable as problem:
        raise BadCheck(f"the JSON schema refers to {str(problem.ref)[:100]!r}, which is not in it") from None
    except (re.error, exceptions.UnknownType) as problem:
        raise BadCheck(f"the JSON schema cannot be used: {str(problem)[:100]}") from None
    if error is None:
        return passed()
    return failed(f"{what} does not conform to the schema at {error.json_path[:100]}: {error.message[:200]}.")
