"""Environments: prompts made from seeds, and who judges the answers. Adding one is a file and a line in `_MAKERS`."""

from __future__ import annotations

from collections.abc import Callable

from generator.environments.base import Environment, Item, make_item, split_of
from generator.environments.gym import Gym
from generator.environments.jsonl import Jsonl
from generator.environments.quick_facts import QuickFacts
from generator.environments.reverse_text import ReverseText
from infra.errors import UserError

__all__ = ["Environment", "Item", "environment", "make_item", "split_of"]

# what is before the colon -> how it is made from what is after it; None where nothing may follow
_MAKERS: dict[str, tuple[Callable[[str], Environment], str | None]] = {
    "reverse-text": (lambda _: ReverseText(), None),
    "quick-facts": (lambda _: QuickFacts(), None),
    "gym": (Gym, "a task of reasoning_gym, as in gym:basic_arithmetic"),
    "jsonl": (Jsonl, "a path, as in jsonl:/data/questions.jsonl"),
}


def environment(spec: str, *, files: bool = True) -> Environment:
    """The environment named by `spec`: `reverse-text`, `quick-facts`, `gym:<task>`, `jsonl:<path>`.

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
    if make is Jsonl and not files:
        raise UserError(f"environment {spec!r}: a task may name a file only if it is the one of run.environment")
    return make(argument)
