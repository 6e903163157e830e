"""The decoder layers of a transformer, and their activations recomputed instead of kept."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from infra.errors import UserError

SHORT_ATTENTION = 256  # keys; below, torch's blockwise attention on CPU loses to the plain one by a factor of two


def attention(keys: int, device: torch.device) -> AbstractContextManager[None]:
    """The context in which attention over that many keys is fastest."""
    if device.type == "cpu" and keys < SHORT_ATTENTION:
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers in order of computation. Raises `UserError` when the model's class does not name them."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.base_model.modules() if type(module).__name__ in names]
    if not layers:
        raise UserError(
            f"model class {type(model).__name__} does not name its decoder layers, which learner.ranks above 1 and "
            "learner.gradient_checkpointing need; use a model of the Llama, Qwen or Mistral kind"
        )
    return layers


def recompute_activations(model: Any) -> None:
    """Keep only the inputs of every decoder layer and its keys and values; the backward pass computes the rest again.

    Chen et al., arXiv 1604.06174. Changes how the model's layers compute, not what. The layers must be run with a
    `DynamicCache`.
    """
    for index, layer in enumerate(decoder_layers(model)):
        layer.forward = _recomputed(layer.forward, index)


def _recomputed(forward: Callable[..., Any], index: int) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        hidden_BTD, cache = arguments.pop("hidden_states"), arguments.pop("past_key_values")
        before = copy.copy(cache.layers[index])

        def compute(hidden_BTD: Tensor) -> tuple[Any, Any]:
            # Every time on a cache of its own: the second time must not append to what the first one left, and the
            # first cache, with the keys and values of all layers, must not be kept alive for the second.
            own = DynamicCache()
            own.layers = [copy.copy(before)] * (index + 1)
            with attention(before.get_seq_length() + hidden_BTD.shape[1], hidden_BTD.device):
                output = forward(hidden_states=hidden_BTD, past_key_values=own, **arguments)
            return output, own.layers[index]

        output, cache.layers[index] = checkpoint(compute, hidden_BTD, use_reentrant=False, preserve_rng_state=False)
        return output

    return run
