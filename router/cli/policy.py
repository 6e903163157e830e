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
from infra.errors import UserError
from infra.settings import load

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

    store = _opened(directory)
    run_to_end(_shared(store))
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
def promote(version: Annotated[str, typer.Argument(help="As `list` shows it.")], directory: Directory = None) -> None:
    """Put a version in force, whatever its trial says."""
    _changed(directory, lambda store: store.promote(version, "promoted by hand"))


@app.command()
def rollback(directory: Directory = None) -> None:
    """Put the version back in force that was so before."""
    _changed(directory, lambda store: store.roll_back())


@app.command()
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A cold-start model, from `tailrace route train`.")],
    directory: Directory = None,
) -> None:
    """Put another cold-start model on trial; a router that runs asks it beside the policy in force."""
    store = _opened(directory)
    version = store.add(file)
    typer.echo(f"{version} is on trial{_only_here(run_to_end(_shared(store)))}")
    typer.echo(f"Routers of other machines need its cold-start model as well: {store.directory / 'models'}")


def _changed(directory: Path | None, change: Callable[[PolicyStore], object]) -> None:
    store = _opened(directory)
    trouble = run_to_end(_shared(store))
    try:
        change(store)
    except UserError as error:
        raise UserError(
            f"{error}; what other routers have is not known: {trouble}" if trouble else f"{error}"
        ) from None
    typer.echo(f"{store.policy.version} is in force{_only_here(run_to_end(_shared(store)))}")


def _only_here(trouble: str) -> str:
    return f" here, and elsewhere once a router of this folder reaches the server: {trouble}" if trouble else ""


def _opened(directory: Path | None) -> PolicyStore:
    from router.policy.model import RoutingModel, cold_start
    from router.policy.store import PolicyStore

    return PolicyStore((directory or load().section("router").directory) / "policies", cold_start(), RoutingModel.load)


async def _shared(store: PolicyStore) -> str:
    """Exchange versions with the other routers of the run; says in words why that was not possible."""
    from infra.bus import Bus, PublishFailed, QueueFull, Unavailable
    from router.policy.sharing import share

    settings = load()
    patience = min(settings.nats.connect_timeout, CONNECT_SECONDS)
    try:
        bus = await Bus.connect(settings.nats.model_copy(update={"connect_timeout": patience}), f"policy-{os.getpid()}")
    except UserError as error:
        return str(error)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await share(bus, settings.run.name, store)
    except (TimeoutError, Unavailable, PublishFailed, QueueFull):
        return f"{settings.nats.url} gave no answer"
    finally:
        await bus.close()
    return ""
