"""The README tells the same story as the code: its commands exist and its settings table is complete."""

import re
from pathlib import Path

from pydantic import BaseModel, SecretStr

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
            shown = "" if default is None or isinstance(default, SecretStr) else default
            text = repr(shown)[1:-1] if isinstance(shown, str) else str(shown)
            found.append(
                f"| `{path}{name}` | {f'`{text}`' if text else ''} | {field.description} |".replace("|  |", "| |")
            )
    return found


def test_every_setting_is_in_the_table():
    expected = rows(schema())
    missing = [row for row in expected if row not in README]
    assert not missing, "README.md lacks these rows:\n" + "\n".join(missing)
    table = re.findall(r"^\| `[a-z_.0-9]+` \|.*$", README.partition("## Settings")[2], re.MULTILINE)
    assert [row for row in table if row not in expected] == [], "README.md names settings that do not exist"


def test_both_commands_are_shown():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_settings_are_described():
    assert all(field.description for field in Settings.model_fields["run"].annotation.model_fields.values())
