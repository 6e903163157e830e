"""One rank's part of the policy and its optimizer. Of several ranks, all run the same methods at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from contracts.policies import TensorSpec
from infra import models
from infra.weights import pack as pack_weights
from learner.forward import Batch, Scorer, check_architecture
from learner.layers import decoder_layers, recompute_activations
from learner.lora import add_adapters, merged_state
from learner.metrics import Tally
from learner.objectives import Inputs, objective
from learner.packing import MicroBatch
from learner.settings import LearnerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class Piece(NamedTuple):
    """One forward and backward pass of a rank."""

    micro_batch: MicroBatch | None  # None: a rank that has less to do keeps the others company
    weights: list[float]  # what a sample's token losses are multiplied by, in row order


Minibatch = list[Piece]  # what one optimizer update is computed from; as many pieces on every rank


@dataclass
class Trained:
    """What a rank's part of a step came to."""

    losses: list[float]  # per minibatch, summed over this rank's samples
    norms: list[float | None]  # per minibatch, of the whole gradient before clipping; None where it is not finite
    tally: Tally


@dataclass
class _Scored:
    """A micro-batch on its way through a step."""

    batch: Batch
    weights_B: Tensor  # float32
    start_BT: Tensor | None = None  # float32, log-probs at the step's start where they were computed beforehand


class Worker:
    """The model, or this rank's shards of it, and AdamW on them.

    Master weights and moments are fp32; with `precision = "bf16"` the forward pass runs under autocast, which rounds
    the matrices exactly as publication does; adapters it rounds one by one, publication their sum with the matrix, and
    the difference shows in `mismatch_kl`. With a mesh, FSDP2 shards every parameter over its ranks: each decoder
    layer is gathered when it computes, and its gradient is summed over the ranks, not averaged, because the weights of
    samples are those of the whole minibatch already.
    """

    def __init__(
        self,
        folder: Path,
        settings: LearnerSettings,
        device: torch.device,
        *,
        seed: int,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Load the policy of version 0. Raises `UserError` on an unusable model folder."""
        self._settings = settings
        self._device = device
        self._mesh = mesh
        place = device if mesh is None else torch.device("cpu")  # shards are moved to the device one layer at a time
        self.model = models.load_model(folder, dtype=torch.float32, device=place)
        check_architecture(self.model, str(folder))
        if settings.lora.rank:
            add_adapters(self.model, settings.lora, seed=seed)
        if settings.gradient_checkpointing:
            recompute_activations(self.model)
        self._scorer = Scorer(self.model)
        if mesh is not None:
            _shard(self._scorer, mesh)
        self.parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        self._adamw = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.optimizer.learning_rate,
            betas=(settings.optimizer.beta1, settings.optimizer.beta2),
            weight_decay=settings.optimizer.weight_decay,
            fused=True,
        )
        self._objective = objective(settings.objective)

    @property
    def published_dtype(self) -> torch.dtype:
        """What weights are rounded to when they leave the trainer: the precision its forward pass computes in."""
        return torch.bfloat16 if self._settings.precision == "bf16" else torch.float32

    def train(
        self, minibatches: list[Minibatch], rate: float, *, heartbeat: Callable[[], None] = lambda: None
    ) -> Trained:
        """One optimizer update per minibatch, none where its gradient is not finite."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        tally = Tally()
        prepared = [[self._prepare(piece) for piece in minibatch] for minibatch in minibatches]
        if self._objective.needs_proximal:
            self._score_start(prepared, tally, heartbeat)
        trained = Trained([], [], tally)
        for number, minibatch in enumerate(prepared):
            trained.losses.append(float(self._accumulate(minibatch, tally, heartbeat, first=number == 0)))
            trained.norms.append(self._apply())
        trained.tally = Tally.sum([tally])  # numbers instead of tensors on this rank's device
        return trained

    def weights(self) -> tuple[memoryview, list[TensorSpec]] | None:
        """A copy of the policy in `published_dtype`, laid out for publication, with adapters merged; on rank 0."""
        merged = merged_state(self.model, self._whole)
        if self._mesh is None:
            return pack_weights(dict(merged), self.published_dtype)
        tensors: dict[str, Tensor] = {}
        for name, tensor in merged:
            self._keep(tensors, name, tensor.to(self.published_dtype) if tensor.is_floating_point() else tensor)
        return pack_weights(tensors, self.published_dtype) if tensors else None

    def state(self) -> dict[str, Tensor]:
        """A copy, on the CPU, of trained parameters and moments; on rank 0, empty on the others."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._stateful():
            self._keep(tensors, name, self._whole(tensor))
        return tensors

    def load(self, steps: Mapping[str, float], *, state: Mapping[str, Tensor] | None = None) -> None:
        """Take over what `state` gave on rank 0; `steps` are AdamW's own, for each parameter that has moments."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._part(parameter, state, f"model.{name}"))
                self._adamw.state[parameter] = {}
                if name in steps:
                    self._adamw.state[parameter] = {
                        "step": torch.tensor(steps[name], device=self._device),
                        **{key: self._part(parameter, state, f"adamw.{key}.{name}") for key in MOMENTS},
                    }

    def _stateful(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            yield f"model.{name}", parameter
        for name, parameter in self.parameters.items():
            yield from ((f"adamw.{key}.{name}", value) for key, value in self._adamw.state[parameter].items())

    def _whole(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _keep(self, tensors: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if self._mesh is None or self._mesh.get_rank() == 0:  # the other ranks let go of it at once
            tensors[name] = tensor.to("cpu", copy=True).contiguous()

    def _part(self, like: Tensor, state: Mapping[str, Tensor] | None, name: str) -> Tensor:
        """This rank's part of a tensor that rank 0 has."""
        if not isinstance(like, DTensor):
            assert state is not None, "a lone rank is rank 0"
            return state[name].to(self._device, copy=True)
        whole = torch.empty(like.shape) if state is None else state[name]
        return distribute_tensor(whole.to(self._device), like.device_mesh, like.placements)

    def _prepare(self, piece: Piece) -> _Scored:
        if piece.micro_batch is None:
            return _Scored(Batch.empty(self._device), torch.zeros(1, device=self._device))
        return _Scored(Batch.of(piece.micro_batch, self._device), torch.tensor(piece.weights, device=self._device))

    def _score_start(self, minibatches: list[list[_Scored]], tally: Tally, heartbeat: Callable[[], None]) -> None:
        """Fix the proximal policy of every minibatch but the first, whose own forward pass is the step's start."""
        for minibatch in minibatches[1:]:
            for item in minibatch:
                with torch.no_grad():
                    item.start_BT = self._logprobs(item.batch)
                tally.start(item.start_BT, item.batch.behaviour_BT, item.batch.mask_BT)
                heartbeat()

    def _accumulate(
        self, minibatch: list[_Scored], tally: Tally, heartbeat: Callable[[], None], *, first: bool
    ) -> Tensor:
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
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = self._whole(torch.nn.utils.get_total_norm(gradients))
        finite = bool(norm.isfinite())
        if finite:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self._settings.optimizer.max_grad_norm, norm)
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return float(norm) if finite else None

    def _logprobs(self, batch: Batch) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.precision == "bf16"):
            logprobs_BT: Tensor = self._scorer(batch)
        return logprobs_BT


def _shard(scorer: Scorer, mesh: DeviceMesh) -> None:
    for layer in decoder_layers(scorer.model):
        fully_shard(layer, mesh=mesh)
    fully_shard(scorer, mesh=mesh)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the other way to a sum needs NCCL
