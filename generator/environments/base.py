"""What an environment is: a name, and items made from seeds, each on one side of a split by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from contracts.messages import Split
from infra.errors import UserError

HELDOUT_OF = 10  # one item in so many is held out
MAX_TRIES = 1000

Prompt = str | list[dict[str, str]]  # text, or chat messages {role, content} for a model with a chat template


class Tool(Protocol):
    """Something outside that a rollout calls before it can be scored; a group is scored when all calls are back.

    No advantage can be computed before that, so nobody waits longer for it.
    """

    def seconds(self, index: int) -> float:
        """How long rollout `index` of the group waits for it."""
        ...


@dataclass(frozen=True)
class Item:
    """One question and what judges its answer."""

    prompt: Prompt
    expected: Any  # the gold in the verifier's own form, JSON-able
    verifier: str  # a name the grader knows
    hash: str  # 16 hex digits over question and gold: the same question has the same hash everywhere
    tool: Tool | None = None  # what every rollout waits for between sampling and scoring


class Environment(Protocol):
    """Makes prompts and knows their answers. Equal seeds give equal items, on every machine."""

    name: str

    def item(self, seed: int, split: Split) -> Item:
        """The item of `seed` on that side of the split; distinct seeds may give equal items.

        Blocks for microseconds to milliseconds, a `gym:` environment for up to seconds: call it from a thread. Raises
        `UserError` where that side of the split is empty.
        """
        ...


def make_item(prompt: Prompt, expected: Any, verifier: str, *, content: Prompt | None = None) -> Item:
    """An item with its content hash. Raises `TypeError` if the gold is not JSON-able.

    `content` stands for the prompt in the hash, where the question alone makes the item and the rest is dressing.
    """
    hashed = json.dumps([prompt if content is None else content, expected], sort_keys=True).encode()
    return Item(prompt, expected, verifier, hashlib.sha256(hashed).hexdigest()[:16])


def split_of(item: Item) -> Split:
    """Which side an item is on: its content alone decides, so no item is ever on both."""
    return Split.HELDOUT if int(item.hash, 16) % HELDOUT_OF == 0 else Split.TRAIN


def first_in(split: Split, candidate: Callable[[int], Item], name: str, tries: int = MAX_TRIES) -> Item:
    """The first of `candidate(0)`, `candidate(1)`, … on the wanted side. Raises `UserError` after `tries` of them."""
    for attempt in range(tries):
        item = candidate(attempt)
        if split_of(item) is split:
            return item
    raise UserError(f"environment {name}: none of {tries} items is in the split {split.value}; give it more items")
