"""`tailrace route train` and `tailrace route eval` as people run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from router.cli.evaluate import report_of
from router.policy import evaluate, tables
from router.policy.evaluate import Pair, gsm8k, multi_model, tiers
from router.policy.model import RoutingModel

EASY, HARD = "name the colour of", "prove by induction that"
THINGS = ("cat", "dog", "house", "tree", "river", "stone", "cloud", "lamp", "bread", "ship", "queue", "field", "prime")
WEAK, STRONG = evaluate.PRICES


def write(folder: Path, rows: int = 240) -> Path:
    """Tables of all kinds that the evaluation knows, small: hard prompts need the strong model."""
    generator = np.random.default_rng(0)
    prompts = [f"{(EASY, HARD)[row % 2]} {' '.join(generator.choice(THINGS, 5))} {row}" for row in range(rows)]
    for name in ("routellm", "llmrouter", "uncommonroute"):
        (folder / name).mkdir(parents=True)
        (folder / name / "LICENSE").write_text("MIT License\n")
    lines = [f"{prompt},{row % 2 == 0},True" for row, prompt in enumerate(prompts)]
    (folder / "routellm" / "gsm8k_responses.csv").write_text("\n".join([f"prompt,{WEAK},{STRONG}", *lines]))
    nested = [{"question": prompt, "scores": {"s": 1 - row % 2, "l": 1}} for row, prompt in enumerate(prompts)]
    (folder / "llmrouter" / "train.json").write_text(json.dumps(nested))
    (folder / "llmrouter" / "candidates.json").write_text('{"s": {"input_price": 0.1}, "l": {"input_price": 1}}')
    told = [{"prompt": p, "expected_tier": ("SIMPLE", "REASONING")[row % 2]} for row, p in enumerate(prompts)]
    for part, some in (("train", told[: rows // 2]), ("dev", told[rows // 2 :])):
        (folder / "uncommonroute" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, some)))
    return folder


def route(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from infra.cli.main import main; sys.argv = ['tailrace', 'route', *sys.argv[1:]]; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, env=environment
    )


def test_a_model_is_trained_from_a_folder_of_tables_and_names_its_licences(tmp_path: Path) -> None:
    data, out = write(tmp_path / "data"), tmp_path / "out"
    done = route(
        "train", "--data", str(data), "--out", str(out), "--price", f"{WEAK}=0.24", "--price", f"{STRONG}=24.7"
    )
    assert done.returncode == 0, done.stderr
    model = RoutingModel.load(out / "model.safetensors")
    card = json.loads((out / "card.json").read_text())
    assert card == {"version": model.version, **model.card}
    assert {name for table in card["training_data"] for name in table["licences"]} == {
        "routellm/LICENSE", "llmrouter/LICENSE", "uncommonroute/LICENSE",
    }  # fmt: skip
    assert model.version in done.stdout
    assert set(model.logits("name the colour of cat")) == {"compact", "strong", "s", "l", WEAK, STRONG}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--data", "nowhere", "--out", "x"], "does not exist"),
        (["train", "--data", "DATA/llmrouter", "--out", "x", "--price", "s"], "MODEL=USD"),
        (["train", "--data", "DATA/uncommonroute", "--out", "x"], "no table tells"),
        (["eval", "--data", "DATA/routellm"], "name the folder above"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    data = write(tmp_path / "data")
    done = route(*(argument.replace("DATA", str(data)) for argument in arguments))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@threadpool_limits.wrap(limits=1)  # for matrices this small, threads only wait for each other
def test_the_evaluation_finds_what_is_there_to_be_found(tmp_path: Path) -> None:
    data = write(tmp_path / "data")
    pair = Pair.of(tables.read([data / "routellm" / "gsm8k_responses.csv"])[0])
    figures = {
        "gsm8k": gsm8k(pair, [100, 101], lambda _: None),
        "cascade": {"gsm8k": evaluate.cascades(pair)},
        "multi_model": multi_model(tables.read([data / "llmrouter"])[0], [100], lambda _: None),
        "tiers": tiers(*(tables.read([data / "uncommonroute" / f"{part}.jsonl"])[0] for part in ("train", "dev"))),
    }
    found = figures["gsm8k"]
    assert found["apgr"] > 0.7 > 0.55 > found["random"]["apgr"]
    low, high = found["apgr_interval"]
    assert low <= found["apgr"] <= high
    assert found["cpt50"] < 0.3 < found["cpt80"] + 0.1
    many = figures["multi_model"]
    assert many["router_0.2"]["accuracy"] > many["cheapest"]["accuracy"] + 0.4
    assert many["router_0.2"]["cost"] < many["best_single"]["cost"] - 0.3
    assert many["oracle"]["accuracy"] == 1.0
    assert figures["cascade"]["gsm8k"]["verifier_1"] == {"accuracy": 1.0, "strong_share": 0.5, "cost": 0.24 + 24.7 / 2}
    assert figures["tiers"]["accuracy"] > 0.9
    report = report_of(figures)
    assert any(row[0].startswith("gsm8k: this router") for row in report.rows)
    assert any("target 0.66 met" in note for note in report.notes)
    assert gsm8k(pair, [100], lambda _: None) == gsm8k(pair, [100], lambda _: None)
