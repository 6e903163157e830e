"""Log-probs of sampled tokens under a model, with the prompt that a group shares computed once.

The prompt runs with gradient into a key-value cache, the cache rows are repeated for the group's completions, only the
completions run on it, and the backward pass goes through both: the same loss and gradient as running every sequence in
full, for a fraction of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from infra.errors import UserError
from infra.sampling import token_logprobs
from learner.layers import attention
from learner.packing import MicroBatch

LOGITS_AT_ONCE = 2**26  # numbers; with more of them the head is recomputed in the backward pass instead of kept


@dataclass(frozen=True)
class Batch:
    """A micro-batch as padded tensors: G prompts (left-padded to P), B completions (right-padded to T).

    T is at least 2, so that every batch takes both forward passes: ranks compute in step.
    """

    prompts_GP: Tensor  # int64
    prompt_mask_GP: Tensor  # bool, False on padding
    owner_B: Tensor  # int64, row of the completion's prompt
    completions_BT: Tensor  # int64
    mask_BT: Tensor  # bool, True where the policy sampled
    behaviour_BT: Tensor  # float32
    temperatures_BT: Tensor  # float32, 1 where not sampled
    advantages_B: Tensor  # float32
    top_p: float
    top_k: int

    @classmethod
    def of(cls, micro_batch: MicroBatch, device: torch.device) -> Batch:
        """Pad the samples of a micro-batch, in its row order."""
        samples, groups = micro_batch.samples, micro_batch.groups
        prompts = [group[0].prompt for group in groups]
        longest = max(len(prompt) for prompt in prompts)
        width = max(2, *(len(sample.completion) for sample in samples))
        mask_BT = _padded([sample.mask for sample in samples], bool, width).to(device)
        temperatures_BT = _padded([sample.temperatures for sample in samples], np.float32, width).to(device)
        top_p, top_k = micro_batch.truncation
        return cls(
            prompts_GP=_padded(prompts, np.int64, longest, left=True).to(device),
            prompt_mask_GP=_padded([np.ones(len(prompt)) for prompt in prompts], bool, longest, left=True).to(device),
            owner_B=torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g) for g in groups])).to(device),
            completions_BT=_padded([sample.completion for sample in samples], np.int64, width).to(device),
            mask_BT=mask_BT,
            behaviour_BT=_padded([sample.behaviour_logprobs for sample in samples], np.float32, width).to(device),
            temperatures_BT=torch.where(mask_BT, temperatures_BT, 1.0),
            advantages_B=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32, device=device),
            top_p=top_p,
            top_k=top_k,
        )

    @classmethod
    def empty(cls, device: torch.device) -> Batch:
        """A batch without a sampled token: it costs a forward and a backward pass, and its gradient is 0."""
        zeros_12 = torch.zeros(1, 2, device=device)
        return cls(
            prompts_GP=torch.zeros(1, 1, dtype=torch.int64, device=device),
            prompt_mask_GP=torch.ones(1, 1, dtype=torch.bool, device=device),
            owner_B=torch.zeros(1, dtype=torch.int64, device=device),
            completions_BT=zeros_12.long(),
            mask_BT=zeros_12.bool(),
            behaviour_BT=zeros_12,
            temperatures_BT=zeros_12 + 1.0,
            advantages_B=zeros_12[:, 0],
            top_p=1.0,
            top_k=0,
        )


class Scorer(nn.Module):
    """Both forward passes and the output head as one module: the root of what is sharded over ranks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """`completion_logprobs` under the model."""
        return completion_logprobs(self.model, batch)


def completion_logprobs(model: Any, batch: Batch) -> Tensor:
    """Log-probs [B, T], fp32, of the completions' tokens under the distribution sampled; 0 where the mask is 0.

    A token outside the support of top-p or top-k has -inf. Only sampled tokens reach the output head.
    """
    hidden_BTD = _hidden(model, batch)
    rows_MD = hidden_BTD[batch.mask_BT]
    tokens_M, temperatures_M = batch.completions_BT[batch.mask_BT], batch.temperatures_BT[batch.mask_BT]
    head = model.get_output_embeddings()

    def score(rows: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
        return token_logprobs(head(rows), tokens, temperatures, batch.top_p, batch.top_k)

    size = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
    pieces = list(zip(rows_MD.split(size), tokens_M.split(size), temperatures_M.split(size), strict=True))
    if len(pieces) == 1:
        scored = [score(*pieces[0])]
    else:
        scored = [checkpoint(score, *piece, use_reentrant=False) for piece in pieces]
    logprobs_BT = torch.zeros_like(batch.behaviour_BT)
    logprobs_BT[batch.mask_BT] = torch.cat(scored)
    return logprobs_BT


def check_architecture(model: Any, name: str) -> None:
    """Raise `UserError` unless the model's logits are its output head applied to its last hidden state.

    Some families scale or cap their logits on the way; scoring only the sampled tokens would leave that out.
    """
    tokens = torch.tensor([[1, 0]], device=model.device)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    head = model.get_output_embeddings()
    with torch.no_grad():
        plain = head is not None and torch.allclose(
            head(model.base_model(**inputs).last_hidden_state).float(),
            model(**inputs).logits.float(),
            rtol=1e-3,
            atol=1e-3,
        )
    if not plain:
        raise UserError(
            f"model {name}: {type(model).__name__} changes its logits after the output head, which the learner does "
            "not support; use a model of the Llama, Qwen or Mistral kind"
        )


def _hidden(model: nn.Module, batch: Batch) -> Tensor:
    """Hidden states [B, T, D] from which the completions' tokens are predicted."""
    base: Any = model.base_model
    inputs_BT = batch.completions_BT[:, :-1]
    keys = batch.prompts_GP.shape[1] + inputs_BT.shape[1]
    with attention(keys, batch.prompts_GP.device):
        lengths_G = batch.prompt_mask_GP.sum(-1)
        cache = DynamicCache(config=base.config)
        positions_GP = (batch.prompt_mask_GP.cumsum(-1) - 1).clamp(min=0)
        prompt_GPD = base(
            input_ids=batch.prompts_GP,
            attention_mask=batch.prompt_mask_GP.long(),
            position_ids=positions_GP,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        first_B1D = prompt_GPD[batch.owner_B, -1:]
        cache.batch_select_indices(batch.owner_B)
        # Padding on the right is left unmasked: nothing before it attends to it, and what it computes is not used.
        mask_BK = torch.cat([batch.prompt_mask_GP[batch.owner_B], torch.ones_like(inputs_BT, dtype=torch.bool)], 1)
        rest_BTD = base(
            input_ids=inputs_BT,
            attention_mask=mask_BK.long(),
            position_ids=lengths_G[batch.owner_B, None] + torch.arange(inputs_BT.shape[1], device=inputs_BT.device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
    return torch.cat([first_B1D, rest_BTD], dim=1)


def _padded(rows: list[np.ndarray], dtype: Any, width: int, *, left: bool = False) -> Tensor:
    out = np.zeros((len(rows), width), dtype)
    for index, row in enumerate(rows):
        if left:
            out[index, out.shape[1] - len(row) :] = row
        else:
            out[index, : len(row)] = row
    return torch.from_numpy(out)
