"""How an answer can be checked, read from what is asked. Pure.

A syntax check tells a broken answer from a whole one, not a wrong one from a right one: it is given only to what is
mechanical. Tests, arithmetic and schemas judge the answer itself, so they are given to whatever brings them along.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from contracts.routing import Demand
from router.chat import ChatRequest
from router.decomposition.plan import Kind
from router.decomposition.text import Block, parts
from router.verification.check import Check

_LARGEST = 20_000  # characters of a text that tests, files and expressions are looked for in

_EXPRESSION = re.compile(
    r"(?:^|[\s:：=`(])((?:\(\s*)*-?\d[\d.,]*(?:\s*(?:\*\*|[-+*/×÷·^%])\s*(?:\(\s*)*-?\d[\d.,]*(?:\s*\))*)+)\s*(?=$|[\s?？.=!`。])"
)
_ASKS_VALUE = re.compile(
    r"^\W*(?:(?:please\s+)?(?:what(?:'s| is)|calculate|compute|evaluate|solve|how much is)|was ist|wie ?viel ist|"
    r"berechne|combien fait|calcule[rz]?|cuánto es|calcula|quanto é|сколько будет|вычисли|посчитай|计算|求值)?"
    r"(?:\s*(?:the )?(?:value|result) of)?[\s:：]*$",
    re.IGNORECASE,
)
_LANGUAGES = (
    ("json", re.compile(r"\bjson\b(?! ?schema)", re.IGNORECASE)),
    ("toml", re.compile(r"\btoml\b", re.IGNORECASE)),
    (
        "yaml",
        re.compile(
            r"\bya?ml\b|github actions? workflow|docker[- ]compose|kubernetes manifest|\bk8s manifest", re.IGNORECASE
        ),
    ),
    ("sql", re.compile(r"\bsql\b", re.IGNORECASE)),
    ("shell", re.compile(r"\b(?:bash|shell)\b(?! (?:game|company))", re.IGNORECASE)),
    ("python", re.compile(r"\bpython\b|\bpandas\b|\bdjango\b|\bfastapi\b|\bpydantic\b|\bnumpy\b", re.IGNORECASE)),
)
_OTHER_LANGUAGE = re.compile(
    r"\b(?:javascript|typescript|java|rust|go(?:lang)?|kotlin|swift|ruby|php|scala|haskell|elixir|perl|lua|react|vue|html|css|"
    r"terraform|dockerfile|makefile|latex|matlab|julia)\b|c\+\+|c#",
    re.IGNORECASE,
)
_INTO = re.compile(
    r"\b(?:as|in|into|to|valid|return|output|a|en|als|nach|em)\s+(?:a\s+|valid\s+|pure\s+|only\s+)?(json|toml|ya?ml|sql)\b",
    re.IGNORECASE,
)
_DIFF = re.compile(r"\b(?:unified diff|as a (?:diff|patch)|a patch\b|git diff format|diff format)", re.IGNORECASE)
_WRITES = frozenset({Kind.CODE, Kind.TESTS, Kind.EDIT, Kind.SYNTAX, Kind.EXTRACTION, Kind.WRITING, Kind.DEBUGGING})
FILE_NAME = re.compile(
    r"(?:^|[\s`*#:/(])((?:[\w.-]+/){0,10}[\w-]{1,80}(?:\.[\w-]{1,40}){0,2}\.[A-Za-z][A-Za-z0-9]{0,7})(?=$|[\s`*:,)])"
)


def whole(request: ChatRequest, text: str, kind: Kind, demand: Demand) -> Check | None:
    """What can check the answer to a whole request: its response format first, then what its text asks for."""
    if request.schema is not None:
        return Check("schema", {"schema": request.schema, "bare": True})
    if request.json_mode:
        return Check("json", {"bare": True})
    return None if request.choices > 1 else asked(text, kind, demand)


def calls(request: ChatRequest) -> Check | None:
    """Whether an agent's next calls are calls of functions on offer, with arguments that conform to their schemas."""
    tools: dict[str, Any] = {}
    offered = request.body.get("tools")
    for each in offered if isinstance(offered, list) else []:
        function = each.get("function") if isinstance(each, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            tools[function["name"]] = schema if isinstance(schema, dict) else {}
    return Check("tool_call", {"tools": tools}) if tools else None


def asked(text: str, kind: Kind, demand: Demand) -> Check | None:
    """What can check the answer to this request or part of one; None = only its reader can."""
    if len(text) > _LARGEST:
        return None
    prose, blocks = parts(text)
    if kind in (Kind.CODE, Kind.DEBUGGING, Kind.EDIT, Kind.TESTS) and (found := _tests(blocks, kind)):
        return found
    if kind in (Kind.ARITHMETIC, Kind.QUESTION) and not blocks and (found := _arithmetic(prose)):
        return found
    if _DIFF.search(prose) and (files := named_files(blocks)):
        return Check("diff", {"files": files})
    return _syntax(prose, blocks, kind) if demand is Demand.MECHANICAL else None


def named_files(blocks: Sequence[Block]) -> dict[str, str]:
    """Fenced blocks that a file name introduces, by that name; empty when two bear the same."""
    files: dict[str, str] = {}
    for block in blocks:
        name = file_name(block)
        if name:
            if name in files:
                return {}
            files[name] = block.text + "\n"
    return files


def file_name(block: Block) -> str:
    """The file name on a block's opening fence or on the line before it; empty = none."""
    for text in (block.info, block.before if len(block.before) <= 160 else ""):
        found = FILE_NAME.findall(text)
        if len(found) == 1:
            return found[0]
    return ""


def _tests(blocks: Sequence[Block], kind: Kind) -> Check | None:
    """Tests in the request for code that is yet to be written or mended, or code that tests are asked for."""
    for block in blocks:
        if block.info.lower() not in ("", "python", "py", "python3"):
            continue
        try:
            tree = ast.parse(block.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        named = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        testing = [each for each in named if each.name.lower().startswith("test") or "TestCase" in _bases(each)]
        if kind is Kind.TESTS:
            if named and not testing and len(blocks) == 1:
                return Check("tests", {"subject": block.text})
        # The tests alone: a block that also holds the code to be changed would judge the old code, not the answer.
        elif len(named) == len(testing) and (testing or any(isinstance(each, ast.Assert) for each in tree.body)):
            return Check("tests", {"code": block.text})
    return None


def _bases(node: ast.AST) -> str:
    return " ".join(map(ast.unparse, node.bases)) if isinstance(node, ast.ClassDef) else ""


def _arithmetic(prose: str) -> Check | None:
    """An expression of numbers and nothing else but the words that ask for its value."""
    text = prose.strip()
    if len(text) > 200:
        return None
    found = _EXPRESSION.search(text)
    if not found:
        return None
    around = f"{text[: found.start(1)]} {text[found.end(1) :].strip(' ?？.=!`。')}"
    if not _ASKS_VALUE.match(around.strip()):
        return None
    expression = re.sub(r"(?<=\d),(?=\d{3}\b)", "", found[1]).strip(" .")
    if "," in expression or expression.count("(") != expression.count(")") or re.fullmatch(r"\d+(?:-\d+)+", expression):
        return None
    for sign, plain in (("×", "*"), ("·", "*"), ("÷", "/"), ("^", "**")):
        expression = expression.replace(sign, plain)
    return Check("arithmetic", {"expression": expression})


def _syntax(prose: str, blocks: Sequence[Block], kind: Kind) -> Check | None:
    """The language of code or data that the answer consists of, where one and only one is named."""
    if kind not in _WRITES:
        return None
    into = {found.lower().replace("yml", "yaml") for found in _INTO.findall(prose)}
    if len(into) == 1 and kind in (Kind.EXTRACTION, Kind.EDIT, Kind.SYNTAX, Kind.WRITING, Kind.CODE):
        name = into.pop()
        if kind is not Kind.CODE or not re.search(
            r"\b(?:function|class|script|program|parser)\b", prose, re.IGNORECASE
        ):
            return Check(name)
    if kind in (Kind.EXTRACTION, Kind.WRITING) or _OTHER_LANGUAGE.search(prose):
        return None
    named = [name for name, pattern in _LANGUAGES if pattern.search(prose)]
    if not named:
        infos = {block.info.lower() for block in blocks}
        if kind in (Kind.EDIT, Kind.TESTS, Kind.SYNTAX) and infos in ({"python"}, {"py"}):
            named = ["python"]
    if "python" in named:
        return Check("python")  # a script that reads JSON or runs SQL is a script
    return Check(named[0]) if len(named) == 1 else None
