"""Each objective against its formula in plain numbers, and the invariants that tie them together."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.objectives import Inputs, objective, sequence_weights
from learner.settings import ObjectiveSettings

NAMES = ["decoupled_ppo", "ppo", "tis", "cispo", "gspo", "reinforce"]
LOW, HIGH, CLIP = 0.2, 0.3, 1.5
BATCH, TIME, VOCABULARY = 5, 4, 7


def make(name: str, **changes: float) -> ObjectiveSettings:
    fields = {"eps_clip": LOW, "eps_clip_high": HIGH, "weight_clip": CLIP} | changes
    return ObjectiveSettings(name=name, **fields)  # type: ignore[arg-type]


class Problem:
    """A softmax policy with its own logits at every position, and two older policies that differ from it."""

    def __init__(self, seed: int, drift: float) -> None:
        random = np.random.default_rng(seed)
        self.logits = random.normal(size=(BATCH, TIME, VOCABULARY))
        self.tokens = random.integers(0, VOCABULARY, size=(BATCH, TIME))
        self.proximal = self.logprobs(self.logits + drift * random.normal(size=self.logits.shape))
        self.behaviour = self.logprobs(self.logits + drift * random.normal(size=self.logits.shape))
        self.advantages = random.normal(size=BATCH)
        self.mask = np.ones((BATCH, TIME))
        self.mask[0, 2:] = 0  # a shorter completion
        self.mask[1, 1] = 0  # a tool result in the middle

    def logprobs(self, logits: np.ndarray) -> np.ndarray:
        normalised = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.take_along_axis(normalised, self.tokens[..., None], -1)[..., 0]

    def gradient(self, name: str) -> np.ndarray:
        """Of the summed token losses, by autograd through the objective, in float64."""
        logits = torch.tensor(self.logits, requires_grad=True)
        current = logits.log_softmax(-1).gather(-1, torch.tensor(self.tokens)[..., None])[..., 0]
        others = (self.proximal, self.behaviour, self.advantages, self.mask)
        loss, _ = objective(make(name)).token_loss(Inputs(current, *(torch.tensor(value) for value in others)))
        loss.sum().backward()
        assert logits.grad is not None
        return logits.grad.numpy()

    def differences(self, name: str) -> np.ndarray:
        """The same by central differences of the reference."""
        start = self.logprobs(self.logits)
        gradient, step = np.zeros_like(self.logits), 1e-6
        for position in np.ndindex(*self.logits.shape):
            sides = []
            for sign in (1, -1):
                moved = self.logits.copy()
                moved[position] += sign * step
                sides.append(self.reference(name, self.logprobs(moved), start))
            gradient[position] = (sides[0] - sides[1]) / (2 * step)
        return gradient

    def reference(self, name: str, current: np.ndarray, start: np.ndarray) -> float:
        """The formulas, token by token; `start` is where stop-gradients stay."""
        total = 0.0
        for b in range(BATCH):
            kept = [t for t in range(TIME) if self.mask[b, t]]
            if name == "gspo":
                s = math.exp(sum(current[b, t] - self.behaviour[b, t] for t in kept) / len(kept))
                total += len(kept) * -min(s * self.advantages[b], clip(s) * self.advantages[b])
                continue
            for t in kept:
                a, new, old, mu = self.advantages[b], current[b, t], self.proximal[b, t], self.behaviour[b, t]
                r, w, rho = math.exp(new - old), math.exp(old - mu), math.exp(new - mu)
                total += {
                    "decoupled_ppo": lambda a=a, r=r, w=w: 0.0 if w > CLIP else -w * min(r * a, clip(r) * a),
                    "ppo": lambda a=a, rho=rho: -min(rho * a, clip(rho) * a),
                    "tis": lambda a=a, r=r, w=w: -min(w, CLIP) * min(r * a, clip(r) * a),
                    "cispo": lambda a=a, new=new, b=b, t=t, mu=mu: -clip(math.exp(start[b, t] - mu)) * a * new,
                    "reinforce": lambda a=a, new=new: -a * new,
                }[name]()
        return total


def clip(value: float) -> float:
    return min(max(value, 1 - LOW), 1 + HIGH)


def inputs(current: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Inputs:
    return Inputs.of(current, proximal, behaviour, advantages, mask)


def on_policy(seed: int = 0) -> tuple[Tensor, Callable[[Tensor], Inputs]]:
    problem = Problem(seed, drift=0.0)
    current = torch.tensor(problem.behaviour, dtype=torch.float32, requires_grad=True)
    mask, advantages = torch.tensor(problem.mask), torch.tensor(problem.advantages)
    return current, lambda new: inputs(new, current.detach(), current.detach(), advantages, mask)


@pytest.mark.parametrize("drift", [0.0, 0.1, 0.7], ids=["on-policy", "inside the clip range", "far outside"])
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_formula(name: str, drift: float) -> None:
    problem = Problem(3, drift)
    np.testing.assert_allclose(problem.gradient(name), problem.differences(name), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_objective_is_the_vanilla_policy_gradient(name: str) -> None:
    current, build = on_policy()
    weights = torch.tensor(sequence_weights([2, 3, 4, 4, 4], "sequence_mean", TIME))[:, None]
    loss, metrics = objective(make(name)).token_loss(build(current))
    (gradient,) = torch.autograd.grad((loss * weights).sum(), current)
    batch = build(current)
    vanilla = -batch.advantages_B[:, None] * batch.mask_BT * weights
    torch.testing.assert_close(gradient, vanilla)
    assert all(float(value) == 0.0 for value in metrics.values()), "nothing is clipped when all ratios are 1"


@pytest.mark.parametrize("seed", range(3))
def test_decoupled_ppo_is_ppo_when_the_behaviour_policy_is_the_proximal_one(seed: int) -> None:
    problem = Problem(seed, drift=0.5)
    others = [torch.tensor(v) for v in (problem.behaviour, problem.behaviour, problem.advantages, problem.mask)]
    current = torch.tensor(problem.logprobs(problem.logits))
    decoupled, _ = objective(make("decoupled_ppo")).token_loss(inputs(current, *others))
    plain, _ = objective(make("ppo")).token_loss(inputs(current, *others))
    torch.testing.assert_close(decoupled, plain)


@pytest.mark.parametrize("name", ["decoupled_ppo", "tis"])
def test_small_weights_are_used_as_they_are(name: str) -> None:
    problem = Problem(1, drift=0.2)
    others = [torch.tensor(v) for v in (problem.proximal, problem.behaviour, problem.advantages, problem.mask)]
    batch = inputs(torch.tensor(problem.proximal), *others)
    loss, _ = objective(make(name, weight_clip=1e6)).token_loss(batch)
    weight = (batch.proximal_BT - batch.behaviour_BT).exp()
    torch.testing.assert_close(loss, -weight * batch.advantages_B[:, None] * batch.mask_BT)


@pytest.mark.parametrize(
    "ratio, advantage, moves",
    [
        (1.0, 1.0, True),
        (1.0, -1.0, True),
        (1.0 + HIGH + 0.01, 1.0, False),  # already raised enough
        (1.0 + HIGH + 0.01, -1.0, True),  # still to be lowered
        (1.0 - LOW - 0.01, -1.0, False),  # already lowered enough
        (1.0 - LOW - 0.01, 1.0, True),  # still to be raised
    ],
)
@pytest.mark.parametrize("name", ["decoupled_ppo", "ppo", "tis", "gspo"])
def test_the_clip_stops_a_token_only_on_its_way_out(name: str, ratio: float, advantage: float, moves: bool) -> None:
    current = torch.full((1, 1), math.log(0.5 * ratio), requires_grad=True)
    old, ones = torch.full((1, 1), math.log(0.5)), torch.ones(1, 1)
    loss, metrics = objective(make(name)).token_loss(inputs(current, old, old, torch.tensor([advantage]), ones))
    (gradient,) = torch.autograd.grad(loss.sum(), current)
    assert bool(gradient.abs() > 0) is moves
    assert float(metrics["clip_fraction"]) == float(not moves)


def test_a_weight_above_its_bound_is_rejected_by_decoupled_ppo_and_truncated_by_tis() -> None:
    old, mu, ones = torch.full((1, 1), -1.0), torch.full((1, 1), -1.0 - math.log(2 * CLIP)), torch.ones(1, 1)
    batch = inputs(old, old, mu, torch.tensor([1.0]), ones)
    rejected, rejection = objective(make("decoupled_ppo")).token_loss(batch)
    truncated, truncation = objective(make("tis")).token_loss(batch)
    assert float(rejected) == 0.0
    assert float(truncated) == pytest.approx(-CLIP)
    assert float(rejection["rejected_fraction"]) == float(truncation["truncated_fraction"]) == 1.0


@pytest.mark.parametrize("where", ["current", "proximal", "behaviour"])
@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_token_without_a_finite_ratio_gives_no_loss_and_no_gradient(name: str, where: str, value: float) -> None:
    policies = {key: torch.full((2, 3), -1.0) for key in ("current", "proximal", "behaviour")}
    broken = policies[where].clone()
    broken[0, 1] = value
    policies[where] = broken.requires_grad_(where == "current")
    policies["current"].requires_grad_()
    batch = inputs(**policies, advantages=torch.tensor([1.0, -1.0]), mask=torch.ones(2, 3))
    loss, _ = objective(make(name)).token_loss(batch)
    (gradient,) = torch.autograd.grad(loss.sum(), policies["current"])
    assert loss.isfinite().all() and gradient.isfinite().all()
    assert float(loss[0, 1].detach()) == float(gradient[0, 1]) == float(batch.mask_BT[0, 1]) == 0.0
    assert (gradient.flatten()[[0, 2, 3, 4, 5]] != 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("far", [-200.0, 200.0])
def test_policies_worlds_apart_give_finite_numbers(name: str, far: float) -> None:
    current = torch.full((1, 2), min(far, -0.5), requires_grad=True)
    old = torch.full((1, 2), min(-far, -0.5))
    for advantage in (1.0, -1.0):
        batch = inputs(current, old, old, torch.tensor([advantage]), torch.ones(1, 2))
        loss, _ = objective(make(name)).token_loss(batch)
        (gradient,) = torch.autograd.grad(loss.sum(), current)
        assert loss.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        ("token_mean", [1 / 6, 1 / 6, 1 / 6]),
        ("sequence_mean", [1 / 3, 1 / 6, 1 / 9]),
        ("constant", [1 / 24, 1 / 24, 1 / 24]),
    ],
)
def test_what_a_sequence_weighs(aggregation: str, expected: list[float]) -> None:
    assert sequence_weights([1, 2, 3], aggregation, max_tokens=8) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_sequences_without_tokens_weigh_something_finite(aggregation: str, lengths: list[int]) -> None:
    assert all(math.isfinite(weight) for weight in sequence_weights(lengths, aggregation, max_tokens=8))
