"""Settings as an annotated TOML run file: what `--print-config` shows and what `load` reads back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from infra.settings import Settings


def to_toml(settings: Settings) -> str:
    """Every setting in force with its description; secrets are masked, settings without a value are commented out."""
    return "\n".join(_table(settings, ())).strip("\n") + "\n"


def _table(model: BaseModel, path: tuple[str, ...]) -> Iterator[str]:
    fields = type(model).model_fields
    values = {name: getattr(model, name) for name in fields}
    tables = {name: value for name, value in values.items() if isinstance(value, BaseModel | dict)}
    if path:
        yield f"\n[{'.'.join(path)}]"
    for name, value in values.items():
        if name not in tables:
            yield _line(name, value, fields[name].description)
    for name, value in tables.items():
        if isinstance(value, BaseModel):
            yield from _table(value, (*path, name))
        else:
            yield f"\n[{'.'.join((*path, name))}]  # {fields[name].description}"
            yield from (_line(_key(key), item, None) for key, item in value.items() if not isinstance(item, BaseModel))
            for key, item in value.items():
                if isinstance(item, BaseModel):
                    yield from _table(item, (*path, name, _key(key)))


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _line(name: str, value: Any, description: str | None) -> str:
    comment = f"  # {description}" if description else ""
    return f"# {name} ={comment}" if value is None else f"{name} = {_scalar(value)}{comment}"


def _scalar(value: Any) -> str:
    if isinstance(value, SecretStr):
        return json.dumps("**********" if value.get_secret_value() else "")
    if isinstance(value, frozenset):
        value = sorted(value)
    if isinstance(value, list):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    # JSON's strings, numbers and booleans are TOML's
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
