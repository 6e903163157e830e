"""The distribution that tokens are actually sampled from, defined once for the engine and for the learner.

Temperature first, then top-k, then top-p on what top-k left, then normalisation. Tokens tied with the last one inside
a cut-off stay in, so that the support follows from the logits alone and never from a sorting order. Every importance
ratio stands on both sides using these functions: a ratio between a truncated and a full distribution is biased.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")
WIDTH = 256  # vocabulary entries that sampling sums up at once
HEAD = 1024  # most likely tokens among which the nucleus is looked for first
BLOCK = 32  # rows of logits widened to fp32 at once


def distribution_logprobs(logits_BV: Tensor, temperature: float | Tensor, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Natural log-probs [B, V] in fp32 of the distribution sampled; -inf outside the support.

    `temperature` is one number or a tensor [B]; 0 is greedy: 0 for the arg max (the first of equals), -inf elsewhere.
    `top_p` in (0, 1] keeps the smallest set of tokens that reaches that mass, `top_k` the k most likely; 1 and 0 turn
    them off. Differentiable, the support being held fixed.
    """
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=logits_BV.device)
    greedy = (temperatures == 0).expand(logits_BV.shape[0])
    scaled = logits_BV.float() / torch.where(greedy, 1.0, temperatures).unsqueeze(-1)
    if greedy.any():
        first = torch.nn.functional.one_hot(scaled.argmax(-1), scaled.shape[-1]).bool()
        scaled = scaled.masked_fill(greedy.unsqueeze(-1) & ~first, NEGATIVE_INFINITY)
    if 0 < top_k < scaled.shape[-1]:
        least = scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, NEGATIVE_INFINITY)
    if top_p < 1.0:
        scaled = scaled.masked_fill(_outside_nucleus(scaled.detach(), top_p), NEGATIVE_INFINITY)
    return scaled.log_softmax(-1)


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float | Tensor, top_p: float = 1.0, top_k: int = 0
) -> Tensor:
    """Log-probs in fp32, shaped as `tokens` [...], of given tokens under `logits` [..., V]; differentiable once.

    `temperature` is one number or a tensor shaped as `tokens`. Without top-p, top-k and greedy rows neither the forward
    nor the backward pass keeps an fp32 copy of the logits.

    A token outside the support has log-prob -inf: the learner's arithmetic, or its newer policy, can put a token that
    was sampled just past a cut-off. There is no finite ratio for it: the caller drops the token from its loss, with
    `torch.where(logprobs.isfinite(), logprobs, 0)` and a zero in the mask (its gradient is then 0), and counts it.
    """
    flat_NV, flat_N = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1).long()
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).expand(tokens.shape)
    temperatures = temperatures.reshape(-1)
    if top_p >= 1.0 and top_k <= 0 and bool((temperatures > 0).all()):
        result: Tensor = _FullSoftmax.apply(flat_NV, flat_N, temperatures)
    else:
        full = distribution_logprobs(flat_NV, temperatures, top_p, top_k)
        result = full.gather(-1, flat_N.unsqueeze(-1)).squeeze(-1)
    return result.view(tokens.shape)


def sample(
    logits_BV: Tensor, uniforms: list[float], temperature: float, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B] in fp32, drawn by inverting the cumulative distribution at `uniforms` [B].

    One number in [0, 1) per row decides its token, whatever the other rows hold. A row whose logits are not finite gets
    a log-prob that is not finite.
    """
    if temperature == 0:
        highest = logits_BV.float().max(-1)
        return highest.indices, torch.where(highest.values.isfinite(), 0.0, highest.values)
    if top_p < 1.0 or 0 < top_k < logits_BV.shape[-1]:
        probabilities = distribution_logprobs(logits_BV, temperature, top_p, top_k).exp_()
    else:
        scaled = logits_BV.float()
        probabilities = (scaled if temperature == 1 else scaled / temperature).softmax(-1)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device).unsqueeze(-1)
    tokens = _invert(probabilities, targets)
    return tokens, probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()


def _invert(probabilities_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """The first token [B] whose cumulative probability exceeds `uniforms` [B, 1]: its block first, then inside."""
    width = probabilities_BV.shape[-1]
    padded = torch.nn.functional.pad(probabilities_BV, (0, -width % WIDTH)).view(len(probabilities_BV), -1, WIDTH)
    blocks = padded.sum(-1).cumsum(-1, dtype=torch.float64)
    targets = uniforms_B1 * blocks[:, -1:]
    block = torch.searchsorted(blocks, targets, right=True).clamp_(max=blocks.shape[-1] - 1)
    before = torch.where(block > 0, blocks.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    inside = padded[torch.arange(len(padded), device=padded.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    # A block's sum is rounded to fp32 and may pass its last cumulative value by a hair: stay below that.
    rest = torch.minimum(targets - before, inside[:, -1:] * (1 - 1e-12))
    offset = torch.searchsorted(inside, rest, right=True).clamp_(max=WIDTH - 1)
    return (block * WIDTH + offset)[:, 0].clamp_(max=width - 1)


def _outside_nucleus(scaled_BV: Tensor, top_p: float) -> Tensor:
    """True where a token is less likely than the last one that the nucleus needs to reach its mass."""
    probabilities = scaled_BV.softmax(-1)
    # The nucleus is nearly always small: look for its end among the most likely tokens before sorting all.
    for count in sorted({min(HEAD, probabilities.shape[-1]), probabilities.shape[-1]}):
        ordered = probabilities.topk(count, dim=-1).values
        cumulative = ordered.cumsum(-1)
        if count == probabilities.shape[-1] or bool((cumulative[:, -1] >= top_p).all()):
            break
    last = (cumulative - ordered < top_p).sum(-1, keepdim=True) - 1
    return probabilities < ordered.gather(-1, last)


class _FullSoftmax(torch.autograd.Function):
    """log softmax(logits / T)[token] without an fp32 copy of all logits: rows are widened block by block."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, tokens_N: Tensor, temperatures_N: Tensor) -> Tensor:
        normalisers = torch.empty_like(temperatures_N)
        for rows in _blocks(len(tokens_N)):
            normalisers[rows] = (logits_NV[rows] / temperatures_N[rows, None]).logsumexp(-1)
        ctx.save_for_backward(logits_NV, tokens_N, temperatures_N, normalisers)
        chosen = logits_NV.gather(-1, tokens_N[:, None]).squeeze(-1).float()
        return chosen / temperatures_N - normalisers

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, tokens_N, temperatures_N, normalisers = ctx.saved_tensors
        scale_N = gradients[0] / temperatures_N
        out = torch.empty_like(logits_NV)
        for rows in _blocks(len(tokens_N)):
            # d logprob / d logits = (onehot(token) - softmax) / T
            block = logits_NV[rows] / temperatures_N[rows, None]  # fp32, as the temperatures are
            block.sub_(normalisers[rows, None]).exp_().mul_(-scale_N[rows, None])
            block.scatter_add_(-1, tokens_N[rows, None], scale_N[rows, None])
            out[rows] = block
        return out, None, None


def _blocks(count: int) -> list[slice]:
    return [slice(start, start + BLOCK) for start in range(0, count, BLOCK)]
