"""Syntax of SQL."""

from __future__ import annotations

import logging
import re

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel, SqlglotError

from router.cascade import answers
from router.cascade.registry import Sql
from router.cascade.result import BadCheck, Result, failed, passed, undecided

SQL = frozenset(
    {"sql", "postgres", "postgresql", "mysql", "sqlite", "tsql", "plsql", "bigquery", "snowflake", "duckdb"}
)
ANY = ("", "postgres", "mysql", "sqlite", "tsql", "oracle", "bigquery", "snowflake", "duckdb", "clickhouse", "spark")
_STARTS = re.compile(
    r"(?:\s|--[^\n]*\n|/\*(?:[^*]|\*(?!/))*+\*/|\()*"
    r"(?:select|with|insert|update|delete|create|alter|drop|merge|values|begin|truncate|explain|grant|set)\b",
    re.IGNORECASE,
)
logging.getLogger("sqlglot").setLevel(logging.CRITICAL)  # it warns of what it does not know; the verdict says it


def statements(answer: str, arguments: Sql) -> Result:
    """Each statement parses in the dialect; without one, in any of the common dialects."""
    if arguments.dialect and arguments.dialect not in sqlglot.Dialects._value2member_map_:
        raise BadCheck(f"sql: there is no dialect {arguments.dialect[:40]!r}")
    found = [block.text for block in answers.code(answer, SQL)]
    if not found:
        text = answers.plain(answer)
        if not text or not _STARTS.match(text):
            return undecided("There is no SQL in the answer.")
        found = [text]
    dialects = (arguments.dialect,) if arguments.dialect else ANY
    errors = []
    for dialect in dialects:
        try:
            parsed = [
                tree for text in found for tree in sqlglot.parse(text, read=dialect, error_level=ErrorLevel.RAISE)
            ]
        except SqlglotError as error:
            errors.append(_first(error))
            continue
        if not any(parsed):
            return failed("There is no SQL statement in the answer.")
        if any(isinstance(tree, exp.Command | exp.Alias | exp.Column) for tree in parsed):
            return undecided("It holds a statement that this check does not know.")
        return passed()
    return failed(errors[0])


def _first(error: SqlglotError) -> str:
    details = getattr(error, "errors", None)
    if not details:
        return f"The SQL does not parse: {str(error)[:200]}"
    first = details[0]
    return f"The SQL does not parse: {first['description']} near {first['highlight']!r} (line {first['line']})."
