"""Versions of the routing policy on disk: what is in force, what is on trial, and the way back.

A version is a document that names its cold-start model and holds the calibration learned on top of it; its name is the
digest of its bytes. The head, a small file, says which one is in force. Everything is written atomically and checked
when it is read: a file that is truncated, altered or nonsense is refused with one sentence, and the policy in force
stays.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from infra.errors import UserError
from router.policy.calibration import Calibration
from router.policy.decide import Model, Policy
from router.policy.versions import MAX_BYTES, Document, Head, Invalid, Note, checked, decode, decode_head, encode

log = structlog.get_logger(__name__)

KEPT = 20  # versions that are kept
HEAD = "head.json"
MODELS = "models"


class PolicyStore:
    """The routing policies of one router, in a folder.

    `policy` is in force and `trial`, where there is one, only asked; both are always usable. `model` is the cold-start
    model that is used where there is no policy yet; others are looked for in the folder `models`, and read by `load`,
    which raises `UserError`.
    """

    def __init__(
        self, directory: Path, model: Model, load: Callable[[Path], Model], now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.directory = directory
        self._models = {model.version: model}
        self._load_model = load
        self._now_ns = now_ns
        self.shipped = Policy(encode(Document(model.version, Calibration()))[0], model, Calibration())
        self._made_on = {self.shipped.version: model.version}
        self.policy = self.shipped
        self.trial: Policy | None = None
        self.head = Head()
        self.refresh()

    # --- reading ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take up what the folder says now. What cannot be used is logged, and a former version is in force instead."""
        try:
            head = self._read_head()
        except Invalid as error:
            log.error("routing policies not read", in_force=self.policy.version, reason=str(error))
            return
        if head != self.head:
            self.policy = self._last_usable(head.history)
            self.trial = self._usable(head.trial) if head.trial else None
            self.head = head

    def _read_head(self) -> Head:
        try:
            return decode_head((self.directory / HEAD).read_bytes())
        except FileNotFoundError:
            return Head()
        except OSError as error:
            raise Invalid(f"head of the routing policies: {error.strerror}") from None

    def _last_usable(self, history: Sequence[str]) -> Policy:
        found = (self._usable(version) for version in reversed(history))
        return next((policy for policy in found if policy is not None), self.shipped)

    def _usable(self, version: str) -> Policy | None:
        try:
            return self.load(version)
        except Invalid as error:
            log.error("routing policy refused", version=version, in_force=self.policy.version, reason=str(error))
            return None

    def load(self, version: str) -> Policy:
        """A stored version, ready for use. Raises `Invalid`."""
        for policy in (self.shipped, self.policy):
            if version == policy.version:
                return policy
        document = decode(version, self.read(version))
        try:
            return Policy(version, self._model(document.model), document.calibration)
        except UserError as error:
            raise Invalid(f"routing policy {version}: {error}") from None

    def _model(self, version: str) -> Model:
        """A cold-start model. Raises `UserError` where there is none of that version that can be used."""
        if version not in self._models:
            path = self.directory / MODELS / f"{checked(version)}.safetensors"
            model = self._load_model(path)
            if model.version != version:
                raise UserError(f"{path} holds cold-start model {model.version}; put the right file in its place")
            self._models[version] = model
        return self._models[version]

    def model_of(self, version: str) -> str:
        """Version of the cold-start model that a policy is made on; empty where that is not known here."""
        if version not in self._made_on:
            try:
                self._made_on[version] = decode(version, self.read(version)).model
            except Invalid:
                return ""
        return self._made_on[version]

    def find(self, name: str) -> str:
        """The version that a person means by its name, or by that of the cold-start model which it alone is made on.

        A name that says neither is returned as it is. Raises `UserError` if several versions are made on that model.
        """
        known = sorted({self.shipped.version, *self.head.history, *self.head.notes})
        made = [] if name in known else [version for version in known if self.model_of(version) == name]
        if len(made) > 1:
            raise UserError(
                f"several routing policies are made on cold-start model {name}: name one of {', '.join(made)}"
            )
        return made[0] if made else name

    def has(self, version: str) -> bool:
        """Whether a version is here, and usable as far as its content goes."""
        try:
            return version == self.shipped.version or bool(decode(version, self.read(version)))
        except Invalid:
            return False

    def read(self, version: str) -> bytes:
        """A version's bytes, unchecked. Raises `Invalid` where they cannot be had."""
        try:
            with (self.directory / f"{checked(version)}.json").open("rb") as file:
                return file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            raise Invalid(f"routing policy {version}: there is none of that version here") from None
        except OSError as error:
            raise Invalid(f"routing policy {version}: {error.strerror}") from None

    # --- changing -----------------------------------------------------------------------------------------------------

    def adopt(self, head: Head, documents: Mapping[str, bytes]) -> None:
        """Take another router's head and versions for one's own, unless this one is newer by now. Raises `Invalid`."""
        for version, data in documents.items():
            decode(version, data)
        self._change(lambda mine: head if head.serial >= mine.serial else mine, documents)

    def add(self, path: Path) -> str:
        """Take in another cold-start model, put it on trial with nothing learned yet; returns that policy's version.

        Raises `UserError` if it cannot be used.
        """
        model = self._load_model(path)
        kept = self.directory / MODELS
        kept.mkdir(parents=True, exist_ok=True)
        self._write(f"{MODELS}/{model.version}.safetensors", path.read_bytes())
        document = Document(model.version, Calibration(), self.policy.version, made_ns=self._now_ns())
        return self.try_out(document, f"cold-start model {model.version} added")

    def try_out(self, document: Document, reason: str) -> str:
        """Put a new policy on trial, in the place of another one; returns its version. Raises `Invalid`."""
        version, data = encode(document)
        decode(version, data)
        self._change(lambda head: self._noted(head, version, reason, {}, trial=version), {version: data})
        return version

    def promote(self, version: str, reason: str, metrics: dict[str, float] | None = None) -> None:
        """Put a version in force, and retire the one that was. Raises `UserError` if that cannot be done."""
        try:
            self.load(version)
        except Invalid as error:
            raise UserError(f"{error}; `tailrace route policy list` shows what there is") from None
        if version == self.policy.version:
            raise UserError(f"routing policy {version} is in force already")

        def promoted(head: Head) -> Head:
            trial = "" if head.trial == version else head.trial
            history = [*head.history, version][-KEPT:]
            return self._noted(head, version, reason, metrics or {}, trial=trial, history=history)

        self._change(promoted)

    def retire(self, version: str, reason: str, metrics: dict[str, float]) -> None:
        """End the trial of a version without a promotion."""
        self._change(
            lambda head: self._noted(head, version, reason, metrics, trial="" if head.trial == version else head.trial)
        )

    def roll_back(self) -> str:
        """Put the version back in force that was so before; returns it. Raises `UserError` if there is none."""
        former = self.policy.version
        if former == self.shipped.version:
            raise UserError(f"routing policy {former} is the shipped one: there is none to go back to")

        def rolled_back(head: Head) -> Head:
            history = head.history[: head.history.index(former)] if former in head.history else []
            return self._noted(head, former, "rolled back", {}, history=history)

        self._change(rolled_back)
        return self.policy.version

    def _noted(self, head: Head, version: str, reason: str, metrics: dict[str, float], **changes: Any) -> Head:
        others = [(name, note) for name, note in head.notes.items() if name != version]
        kept = dict(sorted(others, key=lambda item: item[1].since_ns)[-KEPT + 1 :])
        kept[version] = Note(self._now_ns(), reason, metrics)
        return msgspec.structs.replace(head, notes=kept, **changes)

    def _change(self, edit: Callable[[Head], Head], documents: Mapping[str, bytes] | None = None) -> None:
        """Store documents and edit the head; processes that do so at the same time take turns."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                head = self._read_head()
            except Invalid as error:
                log.error("head of the routing policies is replaced", reason=str(error))
                head = self.head
            edited = edit(head)
            if edited.serial <= head.serial and edited != head:
                edited = msgspec.structs.replace(edited, serial=head.serial + 1)
            for version, data in (documents or {}).items():
                self._write(f"{version}.json", data)
            self._write(HEAD, msgspec.json.encode(edited))
            self._forget(edited)
        self.refresh()

    def _forget(self, head: Head) -> None:
        """Delete versions that the head no longer names."""
        for path in self.directory.glob("*.json"):
            if path.name != HEAD and path.stem not in {*head.history, *head.notes, head.trial}:
                path.unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> None:
        """Write a file as a whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.directory / f".{secrets.token_hex(8)}"
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.directory / name)
        finally:
            partial.unlink(missing_ok=True)
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
