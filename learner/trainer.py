"""Groups of samples in, the next policy out: the optimizer's side of the learner, free of the bus and of clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from contracts.policies import TensorSpec
from infra import models
from infra.errors import UserError
from infra.weights import unpack as unpack_weights
from learner.lora import identity
from learner.metrics import Tally
from learner.objectives import sequence_weights
from learner.packing import Sample, deal, pack
from learner.ranks import Alone, Ranks
from learner.settings import LearnerSettings
from learner.worker import Minibatch, Piece, Trained


@dataclass(frozen=True)
class StepStats:
    """What one step did."""

    loss: float  # mean over the applied updates, 0 without any
    grad_norm: float  # before clipping, mean over the applied updates, 0 without any
    learning_rate: float
    tokens: int  # sampled tokens in the batch, those without advantage included
    metrics: dict[str, float]  # those of `learner.metrics.Tally`; counts of updates, skipped_updates, over_budget


class Trainer:
    """A policy, its AdamW state and the rule that moves it.

    It decides what a step consists of; the `Worker` of each rank computes its share. State and weights are the same
    whatever the number of ranks. One call at a time, from any thread.
    """

    def __init__(self, model_folder: Path, settings: LearnerSettings, *, seed: int, ranks: Ranks | None = None) -> None:
        """Load the policy of version 0. Raises `UserError` on an unusable model folder or device."""
        self.version = 0  # steps taken since the run's first policy
        self._folder = model_folder
        self._settings = settings
        self._ranks = Alone() if ranks is None else ranks
        self._worker = self._ranks.start(model_folder, settings, seed)
        self._identity = identity(model_folder, settings.lora)
        self._random = torch.Generator().manual_seed(seed)

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows are below it."""
        return int(self._worker.model.get_input_embeddings().num_embeddings)

    @property
    def window(self) -> int:
        """Longest sequence the model can hold, in tokens."""
        return int(self._worker.model.config.max_position_embeddings)

    @property
    def published_dtype(self) -> torch.dtype:
        """What weights are rounded to when they leave the trainer: the precision its forward pass computes in."""
        return self._worker.published_dtype

    def step(self, groups: list[list[Sample]], *, heartbeat: Callable[[], None] = lambda: None) -> StepStats:
        """Train on one batch: up to `minibatches` optimizer updates on a random split of its groups; version + 1.

        Every sample counts in the means. Those with advantage 0 are not computed: no objective takes a gradient from
        them. A minibatch of nothing else, or one whose gradient is not finite, updates nothing; the latter is counted
        in `skipped_updates`. Blocks for the whole step and calls `heartbeat` after each forward and backward pass.
        """
        rate = self._learning_rate()
        shares, refused = self._split(groups)
        parts: list[Trained] = self._ranks.call("train", [(share, rate) for share in shares], heartbeat=heartbeat)
        norms = parts[0].norms  # the same on every rank
        losses = [sum(losses) for losses in zip(*(part.losses for part in parts), strict=True)]
        applied = [(loss, norm) for loss, norm in zip(losses, norms, strict=True) if norm is not None]
        self.version += 1
        counts = {"updates": len(applied), "skipped_updates": len(norms) - len(applied), "over_budget": refused}
        return StepStats(
            loss=sum(loss for loss, _ in applied) / max(len(applied), 1),
            grad_norm=sum(norm for _, norm in applied) / max(len(applied), 1),
            learning_rate=rate,
            tokens=sum(sample.sampled for group in groups for sample in group),
            metrics=Tally.sum(part.tally for part in parts).result()
            | {name: float(count) for name, count in counts.items()},
        )

    def weights(self) -> tuple[memoryview, list[TensorSpec]]:
        """A copy of the policy in `published_dtype`, laid out for publication; adapters are merged into it."""
        return cast(tuple[memoryview, list[TensorSpec]], self._everywhere("weights"))

    def state(self) -> dict[str, Tensor]:
        """A copy, on the CPU, of everything that the next step depends on: weights, moments, random state, version.

        With adapters, their weights and moments, and what says which model they belong to.
        """
        tensors = cast(dict[str, Tensor], self._everywhere("state"))
        own = {"random": self._random.get_state(), "version": torch.tensor(self.version)}
        return tensors | own | {name: tensor.clone() for name, tensor in self._identity.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on exactly where `state` was taken. Raises `UserError` when it belongs to another model."""
        shapes = {f"model.{name}": parameter.shape for name, parameter in self._worker.parameters.items()}
        found = {name: tensor.shape for name, tensor in state.items() if name.startswith("model.")}
        if found != shapes:
            differing = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
            raise UserError(
                f"checkpoint: {len(differing)} tensors ({differing[0]}, …) do not fit the model in {self._folder}; "
                "give the run's own model and learner.lora, or start a new run in another directory"
            )
        if not all(name in state and torch.equal(tensor, state[name]) for name, tensor in self._identity.items()):
            raise UserError(
                f"checkpoint: its adapters belong to another model than that in {self._folder}, or to another alpha; "
                "give the run's own model and learner.lora, or start a new run in another directory"
            )
        prefix = "adamw.step."
        steps = {name.removeprefix(prefix): float(state[name]) for name in state if name.startswith(prefix)}
        self._ranks.call("load", [(steps,)] * self._ranks.count, state=state)
        self._random.set_state(state["random"])
        self.version = int(state["version"])

    def export(self, folder: Path) -> None:
        """Write the policy, in `published_dtype`, with its tokenizer as a folder that `transformers` loads as it is."""
        models.unbundle(models.bundle(self._folder), folder)
        copy = models.load_model(self._folder, dtype=self.published_dtype, device=torch.device("cpu"), weights=False)
        data, tensors = self.weights()
        copy.load_state_dict(unpack_weights(data, tensors), strict=False)  # tied tensors are carried once
        copy.save_pretrained(folder)

    def _everywhere(self, method: str) -> object:
        """Call a method of every worker; what that of rank 0 returned."""
        return self._ranks.call(method, [()] * self._ranks.count)[0]

    def _learning_rate(self) -> float:
        """Linear warm-up to the peak, then constant."""
        settings = self._settings.optimizer
        return settings.learning_rate * min(1.0, (self.version + 1) / max(settings.warmup_steps, 1))

    def _split(self, groups: list[list[Sample]]) -> tuple[list[list[Minibatch]], int]:
        """For each rank its part of each minibatch; how many samples no forward pass can hold.

        Minibatches are equal shares of the shuffled groups. What teaches nothing counts in the weights only.
        """
        settings, ranks = self._settings, self._ranks.count
        order = torch.randperm(len(groups), generator=self._random).tolist()
        shares: list[list[Minibatch]] = [[] for _ in range(ranks)]
        refused = 0
        for number in range(settings.minibatches):
            chosen = [groups[index] for index in order[number :: settings.minibatches]]
            samples = [sample for group in chosen for sample in group]
            weights = sequence_weights(
                [sample.sampled for sample in samples], settings.objective.aggregation, settings.sampling.max_tokens
            )
            weight_of = {id(sample): weight for sample, weight in zip(samples, weights, strict=True)}
            teaching = [[sample for sample in group if sample.advantage and sample.sampled] for group in chosen]
            packings = [pack(own, settings.token_budget) for own in deal(teaching, ranks)]
            refused += sum(len(packing.over_budget) for packing in packings)
            passes = max(len(packing.micro_batches) for packing in packings)
            if not passes:
                continue
            for share, (micro_batches, _) in zip(shares, packings, strict=True):
                pieces = [Piece(each, [weight_of[id(s)] for s in each.samples]) for each in micro_batches]
                share.append(pieces + [Piece(None, [0.0])] * (passes - len(pieces)))
        return shares, refused
