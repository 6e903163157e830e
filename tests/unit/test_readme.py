"""The README tells the same story as the code: its commands exist and its settings table is complete."""

import re
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from infra.settings import Settings, schema

README = (Path(__file__).parents[2] / "README.md").read_text()


def rows(model: type[BaseModel], path: str = "") -> list[str]:
    """`| key | default | meaning |` of every setting, in the order of the run file."""
    found = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            found += rows(type(default), f"{path}{name}.")
        else:
            text = shown(default)
            found.append(
                f"| `{path}{name}` | {f'`{text}`' if text else ''} | {field.description} |".replace("|  |", "| |")
            )
        if get_origin(field.annotation) is dict and issubclass(item := get_args(field.annotation)[1], BaseModel):
            found += rows(item, f"{path}{name}.NAME.")
    return found


def shown(default: Any) -> str:
    if default in (None, PydanticUndefined) or isinstance(default, SecretStr):
        return ""
    if isinstance(default, frozenset):
        return ", ".join(sorted(default))
    return repr(default)[1:-1] if isinstance(default, str) else str(default)


def test_every_setting_is_in_the_table():
    expected = rows(schema())
    missing = [row for row in expected if row not in README]
    assert not missing, "README.md lacks these rows:\n" + "\n".join(missing)
    table = re.findall(r"^\| `[a-zA-Z_.0-9]+` \|.*$", README.partition("## Settings")[2], re.MULTILINE)
    assert [row for row in table if row not in expected] == [], "README.md names settings that do not exist"


def test_both_commands_are_shown():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_settings_are_described():
    assert all(field.description for field in Settings.model_fields["run"].annotation.model_fields.values())
