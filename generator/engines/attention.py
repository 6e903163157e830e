"""Attention of one new token per row over its row's cache.

torch's fused CPU kernel is made for long queries: for a query of one token it takes most of a decode step. Here the
query heads that share a key head become the rows of one small matrix product, so keys and values are neither repeated
nor converted. Longer queries (prefill) go to transformers' own function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "tailrace_decode"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Query [B, H, Q, D] over key [B, K, S, D] and value [B, K, S, E] -> [B, Q, H, E]; K divides H.

    With Q = 1 the mask is additive, [B, 1, 1, S].
    """
    batch, heads, length, width = query.shape
    if length > 1 or attention_mask is None or attention_mask.dtype == torch.bool:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.view(batch, key.shape[1], -1, width) * (width**-0.5 if scaling is None else scaling)
    scores = torch.matmul(grouped, key.transpose(2, 3)) + attention_mask
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value).view(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
