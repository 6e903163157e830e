"""Tables of outcomes: which language model answered which prompt well. CSV, JSON lines and JSON, also gzipped.

A row holds a prompt (`prompt`, `question`, `text`) and outcomes, each a boolean or a number from 0 to 1:

- wide: one column per model, named after it; `MODEL_price` columns beside them hold dollars per million tokens;
- nested: one column (`scores`, `outcomes`) that maps models to outcomes;
- long: a row per call, with `model`, `outcome` (`score`, `correct`, `passed`) and, where known, `price`;
- tiers: `expected_tier` (`tier`) instead of outcomes says how demanding the prompt is.

The files of a folder that tell of the same models are one table. `candidates.json` beside them maps models to their
`input_price`; the nearest LICENSE above is theirs. A row's `category` or `cluster_id`, or else its file, is its group.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from infra.errors import UserError
from router.policy.model import Matrix

PROMPTS = ("prompt", "question", "text")
NESTED = ("scores", "outcomes")
OUTCOMES = ("outcome", "score", "correct", "passed")
TIERS = ("expected_tier", "tier")
GROUPS = ("category", "cluster_id")
ENDINGS = (".csv", ".jsonl", ".json", ".csv.gz", ".jsonl.gz", ".json.gz")
PRICES = "candidates.json"
LARGEST = 1 << 30  # bytes of a file, unpacked
DEMANDS = ("SIMPLE", "MEDIUM", "COMPLEX", "REASONING")  # ascending
_WORDS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
PRICE = "_price"  # ending of the columns that hold them
_NAMED = {*PROMPTS, *NESTED, *OUTCOMES, *TIERS, *GROUPS, "model", "price", "id", "lang"}
csv.field_size_limit(LARGEST)


@dataclass
class Table:
    """Rows of one origin. Its lists have one entry per row."""

    name: str
    prompts: list[str] = field(default_factory=list)
    outcomes: list[dict[str, float]] = field(default_factory=list)  # by model
    tiers: list[str] = field(default_factory=list)  # empty = not said
    groups: list[str] = field(default_factory=list)
    prices: dict[str, float] = field(default_factory=dict)  # dollars per million tokens, by model
    licences: dict[str, str] = field(default_factory=dict)  # file -> its first line
    bad: Counter[str] = field(default_factory=Counter)  # rows left out, by reason

    @property
    def models(self) -> list[str]:
        """All models that any row tells of."""
        return sorted({model for row in self.outcomes for model in row})

    def of(self, model: str) -> Matrix:
        """[N] outcome of a model, NaN where it was not asked."""
        return np.array([row.get(model, np.nan) for row in self.outcomes], dtype=np.float32)


def read(paths: Sequence[Path]) -> list[Table]:
    """All tables in these files and folders. Raises UserError for a file that is no such table."""
    tables: dict[tuple[Path, tuple[str, ...]], Table] = {}
    for file in (file for path in paths for file in _files(path)):
        found = _parsed(file)
        key = file.parent, tuple(found.models) or (file.name,)
        if key in tables:
            _append(tables[key], found)
        else:
            tables[key] = found
    if not tables:
        raise UserError(f"{', '.join(map(str, paths))}: no table there; give CSV or JSON files of prompts and outcomes")
    return list(tables.values())


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} does not exist; give a file or folder of prompts and outcomes")
    return sorted(file for file in path.rglob("*") if file.name.endswith(ENDINGS) and file.name != PRICES)


def _append(table: Table, more: Table) -> None:
    table.name = table.name.partition("/")[0]  # of several files: the folder's
    for name in ("prompts", "outcomes", "tiers", "groups"):
        getattr(table, name).extend(getattr(more, name))
    table.prices |= more.prices
    table.licences |= more.licences
    table.bad.update(more.bad)


def _parsed(file: Path) -> Table:
    """One file as a table; a row that says nothing usable is counted, a file without any usable row is refused."""
    stem = file.name.split(".")[0]
    table = Table(f"{file.parent.name}/{stem}", prices=_prices(file.parent), licences=_licence(file))
    long: dict[str, int] = {}  # prompt -> its row, in long tables
    for row in _rows(file):
        prompt = next((row[name] for name in PROMPTS if row.get(name)), None)
        if not isinstance(prompt, str) or not prompt.strip():
            table.bad["no prompt"] += 1
            continue
        outcomes = _outcomes(row)
        tier = str(next((row[name] for name in TIERS if row.get(name)), "")).upper()
        if not outcomes and tier not in DEMANDS:
            table.bad["no outcome"] += 1
            continue
        _price(row, table.prices)
        if "model" in row and prompt in long:
            table.outcomes[long[prompt]] |= outcomes
            continue
        long[prompt] = len(table.prompts)
        table.prompts.append(prompt)
        table.outcomes.append(outcomes)
        table.tiers.append(tier if tier in DEMANDS else "")
        table.groups.append(f"{stem} {next((row[name] for name in GROUPS if row.get(name) is not None), '')}".strip())
    if not table.prompts:
        said = ", ".join(f"{count} rows with {reason}" for reason, count in table.bad.items()) or "it is empty"
        raise UserError(f"{file} holds no prompt with an outcome ({said}); its columns must be named as --help says")
    table.prices = {model: price for model, price in table.prices.items() if model in table.models}
    return table


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """The file's rows. Raises UserError where it cannot be read as what its name says."""
    try:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as stream:
            data = stream.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise UserError(f"{file} is larger than {LARGEST >> 20} MiB; split it")
        text = data.decode("utf-8-sig", "replace")
        kind = file.name.removesuffix(".gz").rpartition(".")[2]
        if kind == "csv":
            yield from csv.DictReader(io.StringIO(text, newline=""))
            return
        rows = [json.loads(line) for line in text.split("\n") if line.strip()] if kind == "jsonl" else json.loads(text)
    except (OSError, EOFError, ValueError, csv.Error) as error:
        raise UserError(f"{file} cannot be read as a table: {error}") from None
    if not isinstance(rows, list):
        raise UserError(f"{file} is no table: it must hold a list of objects")
    yield from (row if isinstance(row, dict) else {} for row in rows)


def _outcomes(row: Mapping[str, Any]) -> dict[str, float]:
    """What a row says of each model; what is no outcome is left out."""
    nested = next((row[name] for name in NESTED if isinstance(row.get(name), dict)), None)
    if nested is not None:
        told: Mapping[str, Any] = nested
    elif row.get("model"):
        told = {str(row["model"]): next((row[name] for name in OUTCOMES if row.get(name) not in (None, "")), None)}
    else:
        told = {name: value for name, value in row.items() if name and name not in _NAMED and not name.endswith(PRICE)}
    found = {str(model): _outcome(value) for model, value in told.items()}
    return {model: value for model, value in found.items() if value is not None}


def _outcome(value: Any) -> float | None:
    if isinstance(value, str):
        if value.lower() in _WORDS:
            return _WORDS[value.lower()]
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, bool | int | float) and 0 <= value <= 1 else None


def _price(row: Mapping[str, Any], prices: dict[str, float]) -> None:
    told = {str(row["model"]): row["price"]} if row.get("model") and row.get("price") else {}
    told |= {name.removesuffix(PRICE): value for name, value in row.items() if name and name.endswith(PRICE)}
    for model, value in told.items():
        try:
            price = float(value)
        except (TypeError, ValueError):
            continue
        if 0 <= price < float("inf"):
            prices[model] = price


def _prices(folder: Path) -> dict[str, float]:
    try:
        said = json.loads((folder / PRICES).read_text())
        return {str(model): float(each["input_price"]) for model, each in said.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / PRICES} must map each model to an object with its `input_price`") from None


def _licence(file: Path) -> dict[str, str]:
    """The nearest LICENSE in the file's folder or the one above: its name and its first line."""
    for folder in (file.parent, file.parent.parent):
        licence = folder / "LICENSE"
        if licence.is_file():
            lines = (line.strip() for line in licence.read_text(errors="replace").splitlines())
            return {f"{folder.name}/LICENSE": next((line for line in lines if line), "empty")}
    return {}
