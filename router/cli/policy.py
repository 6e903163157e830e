"""`tailrace route policy`: versions of the routing policy, which one is in force, and the way back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.interrupts import run_to_end
from infra.cli.rundir import going_on
from infra.errors import UserError
from infra.settings import CONFIG_VARIABLE, Settings, load
from router.cli.train import MODEL

if TYPE_CHECKING:
    from router.policy.store import PolicyStore

app = typer.Typer(help="Versions of the routing policy: list them, put one in force, go back.", no_args_is_help=True)

CONNECT_SECONDS = 3.0  # a person is waiting
SHOWN = ("decisions", "success", "success_in_force", "advantage_lower", "judged", "log_loss", "log_loss_in_force")

Directory = Annotated[
    Path | None,
    typer.Option(help="The router's folder. Default: router.directory of the run file.", show_default=False),
]


@app.command("list")
def list_versions(directory: Directory = None) -> None:
    """Show all versions, the newest last: which one is in force, which one is on trial, and why."""
    from rich.console import Console
    from rich.table import Table

    settings = _settings()
    store = _opened(directory, settings)
    run_to_end(_shared(store, settings))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("version", "state", "since (UTC)", "why", "figures"):
        table.add_column(title)
    shipped, in_force = store.shipped.version, store.policy.version
    if shipped not in store.head.notes:
        table.add_row(shipped, "active" if in_force == shipped else "retired", "", "shipped with this release", "")
    for version, note in sorted(store.head.notes.items(), key=lambda item: item[1].since_ns):
        since = datetime.fromtimestamp(note.since_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")
        state = store.head.state(version)
        if (state == "active") is not (version == in_force):  # it cannot be used, and a former one is
            state = "active" if version == in_force else "damaged"
        figures = ", ".join(f"{name} {note.metrics[name]:.4g}" for name in SHOWN if name in note.metrics)
        table.add_row(version, state, since, note.reason, figures)
    Console(highlight=False).print(table)


@app.command()
def promote(
    version: Annotated[str, typer.Argument(help="As `list` shows it, or its model as `tailrace route train` does.")],
    directory: Directory = None,
) -> None:
    """Put a version in force, whatever its trial says."""
    _changed(directory, lambda store: store.promote(store.find(version), "promoted by hand"))


@app.command()
def rollback(directory: Directory = None) -> None:
    """Put the version back in force that was so before."""
    _changed(directory, lambda store: store.roll_back())


@app.command()
def add(
    file: Annotated[
        Path, typer.Argument(metavar="PATH", help="A cold-start model, or the folder that `tailrace route train` made.")
    ],
    directory: Directory = None,
) -> None:
    """Put another cold-start model on trial; a router that runs asks it beside the policy in force."""
    settings = _settings()
    store = _opened(directory, settings)
    version = store.add(file / MODEL if file.is_dir() else file)
    typer.echo(f"{version} is on trial{_only_here(run_to_end(_shared(store, settings)))}")
    typer.echo(f"Routers of other machines need its cold-start model as well: {store.directory / 'models'}")


def _changed(directory: Path | None, change: Callable[[PolicyStore], object]) -> None:
    settings = _settings()
    store = _opened(directory, settings)
    trouble = run_to_end(_shared(store, settings))
    try:
        change(store)
    except UserError as error:
        raise UserError(
            f"{error}; what other routers have is not known: {trouble}" if trouble else f"{error}"
        ) from None
    typer.echo(f"{store.policy.version} is in force{_only_here(run_to_end(_shared(store, settings)))}")


def _only_here(trouble: str | None) -> str:
    if trouble is None:
        return ""
    reason = f": {trouble}" if trouble else ""
    return f" here; other routers take it over when one of this folder is next connected{reason}"


def _settings() -> Settings:
    """The settings in force; those of the local run that is going on, and its server, unless others are named."""
    local = going_on()
    if local is None:
        return load()
    settings = load(None if os.environ.get(CONFIG_VARIABLE) else local.run_file)
    name, nats = local.read_connection(settings.nats)
    return settings.model_copy(update={"run": settings.run.model_copy(update={"name": name}), "nats": nats})


def _opened(directory: Path | None, settings: Settings) -> PolicyStore:
    from router.policy.model import RoutingModel, cold_start
    from router.policy.store import PolicyStore

    return PolicyStore(
        (directory or settings.section("router").directory) / "policies", cold_start(), RoutingModel.load
    )


async def _shared(store: PolicyStore, settings: Settings) -> str | None:
    """Exchange versions with the other routers of the run; None if that was done.

    Else it says why it was not possible: nothing more where nobody has named a server.
    """
    from infra.bus import Bus, PublishFailed, QueueFull, Unavailable
    from router.policy.sharing import share

    named = "url" in settings.nats.model_fields_set
    patience = min(settings.nats.connect_timeout, CONNECT_SECONDS)
    try:
        bus = await Bus.connect(settings.nats.model_copy(update={"connect_timeout": patience}), f"policy-{os.getpid()}")
    except UserError as error:
        return str(error) if named else ""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await share(bus, settings.run.name, store)
    except (TimeoutError, Unavailable, PublishFailed, QueueFull):
        return f"{settings.nats.url} gave no answer" if named else ""
    finally:
        await bus.close()
    return None
