"""Rollouts into micro-batches within a token budget, the prompt of a group counted and computed once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from contracts.messages import Rollout


@dataclass(frozen=True, eq=False)
class Sample:
    """One rollout as the trainer sees it: P prompt tokens, C completion tokens up to the last sampled one."""

    rollout_id: str
    prompt: np.ndarray  # int32 [P], P >= 1
    completion: np.ndarray  # int32 [C], C >= 1: sampled tokens with later tool results in between
    mask: np.ndarray  # uint8 [C], 1 where the policy sampled the token
    behaviour_logprobs: np.ndarray  # float32 [C], natural log under the distribution sampled
    temperatures: np.ndarray  # float32 [C], 0 where not sampled
    advantage: float
    top_p: float
    top_k: int

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled: what means are taken over."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class MicroBatch:
    """Groups for one forward pass, all truncated alike; the samples of a group share their prompt."""

    groups: list[list[Sample]]

    @property
    def samples(self) -> list[Sample]:
        """All samples in row order."""
        return [sample for group in self.groups for sample in group]

    @property
    def truncation(self) -> tuple[float, int]:
        """top-p and top-k of every sample."""
        first = self.groups[0][0]
        return first.top_p, first.top_k


class Packing(NamedTuple):
    """What `pack` made of its groups."""

    micro_batches: list[MicroBatch]
    over_budget: list[Sample]  # longer than a whole forward pass may be


def sample_of(rollout: Rollout, advantage: float) -> Sample:
    """The trainer's view of a checked rollout; tokens after the last sampled one teach nothing and are cut off."""
    start = rollout.prompt_length
    sampled = np.flatnonzero(rollout.loss_mask.array())
    end = int(sampled[-1]) + 1 if len(sampled) else start + 1
    tokens = rollout.tokens.array()
    return Sample(
        rollout_id=rollout.id,
        prompt=tokens[:start],
        completion=tokens[start:end],
        mask=rollout.loss_mask.array()[start:end],
        behaviour_logprobs=rollout.logprobs.array()[start:end],
        temperatures=rollout.temperatures.array()[start:end],
        advantage=advantage,
        top_p=rollout.sampling.top_p,
        top_k=rollout.sampling.top_k,
    )


def over_budget(sample: Sample, token_budget: int) -> bool:
    """Whether the sample does not fit a forward pass even alone."""
    return len(sample.prompt) + len(sample.completion) > token_budget


def pack(groups: Iterable[list[Sample]], token_budget: int) -> Packing:
    """Pack groups so that each micro-batch, padding included, stays within `token_budget` tokens.

    A micro-batch of G prompts and N completions costs G · longest prompt + N · longest completion. A group that is too
    large is split, and its prompt computed once per part. Deterministic; blocks for microseconds per sample.
    """
    refused: list[Sample] = []
    parts: list[list[Sample]] = []
    for group in groups:
        refused += [sample for sample in group if over_budget(sample, token_budget)]
        fitting = [sample for sample in group if not over_budget(sample, token_budget)]
        for _, alike in groupby(sorted(fitting, key=_shared), key=_shared):
            parts += _split(list(alike), token_budget)
    # Similar lengths next to each other: less padding.
    parts.sort(key=lambda part: (part[0].top_p, part[0].top_k, _completion_length(part), len(part[0].prompt)))
    batches: list[MicroBatch] = []
    for part in parts:
        if batches and _joins(batches[-1], part, token_budget):
            batches[-1].groups.append(part)
        else:
            batches.append(MicroBatch([part]))
    return Packing(batches, refused)


def deal(groups: list[list[Sample]], ranks: int) -> list[list[list[Sample]]]:
    """Whole groups for every rank, of about as many tokens each: the largest first, to the rank that has the least.

    Graham's rule for the makespan (1969): at most 4/3 of the best. Deterministic; the order of groups is kept.
    """
    tokens = [len(group[0].prompt) + sum(len(s.completion) for s in group) if group else 0 for group in groups]
    load = [0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(groups)), key=lambda index: -tokens[index]):
        rank = load.index(min(load))
        load[rank] += tokens[index]
        dealt[rank].append(index)
    return [[groups[index] for index in sorted(own)] for own in dealt]


def _shared(sample: Sample) -> tuple[float, int, bytes]:
    """What samples must have in common to run on one prompt."""
    return sample.top_p, sample.top_k, sample.prompt.tobytes()


def _completion_length(group: list[Sample]) -> int:
    return max(len(sample.completion) for sample in group)


def _cost(groups: list[list[Sample]]) -> int:
    prompt = max(len(group[0].prompt) for group in groups)
    completion = max(_completion_length(group) for group in groups)
    return len(groups) * prompt + sum(len(group) for group in groups) * completion


def _split(group: list[Sample], token_budget: int) -> list[list[Sample]]:
    if _cost([group]) <= token_budget:
        return [group]
    parts: list[list[Sample]] = []
    for sample in sorted(group, key=lambda sample: len(sample.completion)):
        if parts and _cost([[*parts[-1], sample]]) <= token_budget:
            parts[-1].append(sample)
        else:
            parts.append([sample])
    return parts


def _joins(batch: MicroBatch, part: list[Sample], token_budget: int) -> bool:
    if batch.truncation != (part[0].top_p, part[0].top_k):
        return False
    return _cost([*batch.groups, part]) <= token_budget
