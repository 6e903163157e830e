"""Checkpoints that are either whole or not there.

A checkpoint is a folder `GGGGGG-VVVVVVVV.A`: learner generation, version and attempt; the newest is that of the newest
generation, so that a learner which was fenced off and goes on writing is never resumed from. It is written under
another name, forced to disk, renamed, and only then marked complete; the marker lists every file with its size and
sha256. Whatever instant the process dies at, the newest marked folder is usable, and what has no marker, or does not
match it, is ignored and later removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import structlog
from safetensors import SafetensorError
from torch import Tensor

from infra.errors import UserError

log = structlog.get_logger(__name__)

MARKER = "complete.json"
POSITION = "position.json"
UNFINISHED = "unfinished-"
TENSORS = "trainer.safetensors"
NAME = re.compile(r"(\d{6,})-(\d{8,})\.(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """What `Checkpoints.save` was given."""

    version: int
    trainer: dict[str, Tensor]
    position: dict[str, Any]


class Checkpoints:
    """The checkpoints in one directory; one process at a time may save to it."""

    def __init__(self, directory: Path, keep: int, generation: int = 0) -> None:
        self.directory = directory
        self.keep = keep  # newest complete checkpoints that `save` leaves
        self.generation = generation  # of the learner that saves

    def save(self, version: int, trainer: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        """Write a checkpoint from a snapshot that nobody changes meanwhile, then remove those not kept.

        `position` must be JSON. Blocks for the disk: call it in a thread. Raises `UserError` when the disk refuses; the
        earlier checkpoints are then as they were.
        """
        try:
            self._save(version, trainer, position)
        except (OSError, SafetensorError) as error:  # a full disk is the one or the other
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"checkpoint directory {self.directory}: {reason}; free space or make it writable"
            ) from error

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, read and verified; None without one. Logs and skips those that are not."""
        for folder in self._marked():
            try:
                return _read(folder)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                log.warning("checkpoint is damaged, taking an older one", checkpoint=str(folder), error=str(error))
        return None

    def _save(self, version: int, trainer: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for remains in self.directory.glob(f"{UNFINISHED}*"):  # of a save that did not end
            shutil.rmtree(remains)
        same = [attempt for *found, attempt in map(_key, self._folders()) if found == [self.generation, version]]
        name = f"{self.generation:06d}-{version:08d}.{max(same, default=0) + 1}"
        unfinished = self.directory / (UNFINISHED + name)
        unfinished.mkdir()
        (unfinished / POSITION).write_text(json.dumps(position))
        safetensors.torch.save_file(dict(trainer), unfinished / TENSORS)  # straight from the snapshot's memory
        files = {}
        for file in (POSITION, TENSORS):
            _sync(unfinished / file)
            files[file] = _fingerprint(unfinished / file)
        _sync(unfinished)
        folder = unfinished.rename(self.directory / name)
        _sync(self.directory)
        marker = folder / (UNFINISHED + MARKER)
        marker.write_text(json.dumps({"version": version, "files": files}))
        _sync(marker)
        marker.rename(folder / MARKER)
        _sync(folder)
        self._prune(folder)

    def _prune(self, saved: Path) -> None:
        """Keep the checkpoint just saved and the newest others, `keep` in all; remove the rest, whole or not."""
        kept = [saved, *(folder for folder in self._marked() if folder != saved)][: self.keep]
        for folder in self._folders():
            if folder not in kept:
                (folder / MARKER).unlink(missing_ok=True)  # first: a folder half removed is not a checkpoint
                shutil.rmtree(folder)

    def _folders(self) -> list[Path]:
        """Folders named like checkpoints, newest first."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_key, reverse=True)

    def _marked(self) -> list[Path]:
        return [folder for folder in self._folders() if (folder / MARKER).is_file()]


def _key(folder: Path) -> tuple[int, int, int]:
    generation, version, attempt = map(int, re.split("[-.]", folder.name))
    return generation, version, attempt


def _read(folder: Path) -> Checkpoint:
    """Read a checkpoint, checking every file against the marker. Raises one of several errors where they differ."""
    marker = json.loads((folder / MARKER).read_bytes())
    for name in (POSITION, TENSORS):
        if _fingerprint(folder / name) != marker["files"][name]:
            raise ValueError(f"{name} does not match the marker")
    return Checkpoint(
        version=marker["version"],
        trainer=safetensors.torch.load_file(folder / TENSORS),
        position=json.loads((folder / POSITION).read_bytes()),
    )


def _fingerprint(path: Path) -> list[Any]:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _sync(path: Path) -> None:
    """Force a file's bytes, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
