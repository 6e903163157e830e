"""Environments: prompts made from seeds, and who judges the answers. Adding one is a file and a line in `_MAKERS`."""

from __future__ import annotations

from collections.abc import Callable

from generator.environments.base import Environment, Item, make_item, split_of
from generator.environments.gym import Gym
from generator.environments.jsonl import Jsonl
from generator.environments.quick_facts import QuickFacts
from generator.environments.reverse_text import ReverseText
from generator.environments.tools import FORM, Tools, parse
from infra.errors import UserError

__all__ = ["Environment", "Item", "environment", "make_item", "split_of"]


def _jsonl(path: str, files: bool) -> Environment:
    if not files:
        raise UserError(
            f"environment {'jsonl:' + path!r}: a task may name a file only if it is the one of run.environment"
        )
    return Jsonl(path)


def _tools(argument: str, files: bool) -> Environment:
    median, sigma, inner = parse(argument)
    return Tools(median, sigma, environment(inner, files=files))


# what is before the colon -> how it is made from what is after it and whether it may read files of this machine; the
# form of what is after it, None where nothing may follow
_MAKERS: dict[str, tuple[Callable[[str, bool], Environment], str | None]] = {
    "reverse-text": (lambda _, files: ReverseText(), None),
    "quick-facts": (lambda _, files: QuickFacts(), None),
    "gym": (lambda task, files: Gym(task), "a task of reasoning_gym, as in gym:basic_arithmetic"),
    "jsonl": (_jsonl, "a path, as in jsonl:/data/questions.jsonl"),
    "tools": (_tools, FORM),
}


def environment(spec: str, *, files: bool = True) -> Environment:
    """The environment named by `spec`, e.g. `reverse-text`, `gym:<task>` or `tools:0.2:1.0:reverse-text`.

    Blocks: a file is read and checked, reasoning_gym is imported (a second). Raises `UserError` on an unknown name, a
    missing file or a line that cannot be used. Without `files`, as for a name that came over the bus, one that would
    read a file of this machine is refused.
    """
    name, colon, argument = spec.partition(":")
    if name not in _MAKERS:
        raise UserError(f"environment {spec!r}: there is none of this name; known are {', '.join(_MAKERS)}")
    make, needs = _MAKERS[name]
    if needs is None and colon:
        raise UserError(f"environment {spec!r}: nothing may follow {name}")
    if needs is not None and not argument:
        raise UserError(f"environment {spec!r}: needs {needs}")
    return make(argument, files)
