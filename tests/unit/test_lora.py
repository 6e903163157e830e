"""Adapters are what is trained and saved; what is published is a whole model that needs to know nothing of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from infra import models
from infra.errors import UserError
from infra.weights import unpack
from learner.checkpoints import Checkpoints
from learner.settings import LoraSettings
from learner.trainer import Trainer
from tests.unit.test_trainer import ARCHITECTURES, load, make_groups, make_settings, sampled_by

FAMILIES = ["tiny", *ARCHITECTURES]


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {"tiny": tiny_folder}
    torch.manual_seed(0)
    for family, make in ARCHITECTURES.items():
        folder = found[family] = tmp_path_factory.mktemp("model")
        models.unbundle(models.bundle(tiny_folder), folder)
        make().save_pretrained(folder)
    return found


def make_trainer(folder: Path, seed: int = 1) -> Trainer:
    return Trainer(folder, make_settings(lora=LoraSettings(rank=4, alpha=8)), seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_published_is_the_policy_of_the_next_step_under_the_names_of_the_plain_model(
    folders: dict[str, Path], family: str
) -> None:
    folder = folders[family]
    trainer, plain = make_trainer(folder), Trainer(folder, make_settings(), seed=1)
    data, tensors = trainer.weights()
    assert tensors == plain.weights()[1]
    assert bytes(data) == bytes(plain.weights()[0]), "version 0 is the model itself"
    model = load(folder)
    for seed in range(3):
        model.load_state_dict(unpack(*trainer.weights()), strict=False)
        stats = trainer.step(sampled_by(model, make_groups(seed)))
        assert stats.metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-9)
        assert stats.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert bytes(trainer.weights()[0]) != bytes(data), "the policy moved"


def test_merging_changes_neither_the_trainer_nor_its_base(folders: dict[str, Path]) -> None:
    looked_at, left_alone = make_trainer(folders["tiny"]), make_trainer(folders["tiny"])
    for seed in range(2):
        looked_at.weights()
        assert looked_at.step(make_groups(seed)) == left_alone.step(make_groups(seed))
    assert bytes(looked_at.weights()[0]) == bytes(left_alone.weights()[0])


def test_only_the_chosen_layers_move(folders: dict[str, Path]) -> None:
    settings = make_settings(lora=LoraSettings(rank=2, targets=["q_proj", "down_proj"]))
    folder = folders["sliding window"]
    trainer, base = Trainer(folder, settings, seed=1), load(folder).state_dict()
    trainer.step(make_groups(0))
    moved = {name for name, tensor in unpack(*trainer.weights()).items() if not torch.equal(tensor, base[name])}
    assert moved == {name for name in base if "q_proj" in name or "down_proj" in name}


def test_a_checkpoint_holds_the_adapters_alone_and_resumes_bit_by_bit(folders: dict[str, Path], tmp_path: Path) -> None:
    first = make_trainer(folders["tiny"])
    first.step(make_groups(0))
    state = first.state()
    assert all(".lora_" in name for name in state if name.startswith(("model.", "adamw.")))
    Checkpoints(tmp_path, keep=1).save(first.version, state, {})
    checkpoint = Checkpoints(tmp_path, keep=1).latest()
    assert checkpoint is not None
    second = make_trainer(folders["tiny"], seed=99)
    second.load_state(checkpoint.trainer)
    assert second.step(make_groups(1)) == first.step(make_groups(1))
    assert bytes(second.weights()[0]) == bytes(first.weights()[0])


@pytest.mark.parametrize("rank, alpha, moved", [(0, 8, False), (8, 8, False), (4, 16, False), (4, 8, True)])
def test_adapters_of_another_shape_scale_or_model_are_refused(
    folders: dict[str, Path], tmp_path: Path, rank: int, alpha: int, moved: bool
) -> None:
    folder = folders["tiny"]
    state = make_trainer(folder).state()
    if moved:  # the same architecture, and almost the same weights
        trainer = Trainer(folder, make_settings(), seed=1)
        trainer.step(make_groups(0))
        folder = tmp_path / "moved"
        trainer.export(folder)
    with pytest.raises(UserError, match=r"^checkpoint: .*give the run's own model"):
        Trainer(folder, make_settings(lora=LoraSettings(rank=rank, alpha=alpha)), seed=1).load_state(state)


def test_adapters_that_do_not_say_what_they_belong_to_are_refused(folders: dict[str, Path]) -> None:
    state = make_trainer(folders["tiny"]).state()
    del state["lora.alpha"]
    with pytest.raises(UserError, match=r"^checkpoint: .*give the run's own model"):
        make_trainer(folders["tiny"]).load_state(state)


def test_an_export_is_the_merged_model(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = make_trainer(folders["tiny"])
    trainer.step(make_groups(0))
    trainer.export(tmp_path / "policy")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    published = unpack(*trainer.weights())
    assert exported.keys() >= published.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in published.items())


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "query"])
def test_a_target_that_is_no_linear_layer_is_refused_in_one_sentence(folders: dict[str, Path], target: str) -> None:
    lora = LoraSettings(rank=2, targets=["q_proj", target])
    with pytest.raises(UserError, match=f"no layer '{target}'; it has down_proj, gate_proj, k_proj"):
        Trainer(folders["sliding window"], make_settings(lora=lora), seed=1)
