"""A checkpoint is whole or not there, whatever the process died of."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infra.errors import UserError
from learner.checkpoints import Checkpoints

STATE = {"model.a": torch.arange(6.0).view(2, 3), "adamw.step.a": torch.tensor(3.0), "random": torch.ones(5).byte()}


def state(number: int) -> dict[str, torch.Tensor]:
    return {name: tensor + number for name, tensor in STATE.items()}


def assert_holds(store: Checkpoints, version: int | None) -> None:
    """The newest checkpoint is that of `version`, whole."""
    found = store.latest()
    assert (found and found.version) == version
    if found is not None and version is not None:
        assert found.position == {"sequence": version, "ids": ["x"]}
        assert found.trainer.keys() == STATE.keys()
        for name, tensor in state(version).items():
            assert torch.equal(found.trainer[name], tensor) and found.trainer[name].dtype == tensor.dtype


def save(store: Checkpoints, version: int) -> None:
    store.save(version, state(version), {"sequence": version, "ids": ["x"]})


def test_what_was_saved_is_what_is_read(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "deep" / "folder", keep=2)
    assert_holds(store, None)
    save(store, 3)
    assert_holds(store, 3)
    save(store, 12)
    assert_holds(Checkpoints(store.directory, keep=2), 12)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    store = Checkpoints(tmp_path, keep)
    for version in range(5):
        save(store, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"000000-{v:08d}.1" for v in range(5 - keep, 5)]


def test_saving_a_version_again_replaces_it(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=1)
    save(store, 7)
    store.save(7, state(7), {"sequence": 8})
    found = store.latest()
    assert found is not None and found.position == {"sequence": 8}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_learner_that_was_fenced_off_is_not_resumed_from(tmp_path: Path) -> None:
    old, new = Checkpoints(tmp_path, keep=2, generation=1), Checkpoints(tmp_path, keep=2, generation=2)
    save(old, 10)
    save(new, 12)
    save(old, 14)
    assert_holds(Checkpoints(tmp_path, keep=2), 12)


def damage_nothing_written(folder: Path) -> None:
    (folder / "complete.json").unlink()


def damage_byte(folder: Path) -> None:
    file = folder / "trainer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def damage_length(folder: Path) -> None:
    file = folder / "trainer.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def damage_position(folder: Path) -> None:
    (folder / "position.json").write_text("{}")


def damage_file_gone(folder: Path) -> None:
    (folder / "trainer.safetensors").unlink()


def damage_marker(folder: Path) -> None:
    (folder / "complete.json").write_text('{"version": 2, "fi')


def damage_marker_empty(folder: Path) -> None:
    (folder / "complete.json").write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [
        damage_nothing_written,
        damage_byte,
        damage_length,
        damage_position,
        damage_file_gone,
        damage_marker,
        damage_marker_empty,
    ],
)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: object) -> None:
    store = Checkpoints(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    damage(tmp_path / "000000-00000002.1")  # type: ignore[operator]
    assert_holds(store, 1)
    save(store, 2)  # training reaches the version again
    assert_holds(store, 2)


KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from learner.checkpoints import Checkpoints
from tests.unit.test_checkpoints import save

sync = os.fsync

def save_and_die(directory, fatal):
    operations = itertools.count()

    def count():
        if next(operations) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event, arguments):  # every change of the file system passes here
        writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writing or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            count()

    def counted_sync(descriptor):
        count()
        sync(descriptor)

    store = Checkpoints(directory, keep=1)
    save(store, 1)
    os.fsync = counted_sync
    sys.addaudithook(watch)
    save(store, 2)

for fatal in range(200):
    child = os.fork()
    if not child:
        save_and_die(Path(sys.argv[1]) / str(fatal), fatal)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


def test_a_process_killed_at_any_instant_of_a_save_leaves_a_usable_checkpoint(tmp_path: Path) -> None:
    """Real processes, the n-th killed before its n-th change of the file system, until one gets through."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, check=True, timeout=120)
    versions = []
    for number in range(len(list(tmp_path.iterdir()))):
        store = Checkpoints(tmp_path / str(number), keep=1)
        found = store.latest()
        versions.append(found.version if found else None)
        save(store, 3)
        assert_holds(store, 3)
        assert len(list(store.directory.iterdir())) == 1, "what the killed process left is cleared away"
    assert len(versions) > 15
    assert versions[0] == 1 and versions[-1] == 2
    assert versions == sorted(versions, key=lambda version: version or 0), "once the new one is there, it stays"


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"checkpoint directory .* free space or make it writable"):
        save(Checkpoints(tmp_path / "file", keep=1), 1)


def test_a_disk_that_refuses_the_tensors_is_one_sentence_and_the_former_checkpoint_stays(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=1)
    save(store, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    try:
        with pytest.raises(UserError, match=r"checkpoint directory .* free space or make it writable"):
            store.save(2, {"model.a": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_holds(store, 1)


def test_only_json_and_safetensors_are_written(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, keep=1), 1)
    names = sorted(path.name for path in (tmp_path / "000000-00000001.1").iterdir())
    assert names == ["complete.json", "position.json", "trainer.safetensors"]
    marker = json.loads((tmp_path / "000000-00000001.1" / "complete.json").read_text())
    assert sorted(marker["files"]) == names[1:]
