"""`tailrace bootstrap`: streams and consumers for operators who do not let the services create them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contracts.subjects import ROUTE_WORKERS
from infra.cli.interrupts import run_to_end
from infra.settings import Settings, load, task_pools


def bootstrap(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Run file (TOML); default: $TAILRACE_CONFIG.", show_default=False),
    ] = None,
) -> None:
    """Create the streams and consumers of a run on its NATS server.

    Harmless where they exist already; one that exists with another configuration is an error. Services do this by
    themselves unless nats.manage_streams is false.
    """
    run_to_end(_create(load(file)))


async def _create(settings: Settings) -> None:
    from infra import bootstrap as streams
    from infra.bus import Bus

    pools = task_pools(settings)
    bus = await Bus.connect(settings.nats, "bootstrap")
    try:
        await streams.bootstrap(bus, settings.run.name, pools, create=True)
        await streams.ensure_consumer(bus, ROUTE_WORKERS, create=True, run=settings.run.name)
    finally:
        await bus.close()
    typer.echo(f"streams and consumers of run {settings.run.name} are ready on {settings.nats.url}")
