"""A model and its cache as four operations: prefill prompts, seat completions, decode one token each, take weights.

Synchronous and single-threaded; `torch_engine` calls it from the one thread that owns the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from contracts.messages import Sampling
from generator.engines import attention
from generator.engines.base import EngineError
from generator.engines.slots import SlotCache
from infra.errors import UserError
from infra.sampling import sample

SHRINK_TOKENS = 16384  # an idle cache larger than this gives its memory back


class Prefill:
    """Prompts of several groups on their way through the model, right-padded: causality hides the padding."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self.lengths = [len(prompt) for prompt in prompts]
        self.cache = DynamicCache()
        self.done = 0  # columns computed
        self.logits: Tensor | None = None  # [P, V] after the last token of each prompt, once complete
        width = max(self.lengths)
        self.tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])


class Decoder:
    """Raises `UserError` for a model whose layers keep anything but plain attention caches."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(False)
        self.window = _window(model)
        self.vocabulary = model.get_input_embeddings().num_embeddings
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(attention.NAME)
        self.device = model.device
        self.cache = SlotCache(model.config.num_hidden_layers, model.dtype, model.device)

    def advance(self, prefill: Prefill, tokens: int) -> None:
        """Run the next columns, as many as make up `tokens`, of a prefill; sets its logits with the last of them."""
        end = min(prefill.done + max(1, tokens // len(prefill.lengths)), max(prefill.lengths))
        complete = end == max(prefill.lengths)
        # Several prompts are always complete at once; only a single one is ever run in pieces.
        lasts = torch.tensor([length - 1 for length in prefill.lengths]) - prefill.done
        columns, which = (lasts if complete else lasts.new_tensor([0])).unique(return_inverse=True)
        logits = self.model(
            prefill.tokens[:, prefill.done : end].to(self.device),
            position_ids=torch.arange(prefill.done, end, device=self.device)[None],
            past_key_values=prefill.cache,
            use_cache=True,
            logits_to_keep=columns.to(self.device),
        ).logits
        prefill.done = end
        if complete:
            prefill.logits = logits[torch.arange(len(lasts), device=self.device), which.to(self.device)]

    def decode(self, tokens: list[int], lengths: list[int]) -> Tensor:
        """Feed one token to every active slot, whose cache holds `lengths` tokens; returns logits [A, V]."""
        positions, mask = self.cache.begin(lengths)
        ids = torch.tensor(tokens, device=self.device)[:, None]
        output = self.model(
            ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def release(self, slots: list[int], *, poisoned: bool = False) -> list[tuple[int, int]]:
        """Free slots and return the moves (from, to); `poisoned` ones held numbers that are not finite."""
        moves = self.cache.free(slots)
        if self.cache.active == 0 and (poisoned or self.cache.capacity > SHRINK_TOKENS):
            self.cache.clear()
        elif poisoned:
            self.cache.scrub()
        return moves

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a policy into the model; raises `EngineError`, before anything is touched, when it does not fit."""
        for target, source in fit(self.model, weights):
            target.copy_(source)


def draw(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """One token and its log-prob per row of `logits` [B, V], each from its own distribution."""
    alike: dict[tuple[float, float, int], list[int]] = defaultdict(list)
    for row, sampling in enumerate(samplings):
        alike[(sampling.temperature, sampling.top_p, sampling.top_k)].append(row)
    tokens, logprobs = [0] * len(samplings), [0.0] * len(samplings)
    for (temperature, top_p, top_k), rows in alike.items():
        chosen = logits if len(rows) == len(samplings) else logits[torch.tensor(rows, device=logits.device)]
        drawn, of_drawn = sample(chosen, [uniforms[row] for row in rows], temperature, top_p, top_k)
        for row, token, logprob in zip(rows, drawn.tolist(), of_drawn.tolist(), strict=True):
            tokens[row], logprobs[row] = token, logprob
    return tokens, logprobs


def fit(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs (the model's tensor, its new value) that together set all of the model.

    Tied tensors may come under any of their names. Raises `EngineError` naming the first tensor that is unknown,
    missing, of another shape, or not finite.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)  # tied tensors are one object
    for name, tensor in weights.items():
        if name not in state:
            raise EngineError(f"weights do not fit the model: it has no tensor {name}")
        if tensor.shape != state[name].shape:
            expected, got = list(state[name].shape), list(tensor.shape)
            raise EngineError(f"weights do not fit the model: {name} has shape {got}, expected {expected}")
        if tensor.numel() and tensor.is_floating_point() and not all(bound.isfinite() for bound in tensor.aminmax()):
            raise EngineError(f"weights: {name} holds numbers that are not finite")
    given = {id(state[name]) for name in weights}
    missing = [name for name, tensor in state.items() if id(tensor) not in given]
    if missing:
        raise EngineError(
            f"weights do not fit the model: {len(missing)} tensors are missing, the first is {missing[0]}"
        )
    return [(state[name], tensor) for name, tensor in weights.items()]


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """The tokens that end a completion: those of the model's configuration and the tokenizer's."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    listed: Sequence[int | None] = configured if isinstance(configured, list) else [configured]
    return {token for token in [*listed, tokenizer.eos_token_id] if token is not None}


def _window(model: PreTrainedModel) -> int:
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.is_encoder_decoder or not kinds <= {"full_attention", "sliding_attention"}:
        raise UserError(f"model type {config.model_type}: the torch engine samples decoders with plain attention only")
    window = int(config.max_position_embeddings)
    sliding = getattr(config, "sliding_window", None)
    # Inside its sliding window a layer attends as any other does.
    return min(window, int(sliding)) if sliding and getattr(config, "use_sliding_window", True) else window
