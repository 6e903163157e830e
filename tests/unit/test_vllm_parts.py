"""What the vLLM engine decides and writes without vLLM."""

from __future__ import annotations

import importlib.util
import json
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.messages import PolicyRef, Sampling
from generator.engines import RequestRefused, SampledToken, SampleRequest, make_engine, vllm_weights
from generator.engines.base import EngineError
from generator.engines.intervals import Intervals
from generator.engines.vllm_completions import Collected, check_temperature, label, labelled
from generator.engines.vllm_core import GIB, arguments
from generator.engines.vllm_weights import WeightFolders, skeleton
from generator.settings import GeneratorSettings, VllmSettings
from infra import models
from infra.errors import UserError

FOLDER = Path("somewhere")
POLICY = PolicyRef(2, 7, "a" * 64)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_missing_vllm_is_a_sentence_with_the_command_that_installs_it() -> None:
    folder = models.resolve("tiny")
    with pytest.raises(UserError, match=r"pip install -e .*\.\[vllm\]"):
        make_engine(GeneratorSettings(engine="vllm"), folder, models.load_tokenizer(folder))


@pytest.mark.parametrize(
    ("settings", "platform", "expected"),
    [
        ({}, "cuda", {"dtype": "bfloat16", "max_num_seqs": 64, "logprobs_mode": "processed_logprobs"}),
        ({}, "cpu", {"hf_overrides": {"tie_word_embeddings": False}}),
        ({"precision": "fp32", "max_requests": 8}, "cpu", {"dtype": "float32", "max_num_seqs": 8}),
        ({"device": "cuda:1"}, "cuda", {"device_ids": [1]}),
        (
            {"device": "cuda:2", "vllm": VllmSettings(tensor_parallel_size=2, kv_cache_gib=1.5, max_model_len=512)},
            "cuda",
            {
                "device_ids": [2, 3],
                "tensor_parallel_size": 2,
                "kv_cache_memory_bytes": int(1.5 * GIB),
                "max_model_len": 512,
            },
        ),
    ],
)
def test_settings_become_arguments(settings: dict, platform: str, expected: dict) -> None:
    found = arguments(GeneratorSettings(engine="vllm", **settings), FOLDER, platform)
    assert expected.items() <= found.items()
    assert found["model"] == str(FOLDER) and found["trust_remote_code"] is False


def test_what_is_not_set_is_left_to_vllm() -> None:
    found = arguments(GeneratorSettings(engine="vllm"), FOLDER, "cuda")
    assert not {"max_model_len", "kv_cache_memory_bytes", "device_ids", "hf_overrides"} & set(found)


@pytest.mark.parametrize(("device", "platform"), [("cuda", "cpu"), ("cuda:1", "cpu"), ("cpu", "cuda")])
def test_a_device_that_this_vllm_was_not_built_for_is_refused(device: str, platform: str) -> None:
    with pytest.raises(UserError, match=rf"generator.device is {device}.*the one for {platform}"):
        arguments(GeneratorSettings(engine="vllm", device=device), FOLDER, platform)


def test_a_label_names_its_policy() -> None:
    assert labelled(label(POLICY)) == POLICY
    assert label(POLICY) != label(PolicyRef(2, 7, "b" * 64))


@pytest.mark.parametrize(
    ("temperature", "refused"), [(0, False), (0.01, False), (2, False), (0.009, True), (2.1, True)]
)
def test_temperatures_that_vllm_would_change_are_refused(temperature: float, refused: bool) -> None:
    request = SampleRequest([1], 1, Sampling(max_tokens=1, temperature=temperature), 0)
    if refused:
        with pytest.raises(RequestRefused, match=r"vLLM samples at temperature 0 or 0\.01 to 2"):
            check_temperature(request)
    else:
        check_temperature(request)


def test_intervals_add_up_and_count_the_open_one() -> None:
    now = 0.0
    spent = Intervals(lambda: now)
    assert spent.seconds == 0
    spent.begin()
    now = 2.0
    spent.begin()  # it is open already
    assert spent.seconds == 2
    spent.end()
    now = 5.0
    spent.end()
    assert spent.seconds == 2
    spent.begin()
    now = 6.0
    assert spent.seconds == 3


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    model = models.load_model(models.resolve("tiny"), dtype=torch.float32, device=torch.device("cpu"))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightFolders:
    monkeypatch.setattr(vllm_weights, "MEMORY", tmp_path)
    source = models.resolve("tiny")
    return WeightFolders(source, skeleton(source))


def test_a_policy_becomes_a_model_folder_in_shards(
    folders: WeightFolders, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "SHARD_BYTES", 50_000)
    flat = torch.cat([tensor.flatten() for tensor in weights.values()])  # they arrive as views of one buffer
    views = dict(
        zip(
            weights,
            (
                part.view(tensor.shape)
                for part, tensor in zip(
                    flat.split([tensor.numel() for tensor in weights.values()]), weights.values(), strict=True
                )
            ),
            strict=True,
        )
    )
    folder = folders.write(POLICY, views)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"
    assert (folder / "tokenizer.json").is_file()
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    written = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())
    folders.close()
    assert not folder.exists()


def test_tied_tensors_may_come_once_and_are_written_under_every_name(
    folders: WeightFolders, weights: dict[str, torch.Tensor]
) -> None:
    del weights["lm_head.weight"]
    (shard,) = folders.write(POLICY, weights).glob("*.safetensors")
    written = load_file(shard)
    assert torch.equal(written["lm_head.weight"], weights["transformer.wte.weight"])
    folders.close()


def test_weights_that_do_not_fit_leave_no_folder(
    folders: WeightFolders, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="no tensor extra"):
        folders.write(POLICY, weights | {"extra": torch.zeros(1)})
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_generator_left_is_deleted_and_what_a_running_one_has_is_not(
    folders: WeightFolders, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    kept = folders.write(POLICY, weights)
    left = tmp_path / f"{vllm_weights.PREFIX}left"
    left.mkdir()
    (left / vllm_weights.LOCK).touch()
    (left / "model-00000.safetensors").touch()
    source = models.resolve("tiny")
    others = WeightFolders(source, skeleton(source))
    others.write(POLICY, weights)
    assert kept.is_dir() and not left.exists()
    others.close()
    folders.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_being_written_when_the_engine_closes_is_deleted_too(
    folders: WeightFolders, weights: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def slowly(*args: Any, **kwargs: Any) -> None:
        writing.set()
        assert go_on.wait(10)
        save_file(*args, **kwargs)

    monkeypatch.setattr(vllm_weights, "save_file", slowly)
    with ThreadPoolExecutor(2) as threads:
        written = threads.submit(folders.write, POLICY, weights)
        assert writing.wait(10)
        closed = threads.submit(folders.close)
        wait({closed}, timeout=0.1)  # time to delete what is there
        go_on.set()
        written.result(10)
        closed.result(10)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EngineError, match="closed"):
        folders.write(POLICY, weights)


def test_without_room_in_memory_the_disk_is_used(
    weights: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "MEMORY", tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = models.resolve("tiny")
    folders = WeightFolders(source, skeleton(source))
    assert folders.write(POLICY, weights).is_relative_to(tmp_path)
    folders.close()


NEXT = PolicyRef(2, 8, "b" * 64)


def output(tokens: list[int], finish: str | None = None, spans: list[tuple[PolicyRef, int, int]] | None = None) -> Any:
    """What vLLM reports of a completion, as far as it is looked at."""
    return SimpleNamespace(
        token_ids=tokens,
        logprobs=[{token: SimpleNamespace(logprob=-0.5)} for token in tokens],
        finish_reason=finish,
        weight_versions=spans and [SimpleNamespace(version=label(ref), start=a, end=b) for ref, a, b in spans],
    )


def given(sampled: list[SampledToken]) -> list[tuple[int, int, bool]]:
    return [(token.token, token.policy.version, token.finish is not None) for token in sampled]


def test_tokens_are_passed_on_under_the_policy_of_their_span() -> None:
    whole = [(POLICY, 0, 2), (NEXT, 2, 4)]
    spans = [(label(POLICY), 0), (label(NEXT), 2)]
    request = SampleRequest([1], 1, Sampling(max_tokens=4), 0)

    waiting = Collected(request, 0)
    assert waiting.add(output([5, 6]), None) == [], "nobody says who sampled them"
    end = [(5, 7, False), (6, 7, False), (7, 8, False), (8, 8, True)]
    assert given(waiting.add(output([7, 8], "stop", whole), None)) == end

    reading = Collected(request, 0)
    assert given(reading.add(output([5]), spans)) == end[:1], "a later span has begun that nothing here is from"
    assert given(reading.add(output([6, 7]), spans)) == end[1:3]
    assert given(reading.add(output([8], "stop", whole), None)) == end[3:]

    late = Collected(request, 0)
    assert given(late.add(output([5]), spans[:1])) == end[:1]
    assert late.add(output([6]), None) == [], "the record is gone, the end is on its way"
    assert given(late.add(output([7, 8], "stop", whole), None)) == end[1:]
