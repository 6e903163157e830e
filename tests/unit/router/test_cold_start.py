"""The model that is shipped: sound, licensed, and of use."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from router.policy.model import RoutingModel, cold_start

PERMISSIVE = {"MIT License", "Apache License"}


@pytest.fixture(scope="module")
def model() -> RoutingModel:
    return cold_start()


def test_its_card_lies_beside_it_and_every_table_has_a_permissive_licence(model: RoutingModel) -> None:
    card = json.loads((resources.files("router.policy") / "cold_start.json").read_text())
    assert card == {"version": model.version, **model.card}
    for table in card["training_data"]:
        assert table["licences"], table["table"]
        assert set(table["licences"].values()) <= PERMISSIVE
    assert sum(table["prompts"] for table in card["training_data"]) == card["prompts"] > 20_000


def test_it_is_calibrated_and_better_than_the_mean_out_of_fold(model: RoutingModel) -> None:
    for name, quality in model.card["outcomes"].items():
        assert quality["brier"] < 0.95 * quality["brier_of_mean"], name
        assert quality["calibration_error"] < (0.1 if name.startswith("tier:") else 0.05), name


@pytest.mark.parametrize(
    ("prompt", "tier"),
    [
        ("What is the capital of France?", "SIMPLE"),
        ("Was ist ein abstrakter Syntaxbaum?", "SIMPLE"),
        ("Write a Python function that reverses a string.", "MEDIUM"),
        ("Design a multi-region active-active database with conflict resolution; discuss trade-offs.", "COMPLEX"),
        ("Prove that there are infinitely many primes.", "REASONING"),
    ],
)
def test_it_tells_what_takes_thought(prompt: str, tier: str, model: RoutingModel) -> None:
    tiers = model.tiers(prompt)
    assert max(tiers, key=lambda name: tiers[name]) == tier


def test_it_knows_what_compact_models_cannot_do(model: RoutingModel) -> None:
    """Algebra against a fact that everyone knows, in the form of its training data."""
    asked = {
        "Which of the following is the main function of marketing research?": "understanding customers",
        "Find the degree for the given field extension Q(sqrt(2), sqrt(3), sqrt(18)) over Q.": "4",
    }
    easy, hard = (
        model.logits(f"{question}\nA. {option}\nB. 0\nC. 2\nD. 6\nAnswer:")["compact"]
        for question, option in asked.items()
    )
    assert easy > 0 > hard
