"""The trainer's gradient is that of the plain computation, and its state is all there is to a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from infra import models
from infra.errors import UserError
from infra.sampling import distribution_logprobs
from infra.weights import unpack
from learner.checkpoints import Checkpoints
from learner.forward import Batch, completion_logprobs
from learner.objectives import Inputs, objective, sequence_weights
from learner.packing import MicroBatch, Sample, pack
from learner.settings import LearnerSettings, ObjectiveSettings, OptimizerSettings, SamplingSettings
from learner.trainer import StepStats, Trainer

CPU = torch.device("cpu")
VOCABULARY = 40


@pytest.fixture
def tiny(tiny_folder: Path) -> Path:
    return tiny_folder


def make_settings(**changes: Any) -> LearnerSettings:
    fields: dict[str, Any] = {
        "model": "tiny",
        "precision": "fp32",
        "threads": 1,
        "device": "cpu",
        "sampling": SamplingSettings(max_tokens=9),
        "optimizer": OptimizerSettings(learning_rate=1e-3, warmup_steps=0, max_grad_norm=1e6),
    }
    return LearnerSettings(**(fields | changes))


def make_groups(seed: int = 0, *, ragged: bool = True, top_p: float = 1.0, top_k: int = 0) -> list[list[Sample]]:
    """Groups of 1 to 4 completions of 1 to 7 tokens with tool results in between, at two temperatures."""
    random = np.random.default_rng(seed)
    groups = []
    for number, size in enumerate([4, 1, 3, 2] if ragged else [3, 3, 3, 3]):
        prompt = random.integers(3, VOCABULARY, random.integers(1, 8) if ragged else 5).astype(np.int32)
        group = []
        for index in range(size):
            length = int(random.integers(1, 8)) if ragged else 5
            mask = (random.random(length) < 0.7).astype(np.uint8)
            mask[-1] = 1
            group.append(
                Sample(
                    rollout_id=f"{seed}.{number}.{index}",
                    prompt=prompt,
                    completion=random.integers(3, VOCABULARY, length).astype(np.int32),
                    mask=mask,
                    behaviour_logprobs=(-4.0 * random.random(length) * mask).astype(np.float32),
                    temperatures=(random.choice([0.7, 1.3], length) * mask).astype(np.float32),
                    advantage=float(random.normal()),
                    top_p=top_p,
                    top_k=top_k,
                )
            )
        groups.append(group)
    return groups


def plain_logprobs(model: Any, sample: Sample) -> Tensor:
    """Log-probs [C] of one completion from its whole sequence, without cache, padding or neighbours."""
    tokens = torch.tensor(np.concatenate([sample.prompt, sample.completion]), dtype=torch.long)
    logits = model(input_ids=tokens[None, :-1]).logits[0, len(sample.prompt) - 1 :]
    temperatures = torch.tensor(np.where(sample.mask, sample.temperatures, 1.0), dtype=torch.float32)
    full = distribution_logprobs(logits, temperatures, sample.top_p, sample.top_k)
    return torch.where(torch.tensor(sample.mask) == 1, full.gather(-1, tokens[len(sample.prompt) :, None])[:, 0], 0.0)


def plain_gradient(
    model: Any, groups: list[list[Sample]], settings: LearnerSettings, starts: dict[str, Tensor] | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of one minibatch, one sample at a time."""
    samples = [sample for group in groups for sample in group]
    weights = sequence_weights([s.sampled for s in samples], settings.objective.aggregation, 9)
    model.zero_grad()
    total = 0.0
    for sample, weight in zip(samples, weights, strict=True):
        current = plain_logprobs(model, sample)[None]
        start = current.detach() if starts is None else starts[sample.rollout_id]
        behaviour = torch.tensor(sample.behaviour_logprobs)[None]
        arguments = (torch.tensor([sample.advantage]), torch.tensor(sample.mask)[None])
        loss, _ = objective(settings.objective).token_loss(Inputs.of(current, start, behaviour, *arguments))
        (loss.sum() * weight).backward()
        total += float(loss.detach().sum() * weight)
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient_of(trainer: Trainer, settings: LearnerSettings) -> dict[str, Tensor]:
    """The gradient of the first update ever, read back from AdamW's first moment."""
    prefix, beta = "adamw.exp_avg.", settings.optimizer.beta1
    return {n.removeprefix(prefix): t / (1 - beta) for n, t in trainer.state().items() if n.startswith(prefix)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=rtol * max(scale, 1e-3), msg=name)


def load(folder: Path) -> Any:
    return models.load_model(folder, dtype=torch.float32, device=CPU)


ARCHITECTURES: dict[str, Any] = {
    "grouped queries, tied embeddings": lambda: LlamaForCausalLM(
        LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **SMALL)
    ),
    "sliding window": lambda: MistralForCausalLM(MistralConfig(num_key_value_heads=4, sliding_window=6, **SMALL)),
}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "attn_implementation": "sdpa",
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("truncation", [(1.0, 0), (0.9, 0), (1.0, 30)], ids=["full", "top-p", "top-k"])
def test_sharing_the_prompt_changes_neither_log_probs_nor_gradient(
    architecture: str, truncation: tuple[float, int]
) -> None:
    torch.manual_seed(0)
    model = ARCHITECTURES[architecture]().eval()
    groups = make_groups(top_p=truncation[0], top_k=truncation[1])
    batch = Batch.of(MicroBatch(groups), CPU)
    shared = completion_logprobs(model, batch)
    usable = shared.isfinite()
    factors = torch.randn(shared.shape)
    (torch.where(usable, shared, 0.0) * factors).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    rows = [sample for group in groups for sample in group]
    for row, sample in enumerate(rows):
        alone = plain_logprobs(model, sample)
        length = len(alone)
        torch.testing.assert_close(shared[row, :length].detach(), alone.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
        assert not shared[row, length:].any()
        (torch.where(usable[row, :length], alone, 0.0) * factors[row, :length]).sum().backward()
    assert_same(found, {name: p.grad for name, p in model.named_parameters()})
    assert bool(usable.all()) is (truncation == (1.0, 0)), "truncation must put some of the random tokens outside"


def test_the_head_recomputed_in_pieces_gives_the_same_gradient(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    gradients = []
    for limit in (2**26, 5 * VOCABULARY):
        monkeypatch.setattr("learner.forward.LOGITS_AT_ONCE", limit)
        model = load(tiny)
        completion_logprobs(model, Batch.of(MicroBatch(make_groups()), CPU)).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same(*gradients)


def test_long_sequences_take_the_blockwise_attention_to_the_same_result(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    batch, model = Batch.of(MicroBatch(make_groups()), CPU), load(tiny)
    plain = completion_logprobs(model, batch)
    monkeypatch.setattr("learner.layers.SHORT_ATTENTION", 0)
    torch.testing.assert_close(completion_logprobs(model, batch), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", ["decoupled_ppo", "gspo"])
@pytest.mark.parametrize("budget", [4096, 30, 16], ids=["one pass", "several passes", "split groups"])
def test_a_step_takes_the_gradient_of_the_plain_computation(
    tiny: Path, name: str, aggregation: str, budget: int
) -> None:
    chosen = ObjectiveSettings(name=name, aggregation=aggregation)  # type: ignore[arg-type]
    settings = make_settings(objective=chosen, token_budget=budget)
    groups, trainer, beats = make_groups(1), Trainer(tiny, settings, seed=1), []
    loss, expected = plain_gradient(load(tiny), groups, settings)
    stats = trainer.step(groups, heartbeat=lambda: beats.append(1))
    assert_same(gradient_of(trainer, settings), expected)
    assert stats.loss == pytest.approx(loss, rel=1e-5)
    norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in expected.values()))
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
    assert len(beats) == len(pack(groups, budget).micro_batches)
    assert trainer.version == 1


def test_samples_without_advantage_count_in_the_means(tiny: Path) -> None:
    settings = make_settings()
    groups = make_groups(1)
    groups[0] = [Sample(**(vars(sample) | {"advantage": 0.0})) for sample in groups[0]]
    trainer, beats = Trainer(tiny, settings, seed=1), []
    stats = trainer.step(groups, heartbeat=lambda: beats.append(1))
    assert_same(gradient_of(trainer, settings), plain_gradient(load(tiny), groups, settings)[1])
    assert stats.tokens == sum(sample.sampled for group in groups for sample in group)


def test_tokens_outside_the_truncated_support_are_counted_and_teach_nothing(tiny: Path) -> None:
    settings = make_settings()
    groups = make_groups(1, top_k=20)
    trainer = Trainer(tiny, settings, seed=1)
    stats = trainer.step(groups)
    assert 0 < stats.metrics["non_finite_tokens"] < stats.tokens
    assert_same(gradient_of(trainer, settings), plain_gradient(load(tiny), groups, settings)[1])


@pytest.mark.parametrize("name", ["decoupled_ppo", "ppo"])
def test_the_second_update_clips_around_the_policy_of_the_start(tiny: Path, name: str) -> None:
    chosen = ObjectiveSettings(name=name)  # type: ignore[arg-type]
    settings = make_settings(minibatches=2, objective=chosen)
    groups, model = make_groups(2), load(tiny)
    trainer = Trainer(tiny, settings, seed=7)
    stats = trainer.step(groups)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.no_grad():
        starts = {s.rollout_id: plain_logprobs(model, s)[None] for group in groups for s in group}
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for half in (order[0::2], order[1::2]):
        plain_gradient(model, [groups[index] for index in half], settings, starts)
        adamw.step()
    moments = {name: adamw.state[p]["exp_avg"] for name, p in model.named_parameters()}
    found = {n.removeprefix("adamw.exp_avg."): t for n, t in trainer.state().items() if n.startswith("adamw.exp_avg.")}
    assert_same(found, moments, rtol=1e-3)
    assert stats.metrics["updates"] == 2.0


def sampled_by(model: Any, groups: list[list[Sample]]) -> list[list[Sample]]:
    """The same samples as if `model` had sampled them."""
    with torch.no_grad():
        return [
            [Sample(**(vars(s) | {"behaviour_logprobs": plain_logprobs(model, s).numpy()})) for s in group]
            for group in groups
        ]


def test_published_weights_are_exactly_the_policy_of_the_next_step(tiny: Path) -> None:
    trainer, model = Trainer(tiny, make_settings(), seed=1), load(tiny)
    for seed in range(3):
        model.load_state_dict(unpack(*trainer.weights()), strict=False)  # a tied head has no bytes of its own
        stats = trainer.step(sampled_by(model, make_groups(seed)))
        assert stats.metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-9)
        assert stats.metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
        assert stats.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert stats.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_in_bf16_the_published_policy_is_that_of_the_next_step_up_to_rounding(tiny: Path) -> None:
    trainer = Trainer(tiny, make_settings(precision="bf16"), seed=1)
    model = models.load_model(tiny, dtype=torch.bfloat16, device=CPU)
    for seed in range(3):
        weights, tensors = trainer.weights()
        assert {spec.dtype for spec in tensors} == {"bfloat16"}
        model.load_state_dict(unpack(weights, tensors), strict=False)
        stats = trainer.step(sampled_by(model, make_groups(seed)))
        assert 0.0 < stats.metrics["mismatch_kl"] < 1e-3


def test_old_data_show_in_the_metrics(tiny: Path) -> None:
    trainer, model = Trainer(tiny, make_settings(), seed=1), load(tiny)
    groups = sampled_by(model, make_groups(0))
    fresh, old = [trainer.step(groups).metrics for _ in range(2)]
    assert old["mismatch_kl"] > fresh["mismatch_kl"] + 1e-6
    assert old["effective_sample_size"] < fresh["effective_sample_size"]


@pytest.mark.parametrize("advantage", [math.inf, math.nan])
def test_an_update_with_a_gradient_that_is_not_finite_is_skipped_and_counted(tiny: Path, advantage: float) -> None:
    trainer = Trainer(tiny, make_settings(minibatches=2), seed=1)
    groups = [[Sample(**(vars(s) | {"advantage": advantage})) for s in group] for group in make_groups(0)]
    before = trainer.state()
    stats = trainer.step(groups)
    assert (stats.metrics["updates"], stats.metrics["skipped_updates"]) == (0.0, 2.0)
    assert (stats.loss, stats.grad_norm, trainer.version) == (0.0, 0.0, 1)
    assert all(torch.equal(trainer.state()[name], t) for name, t in before.items() if name.startswith("model."))
    trainer.step(make_groups(1))
    assert all(tensor.isfinite().all() for name, tensor in trainer.state().items() if name.startswith("model."))


@pytest.mark.parametrize("groups", [[], [[]], [[Sample(**(vars(make_groups()[0][0]) | {"advantage": 0.0}))]]])
def test_a_batch_that_teaches_nothing_moves_only_the_version(tiny: Path, groups: list[list[Sample]]) -> None:
    trainer = Trainer(tiny, make_settings(), seed=1)
    before = trainer.state()
    stats = trainer.step(groups)
    assert (trainer.version, stats.metrics["updates"], stats.grad_norm) == (1, 0.0, 0.0)
    assert all(torch.equal(trainer.state()[name], t) for name, t in before.items() if name.startswith("model."))


def test_samples_over_budget_are_counted_and_leave_the_rest_alone(tiny: Path) -> None:
    trainer = Trainer(tiny, make_settings(token_budget=16), seed=1)
    groups = make_groups(0)
    long = Sample(**(vars(groups[0][0]) | {"prompt": np.full(20, 5, np.int32)}))
    stats = trainer.step([*groups, [long]])
    assert stats.metrics["over_budget"] == 1.0
    assert stats.metrics["updates"] == 1.0


def test_the_learning_rate_warms_up_linearly(tiny: Path) -> None:
    optimizer = OptimizerSettings(learning_rate=8e-3, warmup_steps=4)
    trainer = Trainer(tiny, make_settings(optimizer=optimizer), seed=1)
    rates = [trainer.step(make_groups(seed)).learning_rate for seed in range(6)]
    assert rates == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 8e-3, 8e-3])


def test_the_gradient_is_clipped_to_its_bound(tiny: Path) -> None:
    optimizer = OptimizerSettings(max_grad_norm=0.01)
    settings = make_settings(optimizer=optimizer)
    trainer = Trainer(tiny, settings, seed=1)
    stats = trainer.step(make_groups(0))
    applied = gradient_of(trainer, settings).values()
    assert stats.grad_norm > 0.01
    assert math.sqrt(sum(float(t.square().sum()) for t in applied)) == pytest.approx(0.01, rel=1e-3)


def train(trainer: Trainer, seeds: range) -> list[StepStats]:
    return [trainer.step(make_groups(seed)) for seed in seeds]


def test_a_resumed_trainer_goes_on_bit_by_bit(tiny: Path, tmp_path: Path) -> None:
    settings = make_settings(minibatches=2, optimizer=OptimizerSettings(warmup_steps=3))
    first = Trainer(tiny, settings, seed=1)
    train(first, range(2))
    Checkpoints(tmp_path, keep=1).save(first.version, first.state(), {})
    stats = train(first, range(2, 5))
    checkpoint = Checkpoints(tmp_path, keep=1).latest()
    assert checkpoint is not None
    second = Trainer(tiny, settings, seed=99)
    second.load_state(checkpoint.trainer)
    assert second.version == 2
    assert train(second, range(2, 5)) == stats
    left, right = first.state(), second.state()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert bytes(first.weights()[0]) == bytes(second.weights()[0])


def test_a_state_is_a_copy(tiny: Path) -> None:
    trainer = Trainer(tiny, make_settings(), seed=1)
    train(trainer, range(1))
    state = trainer.state()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    train(trainer, range(1, 2))
    assert all(torch.equal(state[name], kept[name]) for name in state)


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(tiny: Path) -> None:
    trainer = Trainer(tiny, make_settings(), seed=1)
    state = trainer.state()
    name = next(name for name in state if name.startswith("model."))
    for broken in ({**state, name: torch.zeros(3)}, {key: state[key] for key in state if key != name}):
        with pytest.raises(UserError, match="do not fit the model in"):
            Trainer(tiny, make_settings(), seed=1).load_state(broken)


@pytest.mark.parametrize("precision, dtype", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_an_export_is_a_folder_that_transformers_loads_as_it_is(
    tiny: Path, tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    trainer = Trainer(tiny, make_settings(precision=precision), seed=1)
    train(trainer, range(1))
    trainer.export(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert model.dtype == dtype
    published = unpack(*trainer.weights())
    exported = model.state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in published.items())
    assert models.load_tokenizer(tmp_path / "policy")("abc>").input_ids == models.load_tokenizer(tiny)("abc>").input_ids


def test_a_model_that_changes_its_logits_behind_the_head_is_refused(tiny: Path, tmp_path: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    folder = tmp_path / "granite"
    models.unbundle(models.bundle(tiny), folder)
    GraniteForCausalLM(GraniteConfig(logits_scaling=8.0, **SMALL)).save_pretrained(folder)
    with pytest.raises(UserError, match="changes its logits"):
        Trainer(folder, make_settings(), seed=1)
