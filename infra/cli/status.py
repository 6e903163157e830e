"""`tailrace status`: a live view of a run from any terminal. It only reads the bus."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.interrupts import run_to_end
from infra.cli.rundir import RunDirectory, names_server, newest
from infra.errors import UserError
from infra.settings import NatsSettings, load, task_pools

FRAME_SECONDS = 1.0
CONNECT_SECONDS = 5.0  # a person is waiting
SETTLE_SECONDS = 2.0  # until what the bus retains has been read


def status(
    run: Annotated[
        str | None, typer.Option("--run", help="Name of the run; default: the one found.", show_default=False)
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            help="Folder of a run on this machine. Default: the newest one under runs/ that is going on; "
            "else the server and run that the TAILRACE_* variables name; else the newest one that is finished.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
) -> None:
    """Show a run: versions, reward, staleness, idle time of both sides, queues, rates and processes.

    Reads the bus and changes nothing. Ends with Ctrl-C.
    """
    settings = load()
    directory = RunDirectory(run_dir.absolute()) if run_dir else None if run else _local()
    if directory is not None and not directory.connection_file.exists():
        _show_finished(directory)
        return
    name, nats = directory.read_connection(settings.nats) if directory else (settings.run.name, settings.nats)
    pools = task_pools(settings)
    patience = min(nats.connect_timeout, CONNECT_SECONDS)
    run_to_end(_watch(run or name, nats.model_copy(update={"connect_timeout": patience}), pools, once, directory))
    if directory is not None and directory.summary_file.exists() and not directory.connection_file.exists():
        _show_finished(directory)


def _local() -> RunDirectory | None:
    """The newest run on this machine that is going on, or that is finished; None if a server is named instead."""
    if (found := newest("connection.toml")) is not None:
        return found
    return None if names_server() else newest("summary.json")


def _show_finished(directory: RunDirectory) -> None:
    from rich.console import Console

    from infra.cli.view import final_table

    if not directory.summary_file.exists():
        raise UserError(
            f"run directory {directory.path}: no run is going on there and none has been finished; "
            "give another --run-dir, or start one with tailrace demo"
        )
    console = Console(highlight=False)
    summary = json.loads(directory.summary_file.read_text())
    console.print(f"run {summary['run']} is finished")
    console.print(final_table(summary))


async def _watch(
    run: str, nats: NatsSettings, pools: Sequence[str], once: bool, directory: RunDirectory | None
) -> None:
    """Show the board until Ctrl-C, or until the local run is over."""
    from rich.console import Console
    from rich.live import Live

    from infra.bus import Bus
    from infra.cli.board import Board
    from infra.cli.feed import watching
    from infra.cli.view import picture

    console, board = Console(highlight=False), Board(run)
    bus = await Bus.connect(nats, f"status-{os.getpid()}")
    try:
        async with watching(bus, board, pools):
            if once or not console.is_terminal:
                await asyncio.sleep(SETTLE_SECONDS)
                console.print(picture(board, time.time()))
                return
            with Live(console=console, auto_refresh=False, screen=False) as live:
                while directory is None or directory.connection_file.exists():
                    notes = [] if bus.connected else [f"no connection to {nats.url}: what is shown is old"]
                    live.update(picture(board, time.time(), notes), refresh=True)
                    await asyncio.sleep(FRAME_SECONDS)
    finally:
        await bus.close()
