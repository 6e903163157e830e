"""Versions of the routing policy: a bad file never gets into force, and there is always a way back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import UserError
from router.policy import store as stores
from router.policy import versions
from router.policy.calibration import Calibration
from router.policy.decide import NeutralModel, decide
from router.policy.store import PolicyStore
from router.policy.versions import Document, Invalid, encode
from tests.unit.router.policies import pool, question


def document(weight: float = 1.0) -> Document:
    return Document("neutral", Calibration({"compact": {"bias": weight}}))


class Clock:
    """Nanoseconds that pass by one with every look."""

    now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


def opened(directory: Path) -> PolicyStore:
    return PolicyStore(directory / "policies", NeutralModel(), read_model, Clock())


def read_model(path: Path) -> NeutralModel:
    """A cold-start model's file; here it holds its version and nothing else."""
    if not path.exists():
        raise UserError(f"{path}: the routing model cannot be read")
    return NeutralModel(path.read_text())


def promoted(store: PolicyStore, weight: float) -> str:
    version = store.try_out(document(weight), "a test")
    store.promote(version, "a test")
    return version


def test_without_anything_learned_the_shipped_policy_is_in_force(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert (store.policy, store.trial) == (store.shipped, None)
    with pytest.raises(UserError, match="none to go back to"):
        store.roll_back()


def test_trial_promotion_and_the_way_back_survive_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first = store.try_out(document(1.0), "fitted")
    assert (store.policy, store.trial and store.trial.version) == (store.shipped, first)
    store.promote(first, "better", {"success": 0.9})
    assert (store.policy.version, store.trial) == (first, None)
    second = promoted(store, 2.0)
    third = store.try_out(document(3.0), "fitted")
    store.retire(third, "no better", {})

    again = opened(tmp_path)
    assert (again.policy.version, again.trial) == (second, None)
    assert again.policy.calibration.weights == {"compact": {"bias": 2.0}}
    states = {version: again.head.state(version) for version in again.head.notes}
    assert states == {first: "retired", second: "active", third: "retired"}
    assert again.head.notes[first].metrics == {"success": 0.9}
    assert again.roll_back() == first
    store.refresh()  # the other process takes it up
    assert store.policy.version == first
    assert again.roll_back() == again.shipped.version
    again.promote(second, "by hand")
    assert opened(tmp_path).policy.version == second


def nonsense(path: Path, weight: str) -> None:
    path.write_bytes(path.read_bytes().replace(b"2.0", weight.encode()))


@pytest.mark.parametrize(
    "poison",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-10]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x00\xff" * 1000),
        lambda path: path.write_bytes(b"[" * 100_000),
        lambda path: path.write_bytes(path.read_bytes() + b" " * versions.MAX_BYTES),
        lambda path: nonsense(path, "2.5"),
        lambda path: nonsense(path, "NaN"),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_poisoned_policy_never_stops_the_service(tmp_path: Path, poison: Callable[[Path], object]) -> None:
    store = opened(tmp_path)
    first, second = promoted(store, 1.0), promoted(store, 2.0)
    path = tmp_path / "policies" / f"{second}.json"
    poison(path)
    with pytest.raises(Invalid) as caught:
        opened(tmp_path).load(second)
    assert second in str(caught.value) and "\n" not in str(caught.value)
    again = opened(tmp_path)
    assert again.policy.version == first  # the former one is in force
    assert decide(question(), [pool("compact"), pool("strong")], again.policy, draw=0.5).policy == first
    store.refresh()
    assert store.policy.version == second  # who had read it before goes on with it
    with pytest.raises(UserError, match="policy list"):
        again.promote(second, "by hand")


@pytest.mark.parametrize(
    "weights",
    [
        '{"compact": {"bias": 1e999}}',
        '{"compact": {"bias": 101.0}}',
        '{"compact": {"bias": "1"}}',
        '{"compact": {"bias": null}}',
        '{"compact": 1.0}',
        '{"compact": {"bias": NaN}}',
    ],
)
def test_numbers_that_are_none_are_refused_with_a_right_digest_too(weights: str) -> None:
    data = f'{{"calibration": {{"weights": {weights}}}, "model": "neutral"}}'.encode()
    version = hashlib.sha256(data).hexdigest()[: versions.DIGEST]
    with pytest.raises(Invalid, match=version):
        versions.decode(version, data)


def test_a_policy_for_another_cold_start_model_needs_that_model(tmp_path: Path) -> None:
    store = opened(tmp_path)
    version = store.try_out(Document("a" * 16, Calibration()), "made elsewhere")
    assert store.trial is None
    with pytest.raises(UserError, match="routing model cannot be read"):
        store.promote(version, "by hand")
    (tmp_path / "policies" / "models").mkdir()
    (tmp_path / "policies" / "models" / f"{'a' * 16}.safetensors").write_text("b" * 16)
    with pytest.raises(UserError, match="holds cold-start model bbbb"):
        store.promote(version, "by hand")
    outside = store.try_out(Document("../../secret", Calibration()), "made elsewhere")
    with pytest.raises(UserError, match="is no version"):
        store.promote(outside, "by hand")


def test_a_policy_is_found_by_its_cold_start_model_where_that_is_unique(tmp_path: Path) -> None:
    store = opened(tmp_path)
    (tmp_path / "trained").write_text("c" * 16)
    version = store.add(tmp_path / "trained")
    assert store.find(version) == store.find("c" * 16) == version
    assert store.find("neutral") == store.shipped.version
    with pytest.raises(UserError, match=r"none of that version here; .*policy list"):
        store.promote(store.find("d" * 16), "by hand")
    other = store.try_out(Document("c" * 16, Calibration({"compact": {"bias": 1.0}})), "fitted")
    with pytest.raises(UserError, match=", ".join(sorted([version, other]))):
        store.find("c" * 16)
    assert store.find(other) == other


def test_another_cold_start_model_is_added_and_can_be_rolled_back(tmp_path: Path) -> None:
    store = opened(tmp_path)
    file = tmp_path / "trained.safetensors"
    file.write_text("c" * 16)
    version = store.add(file)
    file.unlink()
    assert store.trial is not None and store.trial.model.version == "c" * 16
    store.promote(version, "by hand")
    again = opened(tmp_path)
    assert again.policy.model.version == "c" * 16
    again.roll_back()
    assert again.policy.model.version == "neutral"


@pytest.mark.parametrize(
    "head", [b"", b"{", b"[]", b'{"serial": -1.5}', b'{"history": ["../../etc/pass"]}', b'{"unheard": 1}']
)
def test_a_head_that_cannot_be_read_changes_nothing(tmp_path: Path, head: bytes) -> None:
    store = opened(tmp_path)
    version = promoted(store, 1.0)
    (tmp_path / "policies" / "head.json").write_bytes(head)
    store.refresh()
    assert store.policy.version == version
    assert opened(tmp_path).policy.version == store.shipped.version
    second = promoted(store, 2.0)  # and is replaced by the next change
    assert opened(tmp_path).policy.version == second


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for weight in range(stores.KEPT + 10):
        last = promoted(store, float(weight))
    files = list((tmp_path / "policies").glob("*.json"))
    assert len(store.head.history) == len(store.head.notes) == stores.KEPT
    assert len(files) == stores.KEPT + 1  # and the head
    assert opened(tmp_path).policy.version == last


def test_a_newer_head_of_another_router_is_adopted_and_an_older_one_is_not(tmp_path: Path) -> None:
    here, there = opened(tmp_path / "here"), opened(tmp_path / "there")
    promoted(there, 1.0)
    version = promoted(there, 2.0)
    old = here.head
    here.adopt(there.head, {name: there.read(name) for name in there.head.history})
    assert (here.policy.version, here.head) == (version, there.head)
    there.adopt(old, {})
    assert there.policy.version == version
    with pytest.raises(Invalid):
        here.adopt(there.head, {version: b"{}"})


def test_the_version_is_the_digest_of_what_was_learned() -> None:
    assert encode(document(1.0)) == encode(document(1.0))
    assert encode(document(1.0))[0] != encode(document(1.5))[0]
    assert json.loads(encode(document(1.0))[1])["model"] == "neutral"
