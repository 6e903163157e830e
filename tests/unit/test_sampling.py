"""The distribution sampled is the distribution recorded, and the learner computes the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from infra.sampling import distribution_logprobs, sample, token_logprobs

SETTINGS = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.6, 1.0, 5), (1.0, 0.6, 0), (0.8, 0.8, 7), (1.0, 1e-6, 0), (1.0, 1.0, 1)]


def logits(rows: int = 4, vocabulary: int = 300, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def reference(row: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Probabilities of one row, written from the definition and in float64."""
    scaled = row.astype(np.float64) / temperature
    kept = np.ones(len(row), bool)
    if top_k:
        kept = scaled >= np.sort(scaled)[-top_k]
    probabilities = np.where(kept, np.exp(scaled - scaled.max()), 0)
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    needed = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    probabilities[order[needed:]] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS)
@pytest.mark.parametrize("vocabulary", [5, 300, 5000])
def test_the_distribution_follows_its_definition(vocabulary: int, temperature: float, top_p: float, top_k: int) -> None:
    rows = logits(vocabulary=vocabulary)
    result = distribution_logprobs(rows, temperature, top_p, top_k).exp().numpy()
    for row, probabilities in zip(rows.numpy(), result, strict=True):
        np.testing.assert_allclose(probabilities, reference(row, temperature, top_p, min(top_k, vocabulary)), atol=1e-5)


def test_a_nucleus_wider_than_its_head_is_found() -> None:
    flat = torch.zeros(1, 5000) + torch.linspace(0, 1e-3, 5000)
    inside = distribution_logprobs(flat, 1.0, top_p=0.5).isfinite().sum()
    assert abs(int(inside) - 2500) < 5


def test_temperature_zero_is_the_arg_max() -> None:
    rows = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]])
    result = distribution_logprobs(rows, 0.0)
    assert result.tolist() == [[-math.inf, 0.0, -math.inf], [0.0, -math.inf, -math.inf]]


def test_temperatures_may_differ_by_row_and_one_may_be_greedy() -> None:
    rows = logits(3)
    mixed = distribution_logprobs(rows, torch.tensor([1.0, 0.0, 0.5]))
    for index, temperature in enumerate((1.0, 0.0, 0.5)):
        torch.testing.assert_close(mixed[index], distribution_logprobs(rows, temperature)[index])


def test_ties_at_the_cut_off_stay_in() -> None:
    rows = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert distribution_logprobs(rows, 1.0, top_k=2).isfinite().sum() == 3
    assert distribution_logprobs(rows, 1.0, top_p=0.4).isfinite().sum() == 3


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [*SETTINGS, (0.0, 1.0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_sampled_carries_the_log_prob_the_learner_computes(
    dtype: torch.dtype, temperature: float, top_p: float, top_k: int
) -> None:
    rows = logits(64).to(dtype)
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(1)).tolist()
    tokens, logprobs = sample(rows, uniforms, temperature, top_p, top_k)
    torch.testing.assert_close(logprobs, token_logprobs(rows, tokens, temperature, top_p, top_k), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.3, 0.7, 0), (1.0, 0.9, 9)]
)
@pytest.mark.parametrize("vocabulary", [11, 700])
def test_frequencies_match_the_distribution(vocabulary: int, temperature: float, top_p: float, top_k: int) -> None:
    count = 20_000
    row = logits(1, vocabulary)
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tolist()
    tokens, _ = sample(row.expand(count, -1), uniforms, temperature, top_p, top_k)
    expected = distribution_logprobs(row, temperature, top_p, top_k).exp()[0].double() * count
    seen = torch.bincount(tokens, minlength=vocabulary).double()
    assert seen[expected == 0].sum() == 0
    common = expected >= 5  # chi-square needs counts; the rare ones are pooled
    pooled = torch.cat([expected[common], expected[~common].sum()[None]])
    drawn = torch.cat([seen[common], seen[~common].sum()[None]])
    used = pooled > 0
    statistic = float((((drawn - pooled) ** 2)[used] / pooled[used]).sum())
    freedom = int(used.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("uniform", [0.0, 2.0**-40, 0.5, 1.0 - 2.0**-40])
def test_the_ends_of_the_unit_interval_give_tokens_of_the_support(uniform: float) -> None:
    rows = logits(3, 1000)
    tokens, logprobs = sample(rows, [uniform] * 3, 1.0, top_k=4)
    assert logprobs.isfinite().all()
    assert distribution_logprobs(rows, 1.0, top_k=4).gather(1, tokens[:, None]).isfinite().all()


def test_a_row_decides_alone() -> None:
    rows = logits(8)
    uniforms = [0.1 * i for i in range(8)]
    together, _ = sample(rows, uniforms, 1.0)
    alone = [int(sample(rows[i : i + 1], uniforms[i : i + 1], 1.0)[0]) for i in range(8)]
    assert together.tolist() == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_show_in_their_own_row_only(temperature: float) -> None:
    rows = logits(3)
    rows[1, 7] = math.nan
    tokens, logprobs = sample(rows, [0.3, 0.3, 0.3], temperature)
    assert logprobs.isfinite().tolist() == [True, False, True]
    assert (tokens < rows.shape[1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lean_gradient_is_the_gradient(dtype: torch.dtype) -> None:
    lean, plain = (logits(70).to(dtype).requires_grad_() for _ in range(2))
    tokens = torch.randint(0, 300, (70,), generator=torch.Generator().manual_seed(3))
    temperatures = torch.linspace(0.5, 1.5, 70)
    weights = torch.linspace(-1, 2, 70)
    before = lean.detach().clone()
    (token_logprobs(lean, tokens, temperatures) * weights).sum().backward()
    full = (plain.float() / temperatures[:, None]).log_softmax(-1)
    (full.gather(1, tokens[:, None])[:, 0] * weights).sum().backward()
    assert lean.grad is not None and plain.grad is not None
    torch.testing.assert_close(lean.grad, plain.grad, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(lean.detach(), before)


def test_leading_dimensions_are_kept() -> None:
    rows = logits(6).view(2, 3, 300)
    tokens = torch.arange(6).view(2, 3)
    result = token_logprobs(rows, tokens, 1.0)
    assert result.shape == (2, 3)
    torch.testing.assert_close(result, rows.log_softmax(-1).gather(-1, tokens[..., None])[..., 0])


def test_a_token_outside_the_support_can_be_dropped_without_a_trace_in_the_gradient() -> None:
    rows = torch.tensor([[3.0, 2.0, -5.0], [0.0, 1.0, 2.0]], requires_grad=True)
    logprobs = token_logprobs(rows, torch.tensor([2, 2]), 1.0, top_k=2)
    assert logprobs[0] == -math.inf
    inside = logprobs.isfinite()
    torch.where(inside, logprobs, 0.0).sum().backward()
    assert rows.grad is not None and rows.grad.isfinite().all()
    assert (rows.grad[0] == 0).all() and (rows.grad[1] != 0).any()
