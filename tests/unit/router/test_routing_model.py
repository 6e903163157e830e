"""The cold-start model: features of any text, training, files that are sound or not, what rankings are worth."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from infra.errors import UserError
from router.policy import curves, tables
from router.policy.duplicates import clusters
from router.policy.evaluate import split
from router.policy.features import BUCKETS, CAP, SHAPE, cap, extract
from router.policy.fit import Fitted
from router.policy.model import RoutingModel
from router.policy.tables import Table
from router.policy.train import tiers_of, train

EASY = "what is the capital of", "name the colour of", "translate into french the word", "how many legs has"
HARD = "prove by induction that", "derive the gradient of", "show the convergence of", "bound the regret of"
THINGS = ("cat", "dog", "house", "tree", "river", "stone", "cloud", "lamp", "bread", "ship", "queue", "field", "prime")


def toy(rows: int = 300) -> Table:
    """Easy prompts that both models answer, hard ones that only the dear one does."""
    choose = random.Random(1)
    table = Table("toy", prices={"small": 0.1, "large": 3.0}, licences={"toy/LICENSE": "MIT License"})
    for row in range(rows):
        hard = row % 2 == 1
        words = " ".join(choose.choices(THINGS, k=5))
        table.prompts.append(f"{choose.choice(HARD if hard else EASY)} {words} number {row}")
        table.outcomes.append({"small": float(not hard or choose.random() < 0.1), "large": 1.0})
        table.tiers.append("REASONING" if hard else "SIMPLE")
        table.groups.append("hard" if hard else "easy")
    return table


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return train([toy()], {}, progress=lambda _: None)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.text(),
        st.text(alphabet=st.characters(categories=["Cs", "Nd", "No", "Zs", "Lo", "Cc"])),
        st.binary().map(str),
    )
)
def test_any_text_has_finite_features(text: str) -> None:
    features = extract(text)
    for block in (features.grams, features.words):
        assert (np.diff(block.indices) > 0).all()
        assert all(0 <= index < BUCKETS for index in block.indices)
        assert np.isfinite(block.values).all()
    assert features.shape.shape == (len(SHAPE),)
    assert np.isfinite(features.shape).all()


@pytest.mark.parametrize(
    "text", ["", " ", "\ud800", "\0", "9" * 5000, "1," * 3000, "日本語" * 3000, "a" * 1_000_000, "٣.٣"]
)
def test_odd_texts_are_routed(text: str, fitted: Fitted) -> None:
    logits = fitted.model.logits(text)
    assert set(logits) == {"compact", "strong", "small", "large"}
    assert np.isfinite(list(logits.values())).all()
    assert sum(fitted.model.tiers(text).values()) == pytest.approx(1)


def test_only_head_and_tail_of_a_long_text_count() -> None:
    long = "first " * 400 + "middle " * 50_000 + "last " * 400
    assert len(cap(long)) <= CAP + 3
    assert cap(long).startswith("first") and cap(long).endswith("last ")
    words = extract(long).words.indices
    assert set(extract("first first").words.indices) <= set(words)
    assert not set(extract("middle").words.indices) & set(words)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("Hello World", "hello  world", True), ("a b c", "a-b-c", True), ("ab cd", "a bcd", False), ("ab", "ba", False)],
)
def test_words_are_hashed_by_what_they_are_and_not_by_where_they_stand(one: str, other: str, same: bool) -> None:
    assert (list(extract(one).words.indices) == list(extract(other).words.indices)) is same
    assert set(extract(one).words.indices) <= set(extract(f"before it {one} after it").words.indices)


LIST = "Which is heaviest?\nA. {}\nB. {}\nC. {}\nAnswer:"


@pytest.mark.parametrize(
    ("figure", "more", "less"),
    [
        (
            "words items share, mean",
            LIST.format("a red ball", "a red box", "a red car"),
            LIST.format("ball", "box", "car"),
        ),
        ("words items share, most", LIST.format("a red ball", "a red box", "ice"), LIST.format("ball", "box", "ice")),
        ("words items and rest share, mean", LIST.format("the heaviest", "which", "is"), LIST.format("x", "y", "z")),
        (
            "letters items share, most",
            LIST.format("oxidation", "oxidations", "ice"),
            LIST.format("gold", "iron", "ice"),
        ),
        ("letters items and rest share, most", LIST.format("heavier", "x", "y"), LIST.format("gold", "x", "y")),
        ("numeric items", LIST.format("$1,200", "-3.5", "7 kg"), LIST.format("7 kg", "five", "six")),
        ("ratio of items", LIST.format("1", "10", "1000"), LIST.format("10", "11", "12")),
        ("words items share, mean", "Sort:\n1) a b\n2) a b", "Sort: 1) a b 2) a b"),
        ("words items share, mean", LIST.format("a b", "a b", "a b"), "Sort:\n(A) a b"),
    ],
)
def test_lists_are_told_by_how_alike_their_items_are(figure: str, more: str, less: str) -> None:
    place = SHAPE.index(figure)
    assert extract(more).shape[place] > extract(less).shape[place] >= 0


def test_what_training_never_saw_does_not_drown_what_it_saw(fitted: Fitted) -> None:
    """No prompt of the toy table holds a list."""
    easy, hard = (
        fitted.model.logits(f"{start} lamp stone queue dog ship number 7\nA. a dog\nB. a dog or ship\nC. 12")
        for start in (EASY[0], HARD[0])
    )
    assert easy["compact"] - hard["compact"] > 1


def test_what_was_learned_holds_for_new_prompts(fitted: Fitted) -> None:
    rest = "lamp stone queue dog ship number 1000"
    easy, hard = (fitted.model.logits(f"{start} {rest}") for start in (EASY[0], HARD[0]))
    assert easy["compact"] > 1 > -1 > hard["compact"]
    assert hard["strong"] - hard["compact"] > easy["strong"] - easy["compact"]
    assert fitted.model.tiers(f"{HARD[1]} {rest}")["REASONING"] > 0.7
    assert fitted.model.tiers(f"{EASY[1]} {rest}")["SIMPLE"] > 0.7


def test_training_is_reproducible_and_the_version_follows_the_content(fitted: Fitted) -> None:
    assert train([toy()], {}, progress=lambda _: None).model.version == fitted.model.version
    assert train([toy(298)], {}, progress=lambda _: None).model.version != fitted.model.version


def test_the_card_says_where_it_comes_from_and_how_good_it_is(fitted: Fitted) -> None:
    card = fitted.model.card
    (data,) = card["training_data"]
    assert data["licences"] == {"toy/LICENSE": "MIT License"}
    assert data["models"] == {"small": "compact", "large": "strong"}
    assert data["apgr"] > 0.7
    assert card["outcomes"]["compact"]["brier"] < 0.5 * card["outcomes"]["compact"]["brier_of_mean"]
    assert card["outcomes"]["compact"]["calibration_error"] < 0.15


def test_a_model_is_the_same_after_a_file(fitted: Fitted, tmp_path: Path) -> None:
    fitted.model.save(tmp_path / "m")
    back = RoutingModel.load(tmp_path / "m")
    assert back.version == fitted.model.version
    assert back.card == fitted.model.card
    assert back.logits(EASY[0]) == fitted.model.logits(EASY[0])


def _changed(data: bytes, **arrays: Any) -> bytes:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    tensors = load(data)
    for name, change in arrays.items():
        tensors[name] = change(tensors[name])
    return save(tensors, metadata=header)


POISON: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "text": lambda data: b"not a model at all",
    "truncated": lambda data: data[: len(data) // 2],
    "no header": lambda data: save(load(data)),
    "pickle": lambda data: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    "huge header": lambda data: (1 << 62).to_bytes(8, "little") + data[8:],
    "NaN": lambda data: _changed(data, dual=lambda dual: np.full_like(dual, np.nan)),
    "infinite": lambda data: _changed(data, idf=lambda idf: idf + np.float32("inf")),
    "shape": lambda data: _changed(data, landmarks=lambda landmarks: landmarks[:, 1:]),
    "type": lambda data: _changed(data, weights=lambda weights: weights.astype(np.float64)),
    "no spread": lambda data: _changed(data, spread=np.zeros_like),
}


@pytest.mark.parametrize("poison", POISON)
def test_a_poisoned_file_is_refused_in_one_sentence(poison: str, fitted: Fitted, tmp_path: Path) -> None:
    fitted.model.save(tmp_path / "m")
    (tmp_path / "m").write_bytes(POISON[poison]((tmp_path / "m").read_bytes()))
    with pytest.raises(UserError, match="no sound routing model"):
        RoutingModel.load(tmp_path / "m")


def test_a_missing_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        RoutingModel.load(tmp_path / "none")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(UserError, match="larger"):
        RoutingModel.load(tmp_path / "huge")


def test_near_duplicates_share_a_cluster_and_a_side() -> None:
    base = "the quick brown fox jumps over the lazy dog and runs far away from here into the deep green forest"
    texts = [base, base.upper() + "!", base + " today", "something else entirely is asked in this prompt", ""]
    found = clusters(texts)
    assert found[0] == found[1] == found[2]
    assert len({found[0], found[3], found[4]}) == 3
    alike = np.array([0, 0, 0, 3, 4, 5, 5, 7])
    for seed in range(20):
        inside, outside = split(alike, seed, 4)
        assert len(inside) >= 4
        assert not set(alike[inside]) & set(alike[outside])
        assert sorted([*inside, *outside]) == list(range(8))


@pytest.mark.parametrize(
    ("score", "apgr", "cpt50"),
    [([4, 3, 2, 1], 0.8, 0.25), ([1, 2, 3, 4], 0.2, 0.75), ([0, 0, 0, 0], 0.5, 0.5)],
)
def test_what_a_ranking_is_worth(score: list[float], apgr: float, cpt50: float) -> None:
    """Gains 1, 1, 0, 0: the curve of the best order is 0, ½, 1, 1, 1 with mean 0.7; ties count as their mean."""
    weak, strong = np.array([0.0, 0.0, 1.0, 0.0]), np.array([1.0, 1.0, 1.0, 0.0])
    curve = curves.recovered(np.array(score, float), weak, strong)
    expected = {0.8: [0, 0.5, 1, 1, 1], 0.2: [0, 0, 0, 0.5, 1], 0.5: [0, 0.25, 0.5, 0.75, 1]}[apgr]
    assert curve.tolist() == expected
    assert curves.apgr(np.array(score, float), weak, strong) == pytest.approx(np.mean(expected))
    assert curves.cpt(np.array(score, float), weak, strong, 0.5) == cpt50


LAYOUTS = {
    "wide.csv": "prompt,small,large,large_response,small_price\n"
    '"one\ntwo",True,False,text,0.2\nthree,1,0.5,,0.2\n,True,True,,\nfour,,maybe,,\n',
    "nested.json": json.dumps(
        [
            {"question": "one\ntwo", "scores": {"small": 1, "large": 0}},
            {"question": "three", "scores": {"small": True, "large": 0.5}},
            {},
            {"question": "four", "scores": {}},
        ]
    ),
    "long.jsonl": "\n".join(
        json.dumps(row)
        for row in (
            {"prompt": "one\ntwo", "model": "small", "outcome": True, "price": 0.2},
            {"prompt": "three", "model": "small", "score": 1},
            {"prompt": "one\ntwo", "model": "large", "passed": False},
            {"prompt": "three", "model": "large", "correct": "0.5"},
            {"prompt": " ", "model": "small", "correct": 1},
            {"prompt": "four", "model": "small", "correct": 7},
        )
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_table(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(LAYOUTS[name])
    (table,) = tables.read([tmp_path / name])
    assert table.prompts == ["one\ntwo", "three"]
    assert table.outcomes == [{"small": 1.0, "large": 0.0}, {"small": 1.0, "large": 0.5}]
    assert table.bad == {"no prompt": 1, "no outcome": 1}
    assert table.prices in ({"small": 0.2}, {})


def test_a_folder_is_one_table_per_set_of_models_with_prices_and_licence(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.csv").write_text("prompt,x,y\nhello,1,0\n")
    (tmp_path / "other.jsonl").write_text(
        '{"prompt": "\u2028", "tier": "simple"}\n{"prompt": "a\u2028b", "tier": "simple"}'
    )
    (tmp_path / "candidates.json").write_text('{"x": {"input_price": 0.1}, "z": {"input_price": 9}}')
    (tmp_path / "LICENSE").write_text("\n  MIT License\n...")
    first, second = tables.read([tmp_path])
    assert (first.groups, first.prices) == (["a", "b"], {"x": 0.1})
    assert (second.prompts, second.tiers, second.models) == (["a\u2028b"], ["SIMPLE"], [])
    assert set(first.licences.values()) == {"MIT License"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"{"), ("b.json", b"3"), ("c.json.gz", b"not gzip"), ("d.csv", b""), ("e.csv", b"x,y\n1,2\n"),
        ("f.jsonl", b'{"prompt": "a"}'), ("g.csv", b"\x00\xff\xfe"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_refused_in_one_sentence(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        tables.read([tmp_path / name])


def test_tiers_go_by_price_and_without_prices_by_success() -> None:
    table = toy(20)
    assert tiers_of(table, {}) == {"small": "compact", "large": "strong"}
    assert tiers_of(table, {"small": 50.0}) == {"small": "", "large": "compact"}  # dearer and no better
    table.prices.clear()
    assert tiers_of(table, {}) == {"small": "compact", "large": "strong"}


@pytest.mark.parametrize(
    ("table", "said"), [(toy(20), "too few"), (Table("tiers", ["a"], [{}], ["SIMPLE"], ["g"]), "no table tells")]
)
def test_too_little_to_learn_from_is_said(table: Table, said: str) -> None:
    with pytest.raises(UserError, match=said):
        train([table], {}, progress=lambda _: None)
