"""A run on this machine from start to summary: server, processes, live view, figures."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from importlib.metadata import entry_points
from typing import Any, get_args

from rich.console import Console
from rich.live import Live

from infra import telemetry
from infra.bootstrap import bootstrap
from infra.bus import Bus
from infra.cli.board import Board
from infra.cli.feed import collect, watching
from infra.cli.rundir import RunDirectory, child_environment, shown, write_run_file
from infra.cli.view import final_table, line, picture
from infra.errors import UserError
from infra.server import EmbeddedServer
from infra.settings import NatsSettings, Settings
from infra.supervisor import Backoff, Supervisor, children

COMPLETES = "learner"  # the run is done when this service is
DEFAULT_PROCESSES = {"learner": 1, "generator": 1}
STOP_MARGIN = 12.0  # seconds beyond its own limit that a draining process gets before it is killed
FRAME_SECONDS = 0.5
LINE_SECONDS = 5.0
SERVER_CHECK_SECONDS = 0.5
NOTES = 4  # last sentences shown below the board


async def execute(settings: Settings, directory: RunDirectory, *, embedded: bool, console: Console) -> dict[str, Any]:
    """Carry out a run and return its summary, which is also written to the run directory.

    Raises `UserError` when a person has to act. On cancellation everything that was started is stopped.
    """
    _check_processes(settings)
    with ExitStack() as stack:
        stack.enter_context(directory.locked())
        directory.summary_file.unlink(missing_ok=True)
        write_run_file(directory, settings)
        directory.logs.mkdir(exist_ok=True)
        log = stack.enter_context((directory.logs / "supervisor.log").open("a"))
        telemetry.setup_logging(settings.telemetry.log_level, {"service": "supervisor"}, log)
        async with _server(settings, directory, embedded) as (nats, server):
            bus = await Bus.connect(nats, "supervisor")
            try:
                return await _supervise(settings, directory, nats, server, bus, console)
            finally:
                await bus.close()


@asynccontextmanager
async def _server(
    settings: Settings, directory: RunDirectory, embedded: bool
) -> AsyncIterator[tuple[NatsSettings, EmbeddedServer | None]]:
    server = EmbeddedServer(directory.path / "nats") if embedded else None
    try:
        if server is not None:
            server.start()  # on the main thread: the server ends with the thread that starts it
        nats = server.settings if server else settings.nats
        directory.write_connection(settings.run.name, nats, secrets=embedded)
        yield nats, server
    finally:
        directory.connection_file.unlink(missing_ok=True)
        if server is not None:
            server.stop()


async def _supervise(
    settings: Settings,
    directory: RunDirectory,
    nats: NatsSettings,
    server: EmbeddedServer | None,
    bus: Bus,
    console: Console,
) -> dict[str, Any]:
    processes = settings.processes or DEFAULT_PROCESSES
    services = {name.partition(".")[0] for name in processes}
    pools = sorted(set[str]().union(*(settings.section(service).task_pools() for service in services)))
    await bootstrap(bus, settings.run.name, pools, create=nats.manage_streams)
    board, notes = Board(settings.run.name), deque[str](maxlen=NOTES)
    live = _live(console, board, notes)

    def say(sentence: str) -> None:
        notes.append(sentence)
        if live is None:
            console.print(sentence, soft_wrap=True)

    supervisor = Supervisor(
        children(processes),
        completes=COMPLETES,
        environment=child_environment(directory, nats),
        logs=directory.logs,
        stop_seconds=settings.service.drain_seconds + STOP_MARGIN,
        say=say,
    )
    where, logs = shown(directory.path), shown(directory.logs)
    console.print(f"run {settings.run.name} in {where}: {_listed(processes)}; logs in {logs}", soft_wrap=True)
    async with watching(bus, board, pools):
        running = asyncio.create_task(supervisor.run())
        helpers = [asyncio.create_task(_show(console, board, notes, live))]
        if server is not None:
            helpers.append(asyncio.create_task(_keep_server(server, say)))
        try:
            done, _ = await asyncio.wait({running, *helpers}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (running, *helpers):
                task.cancel()
            await asyncio.gather(running, *helpers, return_exceptions=True)
            console.print(line(board, time.time()), soft_wrap=True)
    summary = await collect(bus, settings.run.name)
    console.print(final_table(summary))
    directory.write_summary(summary)
    console.print(f"all figures: {shown(directory.summary_file)}", soft_wrap=True)
    return summary


def learns(settings: Settings) -> bool:
    """Whether a learner, which writes checkpoints, is among the processes of the run."""
    processes = settings.processes or DEFAULT_PROCESSES
    return any(count and name.partition(".")[0] == COMPLETES for name, count in processes.items())


def _check_processes(settings: Settings) -> None:
    known = sorted(point.name for point in entry_points(group="tailrace.settings"))
    for name, count in settings.processes.items():
        service, _, role = name.partition(".")
        if service not in known:
            raise UserError(f"processes.{name}: no such service; known are {', '.join(known)}")
        roles = (
            get_args(field.annotation) if (field := type(settings.section(service)).model_fields.get("role")) else ()
        )
        if role and role not in roles:
            raise UserError(
                f"processes.{name}: {service} has no such role; its roles are: {', '.join(roles) or 'none'}"
            )
        if count < 0:
            raise UserError(f"processes.{name}: must be 0 or more, got {count}")


def _listed(processes: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}{'s' if count != 1 else ''}" for name, count in processes.items())


async def _keep_server(server: EmbeddedServer, say: Callable[[str], None]) -> None:
    """Start the server again when it dies; the services wait for it."""
    backoff, started = Backoff(), time.monotonic()
    while True:
        await asyncio.sleep(SERVER_CHECK_SECONDS)
        if not server.running:
            delay = backoff.failed(time.monotonic() - started)
            if delay is None:
                raise UserError(f"the NATS server ends again and again; see {server.directory / 'nats-server.log'}")
            say(f"the NATS server ended; restarting it in {delay:g} s")
            await asyncio.sleep(delay)
            server.start()
            started = time.monotonic()


def _live(console: Console, board: Board, notes: deque[str]) -> Live | None:
    if not console.is_terminal:
        return None
    return Live(
        console=console,
        get_renderable=lambda: picture(board, time.time(), list(notes)),
        auto_refresh=False,  # the board changes on the event loop, so it is drawn there
        transient=True,
    )


async def _show(console: Console, board: Board, notes: deque[str], live: Live | None) -> None:
    """The board as a live picture on a terminal, else a line whenever there is something new to say."""
    if live is not None:
        with live:
            while True:
                live.refresh()
                await asyncio.sleep(FRAME_SECONDS)
    former = ""
    while True:
        await asyncio.sleep(LINE_SECONDS)
        if (now := line(board, time.time())) != former:
            console.print(now, highlight=False, soft_wrap=True)
            former = now
