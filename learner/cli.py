"""`tailrace export`: a trained policy as a Hugging Face folder. torch is imported only once it is needed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts import subjects
from contracts.messages import PolicyVersion
from contracts.policies import TensorSpec
from infra.cli.interrupts import run_to_end
from infra.cli.rundir import RUNS, RunDirectory, newest
from infra.errors import UserError
from infra.settings import NatsSettings, load

if TYPE_CHECKING:
    from infra.bus import Bus

CHECKPOINTS = "learner"  # where in the run's folder the learner keeps them


def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write; must not exist yet, or be empty.")],
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Folder of the run; default: the newest one under runs/.", show_default=False),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Take the policy from the bus instead of the newest checkpoint.")
    ] = False,
    version: Annotated[
        int | None,
        typer.Option(
            "--version", min=0, help="With --published: which version; default: the newest.", show_default=False
        ),
    ] = None,
) -> None:
    """Write a policy as a folder that transformers loads as it is: config, tokenizer, safetensors.

    By default the newest checkpoint of a run on this machine. With --published a version from the bus, as long as it
    is kept there: of the run that is going on, or of the run and server that the TAILRACE_* variables name.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already and is not an empty folder; give another name")
    if version is not None and not published:
        raise UserError("--version needs --published: only the newest checkpoint can be exported")
    if published:
        settings = load()
        directory = RunDirectory(run_dir.absolute()) if run_dir else newest("connection.toml")
        name, nats = (
            directory.read_connection(settings.nats) if directory else (settings.run.name, settings.nats)
        )  # fmt: skip
        done = run_to_end(_from_bus(name, nats, version, folder))
    else:
        found = RunDirectory(run_dir.absolute()) if run_dir else newest(CHECKPOINTS)
        if found is None:
            raise UserError(f"there is no run with checkpoints under {RUNS}/; give its folder with --run-dir")
        done = run_to_end(asyncio.to_thread(_from_checkpoint, found, folder))
    typer.echo(f"version {done} written to {folder}")


def _from_checkpoint(directory: RunDirectory, folder: Path) -> int:
    from transformers.utils import logging

    from infra import models
    from learner.checkpoints import Checkpoints
    from learner.trainer import Trainer

    logging.disable_progress_bar()
    settings = load(directory.run_file)
    learner = settings.section("learner")
    checkpoint = Checkpoints(directory.path / CHECKPOINTS, learner.keep_checkpoints).latest()
    if checkpoint is None:
        raise UserError(f"run directory {directory.path} holds no complete checkpoint yet; try again later")
    trainer = Trainer(models.resolve(learner.model, seed=settings.run.seed), learner, seed=settings.run.seed)
    trainer.load_state(checkpoint.trainer)
    trainer.export(folder)
    return trainer.version


async def _from_bus(run: str, nats: NatsSettings, version: int | None, folder: Path) -> int:
    from infra.blobs import BlobError
    from infra.bus import Bus
    from infra.policies import PolicyStore

    bus = await Bus.connect(nats, "export")
    try:
        store = PolicyStore(bus, run)
        policy = await store.head() if version is None else await _find(bus, run, version)
        if policy is None:
            which = "no policy" if version is None else f"no policy of version {version}"
            raise UserError(f"run {run} has published {which} on {nats.url}; look with tailrace status")
        try:
            data, files = await store.fetch(policy), await store.get_bundle(policy.bundle)
        except BlobError as error:
            raise UserError(
                f"version {policy.policy.version} of run {run} cannot be read from the bus: {error}; "
                "only the newest learner.keep_versions versions are kept"
            ) from None
    finally:
        await bus.close()
    await asyncio.to_thread(_write, data, policy.tensors, files, folder)
    return policy.policy.version


async def _find(bus: Bus, run: str, version: int) -> PolicyVersion | None:
    """The policy of that version in the newest generation that has one."""
    found: PolicyVersion | None = None
    reader = bus.read(
        subjects.POLICY_PUBLISHED, kind=PolicyVersion, follow=False, consumer="export", run=run
    )  # fmt: skip
    async with aclosing(reader):
        async for received in reader:
            if received.message.policy.version == version:
                found = received.message
    return found


def _write(data: bytearray, tensors: list[TensorSpec], files: dict[str, bytes], folder: Path) -> None:
    import torch
    from transformers.utils import logging

    from infra import models, weights

    logging.disable_progress_bar()

    models.unbundle(files, folder)
    state = weights.unpack(data, tensors)
    dtype = next(iter(state.values())).dtype
    model = models.load_model(folder, dtype=dtype, device=torch.device("cpu"), weights=False)
    model.load_state_dict(state, strict=False)  # tied tensors are carried once
    model.save_pretrained(folder)
