"""Groups of samples in, the next policy out: the optimizer's side of the learner, free of the bus and of clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from contracts.messages import TensorSpec
from infra import models
from infra.errors import UserError
from infra.weights import pack as pack_weights
from learner.forward import Batch, check_architecture, completion_logprobs
from learner.metrics import Tally
from learner.objectives import Inputs, objective, sequence_weights
from learner.packing import MicroBatch, Sample, pack
from learner.settings import LearnerSettings


@dataclass(frozen=True)
class StepStats:
    """What one step did."""

    loss: float  # mean over the applied updates, 0 without any
    grad_norm: float  # before clipping, mean over the applied updates, 0 without any
    learning_rate: float
    tokens: int  # sampled tokens in the batch, those without advantage included
    metrics: dict[str, float]  # those of `learner.metrics.Tally`; counts of updates, skipped_updates, over_budget


@dataclass
class _Scored:
    """A micro-batch on its way through a step."""

    batch: Batch
    weights_B: Tensor  # float32, what a sequence's token losses are multiplied by
    start_BT: Tensor | None = None  # float32, log-probs at the step's start where they were computed beforehand


_Minibatch = list[_Scored]  # what one optimizer update is computed from


class Trainer:
    """A policy, its AdamW state and the rule that moves it.

    Master weights and moments are fp32; with `precision = "bf16"` the forward pass runs under autocast, which rounds
    the matrices exactly as publication does. One call at a time, from any thread.
    """

    def __init__(self, model_folder: Path, settings: LearnerSettings, *, seed: int) -> None:
        """Load the policy of version 0. Raises `UserError` on an unusable model folder or device."""
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.version = 0  # steps taken since the run's first policy
        self._folder = model_folder
        self._settings = settings
        self._device = models.pick_device(settings.device)
        self._model = models.load_model(model_folder, dtype=torch.float32, device=self._device)
        check_architecture(self._model, str(model_folder))
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=settings.optimizer.learning_rate,
            betas=(settings.optimizer.beta1, settings.optimizer.beta2),
            weight_decay=settings.optimizer.weight_decay,
            fused=True,
        )
        self._objective = objective(settings.objective)
        self._random = torch.Generator().manual_seed(seed)

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows are below it."""
        return int(self._model.get_input_embeddings().num_embeddings)

    @property
    def window(self) -> int:
        """Longest sequence the model can hold, in tokens."""
        return int(self._model.config.max_position_embeddings)

    @property
    def published_dtype(self) -> torch.dtype:
        """What weights are rounded to when they leave the trainer: the precision its forward pass computes in."""
        return torch.bfloat16 if self._settings.precision == "bf16" else torch.float32

    def step(self, groups: list[list[Sample]], *, heartbeat: Callable[[], None] = lambda: None) -> StepStats:
        """Train on one batch: up to `minibatches` optimizer updates on a random split of its groups; version + 1.

        Every sample counts in the means. Those with advantage 0 are not computed: no objective takes a gradient from
        them. A minibatch of nothing else, or one whose gradient is not finite, updates nothing; the latter is counted
        in `skipped_updates`. Blocks for the whole step and calls `heartbeat` after each forward and backward pass.
        """
        tally = Tally()
        rate = self._set_learning_rate()
        minibatches, refused = self._split(groups)
        if self._objective.needs_proximal:
            self._score_start(minibatches, tally, heartbeat)
        losses, norms = [], []
        for number, minibatch in enumerate(minibatches):
            loss = self._accumulate(minibatch, tally, heartbeat, first=number == 0)
            norm = self._apply()
            if norm is not None:
                losses.append(float(loss))
                norms.append(norm)
        self.version += 1
        counts = {"updates": len(norms), "skipped_updates": len(minibatches) - len(norms), "over_budget": refused}
        return StepStats(
            loss=sum(losses) / max(len(losses), 1),
            grad_norm=sum(norms) / max(len(norms), 1),
            learning_rate=rate,
            tokens=sum(sample.sampled for group in groups for sample in group),
            metrics=tally.result() | {name: float(count) for name, count in counts.items()},
        )

    def weights(self) -> tuple[memoryview, list[TensorSpec]]:
        """A copy of the policy in `published_dtype`, laid out for publication."""
        return pack_weights(self._model.state_dict(), self.published_dtype)

    def state(self) -> dict[str, Tensor]:
        """A copy, on the CPU, of everything that the next step depends on: weights, moments, random state, version."""
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            tensors |= {f"adamw.{key}.{name}": value for key, value in self._adamw.state[parameter].items()}
        tensors["random"] = self._random.get_state()
        tensors["version"] = torch.tensor(self.version)
        return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on exactly where `state` was taken. Raises `UserError` when it belongs to another model."""
        shapes = {f"model.{name}": parameter.shape for name, parameter in self._parameters.items()}
        found = {name: tensor.shape for name, tensor in state.items() if name.startswith("model.")}
        if found != shapes:
            differing = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
            raise UserError(
                f"checkpoint: {len(differing)} tensors ({differing[0]}, …) do not fit the model in {self._folder}; "
                "give the run's own model, or start a new run in another directory"
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state[f"model.{name}"])
                moments = {key: f"adamw.{key}.{name}" for key in ("step", "exp_avg", "exp_avg_sq")}
                self._adamw.state[parameter] = {
                    key: state[entry].to(self._device, copy=True) for key, entry in moments.items() if entry in state
                }
        self._random.set_state(state["random"])
        self.version = int(state["version"])

    def export(self, folder: Path) -> None:
        """Write the policy, in `published_dtype`, with its tokenizer as a folder that `transformers` loads as it is."""
        models.unbundle(models.bundle(self._folder), folder)
        copy = models.load_model(self._folder, dtype=self.published_dtype, device=torch.device("cpu"), weights=False)
        copy.load_state_dict(self._model.state_dict())
        copy.save_pretrained(folder)

    def _set_learning_rate(self) -> float:
        """Linear warm-up to the peak, then constant."""
        settings = self._settings.optimizer
        rate = settings.learning_rate * min(1.0, (self.version + 1) / max(settings.warmup_steps, 1))
        for group in self._adamw.param_groups:
            group["lr"] = rate
        return rate

    def _split(self, groups: list[list[Sample]]) -> tuple[list[_Minibatch], int]:
        """Shuffled groups as equal minibatches, those that teach nothing left out; samples no forward pass can hold."""
        settings = self._settings
        order = torch.randperm(len(groups), generator=self._random).tolist()
        minibatches = []
        refused = 0
        for number in range(settings.minibatches):
            chosen = [groups[index] for index in order[number :: settings.minibatches]]
            samples = [sample for group in chosen for sample in group]
            weights = sequence_weights(
                [sample.sampled for sample in samples], settings.objective.aggregation, settings.sampling.max_tokens
            )
            weight_of = {id(sample): weight for sample, weight in zip(samples, weights, strict=True)}
            teaching = [[sample for sample in group if sample.advantage and sample.sampled] for group in chosen]
            micro_batches, over_budget = pack(teaching, settings.token_budget)
            refused += len(over_budget)
            if micro_batches:
                minibatches.append([self._prepare(micro_batch, weight_of) for micro_batch in micro_batches])
        return minibatches, refused

    def _prepare(self, micro_batch: MicroBatch, weight_of: dict[int, float]) -> _Scored:
        weights = [weight_of[id(sample)] for sample in micro_batch.samples]
        return _Scored(Batch.of(micro_batch, self._device), torch.tensor(weights, device=self._device))

    def _score_start(self, minibatches: list[_Minibatch], tally: Tally, heartbeat: Callable[[], None]) -> None:
        """Fix the proximal policy of every minibatch but the first, whose own forward pass is the step's start."""
        for minibatch in minibatches[1:]:
            for item in minibatch:
                with torch.no_grad():
                    item.start_BT = self._logprobs(item.batch)
                tally.start(item.start_BT, item.batch.behaviour_BT, item.batch.mask_BT)
                heartbeat()

    def _accumulate(self, minibatch: _Minibatch, tally: Tally, heartbeat: Callable[[], None], *, first: bool) -> Tensor:
        """Add the minibatch's gradient to the parameters', one micro-batch at a time; its loss, a scalar."""
        total = torch.zeros((), device=self._device)
        for item in minibatch:
            batch = item.batch
            current_BT = self._logprobs(batch)
            start_BT = current_BT.detach() if item.start_BT is None else item.start_BT
            if first:
                tally.start(start_BT, batch.behaviour_BT, batch.mask_BT)
            inputs = Inputs.of(current_BT, start_BT, batch.behaviour_BT, batch.advantages_B, batch.mask_BT)
            loss_BT, sums = self._objective.token_loss(inputs)
            loss = (loss_BT * item.weights_B.unsqueeze(-1)).sum()
            loss.backward()
            tally.current(inputs, batch.mask_BT.sum(), sums)
            total += loss.detach()
            heartbeat()
        return total

    def _apply(self) -> float | None:
        """Clip the accumulated gradient and update; its norm before clipping, None where it is not finite."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        finite = bool(norm.isfinite())
        if finite:
            torch.nn.utils.clip_grads_with_norm_(
                self._parameters.values(), self._settings.optimizer.max_grad_norm, norm
            )
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return float(norm) if finite else None

    def _logprobs(self, batch: Batch) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.precision == "bf16"):
            return completion_logprobs(self._model, batch)
