"""Six random letters of ten, to be written backwards: what a transformer of 71k weights learns in a minute."""

from __future__ import annotations

import string
from random import Random

from contracts.messages import Split
from generator.environments.base import Item, first_in, make_item

ALPHABET = string.ascii_lowercase[:10]
LETTERS = 6


class ReverseText:
    """Prompt `abcdef>`, gold `fedcba`, reward by letter. Every character is one the tiny model's tokenizer knows."""

    name = "reverse-text"

    def item(self, seed: int, split: Split) -> Item:
        """See `Environment.item`; takes some tens of microseconds."""
        random = Random(f"{split.value} {seed}")

        def candidate(_: int) -> Item:
            text = "".join(random.choices(ALPHABET, k=LETTERS))
            return make_item(f"{text}>", text[::-1], "letters")

        return first_in(split, candidate, self.name)
