"""Packing loses nothing, repeats nothing, and stays within its budget."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.tensors import Tensor
from learner.packing import MicroBatch, Sample, deal, over_budget, pack, sample_of
from tests.unit.builders import rollout


def sample(name: str, prompt: list[int], length: int, top_p: float = 1.0) -> Sample:
    return Sample(
        rollout_id=name,
        prompt=np.array(prompt, np.int32),
        completion=np.arange(length, dtype=np.int32),
        mask=np.ones(length, np.uint8),
        behaviour_logprobs=np.zeros(length, np.float32),
        temperatures=np.ones(length, np.float32),
        advantage=1.0,
        top_p=top_p,
        top_k=0,
    )


def cost(batch: MicroBatch) -> int:
    prompts = len(batch.groups) * max(len(group[0].prompt) for group in batch.groups)
    return prompts + len(batch.samples) * max(len(sample.completion) for sample in batch.samples)


shapes = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), min_size=0, max_size=6)), max_size=8)


@given(shapes, st.integers(4, 80))
def test_every_sample_is_packed_once_within_the_budget_or_refused(
    groups: list[tuple[int, list[int]]], budget: int
) -> None:
    samples = [
        [sample(f"{number}.{index}", [number] * prompt, length) for index, length in enumerate(lengths)]
        for number, (prompt, lengths) in enumerate(groups)
    ]
    packed = pack(samples, budget)
    rows = [row for batch in packed.micro_batches for row in batch.samples]
    everything = [row.rollout_id for group in samples for row in group]
    assert Counter(row.rollout_id for row in [*rows, *packed.over_budget]) == Counter(everything)
    assert all(over_budget(row, budget) for row in packed.over_budget)
    assert not any(over_budget(row, budget) for row in rows)
    assert all(cost(batch) <= budget for batch in packed.micro_batches)
    for batch in packed.micro_batches:
        assert all(group and len({row.prompt.tobytes() for row in group}) == 1 for group in batch.groups)


@given(shapes, st.integers(1, 5))
def test_groups_are_dealt_whole_and_no_rank_has_more_than_its_share_and_one_group(
    groups: list[tuple[int, list[int]]], ranks: int
) -> None:
    samples = [
        [sample(f"{number}.{index}", [number] * prompt, length) for index, length in enumerate(lengths)]
        for number, (prompt, lengths) in enumerate(groups)
    ]
    dealt = deal(samples, ranks)
    assert len(dealt) == ranks
    assert sorted(map(id, samples)) == sorted(id(group) for own in dealt for group in own)
    places = {id(group): place for place, group in enumerate(samples)}
    assert all(own == sorted(own, key=lambda group: places[id(group)]) for own in dealt), "in the order they came"
    tokens = [len(group[0].prompt) + sum(len(row.completion) for row in group) if group else 0 for group in samples]
    of = {id(group): size for group, size in zip(samples, tokens, strict=True)}
    loads = [sum(of[id(group)] for group in own) for own in dealt]
    assert max(loads) <= sum(tokens) / ranks + max(tokens, default=0)


@pytest.mark.parametrize(
    "lengths, ranks, expected",
    [
        ([5, 5, 5, 5], 2, [[0, 2], [1, 3]]),
        ([9, 1, 2, 3, 3], 2, [[0], [1, 2, 3, 4]]),
        ([4], 3, [[0], [], []]),
        ([1, 2, 3], 1, [[0, 1, 2]]),
    ],
)
def test_the_largest_groups_are_dealt_first(lengths: list[int], ranks: int, expected: list[list[int]]) -> None:
    groups = [[sample(str(number), [1], length - 1)] for number, length in enumerate(lengths)]
    assert [[int(group[0].rollout_id) for group in own] for own in deal(groups, ranks)] == expected


def test_a_group_that_fits_shares_one_prompt_and_one_that_does_not_is_split() -> None:
    group = [sample(f"0.{index}", [1, 2, 3, 4], 2) for index in range(4)]
    whole, split = pack([group], 12).micro_batches, pack([group], 8).micro_batches
    assert [[len(part) for part in batch.groups] for batch in whole] == [[4]]
    assert [[len(part) for part in batch.groups] for batch in split] == [[2], [2]]


def test_samples_that_claim_one_group_but_differ_in_their_prompt_are_kept_apart() -> None:
    group = [sample("a", [1, 2], 2), sample("b", [1, 3], 2), sample("c", [1, 2], 2)]
    (batch,) = pack([group], 100).micro_batches
    assert sorted(sorted(row.rollout_id for row in part) for part in batch.groups) == [["a", "c"], ["b"]]


def test_a_micro_batch_is_truncated_in_one_way() -> None:
    groups = [[sample("a", [1], 2), sample("b", [1], 2, top_p=0.9)], [sample("c", [2], 2, top_p=0.9)]]
    batches = pack(groups, 100).micro_batches
    assert sorted((batch.truncation, len(batch.samples)) for batch in batches) == [((0.9, 0), 2), ((1.0, 0), 1)]


def test_a_rollout_becomes_a_sample_that_ends_with_its_last_sampled_token() -> None:
    mask = np.array([0, 0, 1, 0, 1, 0], np.uint8)
    message = rollout(length=6, prompt_length=2, loss_mask=Tensor.of(mask))
    view = sample_of(message, 0.5)
    assert view.prompt.tolist() == [0, 1]
    assert view.completion.tolist() == [2, 3, 4]
    assert view.mask.tolist() == [1, 0, 1]
    assert view.sampled == 2
    assert view.advantage == 0.5


@pytest.mark.parametrize("budget, refused", [(5, False), (4, True)])
def test_the_budget_counts_prompt_and_completion(budget: int, refused: bool) -> None:
    assert over_budget(sample("a", [1, 2, 3], 2), budget) is refused
    assert bool(pack([[sample("a", [1, 2, 3], 2)]], budget).over_budget) is refused
