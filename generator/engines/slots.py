"""The key-value store of all completions in flight: one slot per completion, the active ones a prefix of the rows.

A completion of length n has its keys and values in columns 0 .. n-1 of its slot. Rows and columns grow with need, so
memory follows what is in flight; admission (`schedule`) bounds rows times columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

COLUMNS = 64  # granularity of growth
ROWS = 8


class SlotCache(Cache):
    """Keys and values of `active` slots, for any model that takes `past_key_values`.

    A decode step calls `begin`, then runs the model on one token per active slot with the positions and mask it got;
    every layer writes its new column in place and attends over the filled ones.
    """

    def __init__(self, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.active = 0  # slots in use: rows 0 .. active-1
        self._dtype, self._device = dtype, device
        super().__init__(layers=[_SlotLayer() for _ in range(layers)])

    def seat(self, prompts: DynamicCache, row: int, length: int, copies: int) -> None:
        """Copy the first `length` columns of a prefilled prompt into `copies` new slots behind the active ones."""
        for layer, prompt in zip(self._slots(), prompts.layers, strict=True):
            layer.seat(prompt.keys[row, :, :length], prompt.values[row, :, :length], self.active, copies)
        self.active += copies

    def begin(self, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Make room for one more column per slot; `lengths` [active] are the columns filled so far.

        Returns position ids [active, 1] and the additive mask [active, 1, 1, S] with S > max(lengths).
        """
        positions = torch.tensor(lengths, device=self._device)
        rows = torch.arange(self.active, device=self._device)
        for layer in self._slots():
            span = layer.begin(rows, positions, max(lengths) + 1)
        visible = torch.arange(span, device=self._device) <= positions[:, None]
        mask = torch.zeros(self.active, span, dtype=self._dtype, device=self._device)
        mask.masked_fill_(~visible, torch.finfo(self._dtype).min)
        return positions[:, None], mask[:, None, None, :]

    def free(self, slots: list[int]) -> list[tuple[int, int]]:
        """Give slots back; the last active ones move into the holes. Returns the moves (from, to)."""
        moves = compaction(self.active, slots)
        self.active -= len(slots)
        for layer in self._slots():
            layer.move(moves)
        return moves

    def scrub(self) -> None:
        """Forget what freed slots held: numbers that are not finite would leak through the mask (0 · NaN = NaN)."""
        for layer in self._slots():
            layer.scrub(self.active)

    def clear(self) -> None:
        """Drop every slot and the memory."""
        self.active = 0
        for layer in self._slots():
            layer.scrub(0)

    @property
    def capacity(self) -> int:
        """Tokens that the allocated memory could hold: rows times columns."""
        return self._slots()[0].capacity

    def _slots(self) -> list[_SlotLayer]:
        return self.layers


def compaction(active: int, freed: list[int]) -> list[tuple[int, int]]:
    """Moves (from, to) that make the slots left of `active` ones, without `freed`, a prefix again."""
    remaining, gone = active - len(freed), set(freed)
    tail = [slot for slot in range(remaining, active) if slot not in gone]
    holes = sorted(slot for slot in gone if slot < remaining)
    return list(zip(tail, holes, strict=True))


class _SlotLayer(CacheLayerMixin):
    """One layer: keys transposed, [R, K, D, C], as the product with the queries reads them; values [R, K, C, E]."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor = torch.empty(0, 0, 0, 0)
        self.values: Tensor = torch.empty(0, 0, 0, 0)
        self._rows = self._positions = torch.empty(0, dtype=torch.long)
        self._filled = 0  # columns that active slots use
        self._span = 0  # columns that are attended over

    @property
    def capacity(self) -> int:
        return self.values.shape[0] * self.values.shape[2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: every slot starts with `seat`."""

    def seat(self, keys: Tensor, values: Tensor, first: int, copies: int) -> None:
        """`keys` [K, L, D] and `values` [K, L, E] of one prompt into slots first .. first+copies-1."""
        length = keys.shape[1]
        self._filled = max(self._filled if first else 0, length)
        if self.keys.dtype != keys.dtype or self.keys.shape[1:3] != (keys.shape[0], keys.shape[2]):
            self.keys = keys.new_zeros(0, keys.shape[0], keys.shape[2], 0)
            self.values = values.new_zeros(0, values.shape[0], 0, values.shape[2])
        self._grow(first + copies, self._filled + 1)
        self.keys[first : first + copies, :, :, :length] = keys.transpose(1, 2).contiguous()
        self.values[first : first + copies, :, :length] = values

    def begin(self, rows: Tensor, positions: Tensor, filled: int) -> int:
        """Prepare for `update`, after which `filled` columns are in use; returns how many will be attended over."""
        self._rows, self._positions, self._filled = rows, positions, filled
        self._grow(len(rows), filled)
        # The matrix product copies a slice that ends inside a row: some masked columns more cost less.
        columns = self.values.shape[2]
        self._span = columns if columns <= filled + filled // 4 + COLUMNS else filled
        return self._span

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token per slot, [A, K, 1, D] and [A, K, 1, E]; returns all, [A, K, S, D] and [A, K, S, E]."""
        self.keys[self._rows, :, :, self._positions] = key_states[:, :, 0]
        self.values[self._rows, :, self._positions] = value_states[:, :, 0]
        active = len(self._rows)
        return self.keys[:active, :, :, : self._span].transpose(2, 3), self.values[:active, :, : self._span]

    def move(self, moves: list[tuple[int, int]]) -> None:
        filled = self._filled
        for source, target in moves:
            self.keys[target, :, :, :filled] = self.keys[source, :, :, :filled]
            self.values[target, :, :filled] = self.values[source, :, :filled]

    def scrub(self, active: int) -> None:
        if active == 0:
            self.keys, self.values, self._filled = self.keys[:0, :, :, :0].clone(), self.values[:0, :, :0].clone(), 0
        self.keys[active:].zero_()
        self.values[active:].zero_()

    def get_seq_length(self) -> int:
        return self._span

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._span, 0

    def get_max_length(self) -> int:
        return -1

    def _grow(self, rows: int, columns: int) -> None:
        have_rows, have_columns = self.values.shape[0], self.values.shape[2]
        if rows <= have_rows and columns <= have_columns:
            return
        # Sized by present needs, not by old ones: all slots would pay for one long completion that has left.
        # Columns get an eighth to spare, so that copying stays linear in the length of a long completion.
        rows = -(-rows // ROWS) * ROWS
        columns = -(-(columns + columns // 8) // COLUMNS) * COLUMNS
        keys = self.keys.new_zeros(rows, *self.keys.shape[1:3], columns)
        values = self.values.new_zeros(rows, self.values.shape[1], columns, self.values.shape[3])
        r, c = min(rows, have_rows), min(columns, have_columns)
        keys[:r, :, :, :c] = self.keys[:r, :, :, :c]
        values[:r, :, :c] = self.values[:r, :, :c]
        self.keys, self.values = keys, values
