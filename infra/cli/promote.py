"""`tailrace promote`: a person decides which policy serves production."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.interrupts import run_to_end
from infra.cli.rundir import RunDirectory, going_on
from infra.errors import UserError
from infra.settings import NatsSettings, load

if TYPE_CHECKING:
    from contracts.messages import Promotion


def promote(
    version: Annotated[
        int | None,
        typer.Option("--version", min=0, help="Which version; default: the newest published.", show_default=False),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why, for whoever reads the record.")] = "",
    run: Annotated[
        str | None, typer.Option("--run", help="Name of the run; default: the one found.", show_default=False)
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", help="Folder of the run; default: the newest one that is going on.", show_default=False
        ),
    ] = None,
) -> None:
    """Let a published policy serve production from now on.

    It may be older than the one that serves. Recorded as a person's override, with name and reason.
    """
    settings = load()
    directory = RunDirectory(run_dir.absolute()) if run_dir else None if run else going_on()
    name, nats = directory.read_connection(settings.nats) if directory else (run or settings.run.name, settings.nats)
    made = run_to_end(_promote(name, nats, version, reason))
    before = f" in place of version {made.previous.version}" if made.previous else ""
    typer.echo(f"version {made.policy.version} serves production of run {name}{before}")


async def _promote(run: str, nats: NatsSettings, number: int | None, reason: str) -> Promotion:
    from infra.bus import Bus
    from infra.policies import PolicyStore
    from infra.production import PromotionRefused

    bus = await Bus.connect(nats, "promote")
    try:
        policies = PolicyStore(bus, run)
        version = await policies.find(number)
        if version is None:
            raise UserError(
                f"run {run}: {'no policy' if number is None else f'no version {number}'} is published there"
            )
        return await policies.production.promote(version, decided_by=getpass.getuser(), reason=reason, override=True)
    except PromotionRefused as refused:
        raise UserError(f"run {run}: {refused}") from None
    finally:
        await bus.close()
