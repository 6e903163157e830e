"""Syntax of SQL."""

from __future__ import annotations

import logging
import re

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel, SqlglotError

from contracts.routing import Verdict
from router.verification import answers
from router.verification.registry import Sql
from router.verification.result import BadCheck, Result, failed, passed, undecided

SQL = frozenset(
    {"sql", "postgres", "postgresql", "mysql", "sqlite", "tsql", "plsql", "bigquery", "snowflake", "duckdb"}
)
ANY = ("", "postgres", "mysql", "sqlite", "tsql", "oracle", "bigquery", "snowflake", "duckdb", "clickhouse", "spark")
_STARTS = re.compile(
    r"(?:\s|--[^\n]*\n|/\*(?:[^*]|\*(?!/))*+\*/|\()*"
    r"(?:select|with|insert|update|delete|create|alter|drop|merge|values|begin|truncate|explain|grant|set)\b",
    re.IGNORECASE,
)
# what procedural dialects and psql add, of which the parser knows a part
_HALF_KNOWN = re.compile(
    r"\b(?:create|alter|drop)\s+(?:or\s+replace\s+)?(?:\w+\s+)?"
    r"(?:function|procedure|operator|aggregate|type|trigger|package|policy|rule|cast|event|extension)\b"
    r"|^[ \t]*(?:delimiter\b|\\\w|declare\b|begin\s+\w|do\s+\$|if\b|while\b)",
    re.IGNORECASE | re.MULTILINE,
)
logging.getLogger("sqlglot").setLevel(logging.CRITICAL)  # it warns of what it does not know; the verdict says it


def statements(answer: str, arguments: Sql) -> Result:
    """Each statement parses in the dialect; without one, in any of the common dialects."""
    if arguments.dialect and arguments.dialect not in sqlglot.Dialects._value2member_map_:
        raise BadCheck(f"sql: there is no dialect {arguments.dialect[:40]!r}")
    found = answers.code(answer, SQL)
    text = ";\n".join(block.text for block in found) if found else answers.plain(answer) or ""
    if not found and not _STARTS.match(text):
        return undecided("There is no SQL in the answer.")
    dialects = (arguments.dialect,) if arguments.dialect else ANY
    results = []
    for dialect in dialects:
        results.append(_parsed(text, dialect))
        if results[-1] == passed():
            return results[-1]
    undecidable = next((result for result in results if result.verdict is Verdict.UNDECIDED), None)
    return undecidable or results[0]


def _parsed(text: str, dialect: str) -> Result:
    try:
        parsed = sqlglot.parse(text, dialect, error_level=ErrorLevel.RAISE)
    except SqlglotError as error:
        if _HALF_KNOWN.search(text):
            return undecided("It holds a statement that this check does not know.")
        return failed(_first(error))
    if not any(parsed):
        return failed("There is no SQL statement in the answer.")
    if any(isinstance(tree, exp.Command | exp.Alias | exp.Column) for tree in parsed):
        return undecided("It holds a statement that this check does not know.")
    return passed()


def _first(error: SqlglotError) -> str:
    details = getattr(error, "errors", None)
    if not details:
        return f"The SQL does not parse: {str(error)[:200]}"
    first = details[0]
    what = first["description"].partition(" missing for ")[0].replace("Required keyword:", "missing")
    return f"The SQL does not parse: {what} near {first['highlight']!r} (line {first['line']})."
