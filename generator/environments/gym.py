"""Any task of reasoning_gym by its name: generated from the seed, scored by its own scorer in the sandbox."""

from __future__ import annotations

import difflib
from random import Random

from contracts.messages import Split
from generator.environments.base import Item, first_in, make_item
from infra.errors import UserError
from infra.grading import entries

SYSTEM = (
    "Answer the question. You may reason first, briefly. "
    "Give nothing but the final answer between <answer> and </answer>, or on a last line after 'Answer:'."
)


class Gym:
    """One reasoning_gym dataset with its default configuration.

    Making an item imports nothing more, but takes up to 20 ms in most tasks and 0.4 s in a few (arc_agi): call `item`
    from a thread.
    """

    def __init__(self, task: str) -> None:
        """Raises `UserError` for a name that reasoning_gym does not know, and where its entries have no JSON form."""
        # takes a second, and only this environment needs it
        from reasoning_gym.factory import DATASETS, create_dataset

        if task not in DATASETS:
            near = difflib.get_close_matches(task, DATASETS, 3) or sorted(DATASETS)[:5]
            raise UserError(f"environment gym:{task}: reasoning_gym has no such task; did you mean {', '.join(near)}?")
        self.name = f"gym:{task}"
        self._task = task
        self._create = create_dataset
        try:
            self._make(0)
        except Exception as error:  # a task that needs a configuration or data raises whatever it likes
            raise UserError(f"environment {self.name}: cannot make an item: {type(error).__name__}: {error}") from error

    def item(self, seed: int, split: Split) -> Item:
        """See `Environment.item`."""
        random = Random(f"{split.value} {seed}")
        return first_in(split, lambda _: self._make(random.getrandbits(31)), self.name, tries=200)

    def _make(self, seed: int) -> Item:
        entry = self._create(self._task, seed=seed, size=1)[0]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": str(entry["question"])}]
        return make_item(messages, entries.pack(entry), self.name)
