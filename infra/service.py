"""The life cycle of a service process: settings, telemetry, bus, health, main, bounded drain, exit code.

A service is an async function `main(service)`. It says `ready`, beats in its loops, watches `stopping`, and returns
when it has drained; everything around that is here and the same for every service.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import structlog
from nats.errors import Error as NatsError

from contracts import subjects
from contracts.messages import Heartbeat
from infra import telemetry
from infra.bootstrap import bootstrap
from infra.bus import Bus, PublishFailed, QueueFull, Unavailable
from infra.errors import UserError
from infra.health import Health, serve_health
from infra.runfile import to_toml
from infra.settings import Settings, load

log = structlog.get_logger()

CLOSE_SECONDS = 5.0  # closing the bus and flushing telemetry, each
BUS_SECONDS = 5.0  # before the server is asked again whether it has what the catalogue describes
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2


class Service:
    """What a service's main gets."""

    def __init__(
        self,
        name: str,
        instance: str,
        settings: Settings,
        bus: Bus,
        stopping: asyncio.Event,
        *,
        bus_later: bool = False,
    ) -> None:
        self.name = name
        self.instance = instance
        self.settings = settings
        self.bus = bus
        self.stopping = stopping  # set by SIGTERM and SIGINT: stop taking work, finish or give back, return
        self.health = Health(settings.service.liveness_seconds, time.monotonic, needs_bus=not bus_later)
        self.started_ns = time.time_ns()
        self._bus_ready = asyncio.Event()
        if not bus_later:
            self._bus_ready.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ready(self, detail: str = "") -> None:
        """From now on /readyz succeeds, as long as the bus is connected where the service needs it."""
        self.health.ready(detail)
        log.info("ready", detail=detail)

    def not_ready(self, detail: str) -> None:
        """From now on /readyz fails with this sentence."""
        self.health.not_ready(detail)
        log.info("not ready", detail=detail)

    def beat(self) -> None:
        """Say that the main loop goes on; /healthz fails after `service.liveness_seconds` of silence."""
        self.health.beat()

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine beside main. An exception in it ends the service as one in main would."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            error.add_note(f"in the background task {task.get_name()}")
            self._failure.set_exception(error)

    async def bus_ready(self) -> None:
        """Wait until the bus has been reached and has what the catalogue describes: at once, but for `bus_later`."""
        await self._bus_ready.wait()

    async def prepare_bus(self) -> None:
        """Wait for the server and make what it lacks: then `bus_ready` ends. What is wrong is said, and asked again."""
        await self.bus.connection.reached()
        told = ""
        while True:
            try:
                await _bootstrap(self.bus, self.name, self.settings)
            except (UserError, Unavailable, NatsError) as error:
                if str(error) != told:
                    log.error("the bus cannot be used yet", error=str(error))
                    told = str(error)
                await asyncio.sleep(BUS_SECONDS)
                continue
            self._bus_ready.set()
            return

    @property
    def state(self) -> str:
        """starting, ready or draining: what the heartbeat says."""
        return "draining" if self.stopping.is_set() else "ready" if self.health.is_ready else "starting"

    async def heartbeat(self, state: str) -> None:
        """Publish one sign of life; where the server does not take it in time, the next one will do."""
        run, now = self.settings.run.name, time.time_ns()
        message = Heartbeat(
            run=run,
            service=self.name,
            instance=self.instance,
            state=state,
            detail=self.health.detail,
            started_ns=self.started_ns,
            at_ns=now,
        )
        patience = max(self.settings.service.heartbeat_seconds, 1.0)
        try:
            await self.bus.publish(subjects.HEARTBEAT, message, id=f"{self.instance}.{now}", patience=patience, run=run)
        except (PublishFailed, QueueFull) as error:
            # That the server is away is in the log already.
            tell = log.warning if self.bus.connected else log.debug
            tell("heartbeat not published", error=str(error))

    async def heartbeats(self) -> None:
        """Publish a sign of life every `service.heartbeat_seconds`; an unreachable server costs only the beats."""
        interval = self.settings.service.heartbeat_seconds
        while True:
            await self.heartbeat(self.state)
            await asyncio.sleep(interval)

    async def run(self, main: Callable[[Service], Awaitable[None]]) -> None:
        """Run `main` to its end, or for at most `service.drain_seconds` after the stop signal.

        Raises what main or a spawned task raised.
        """
        running: asyncio.Future[None] = asyncio.ensure_future(main(self))
        stopped: asyncio.Future[Any] = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait([running, stopped, self._failure], return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and not self._failure.done():
                self.health.not_ready("draining")
                limit = self.settings.service.drain_seconds
                log.info("draining", limit_seconds=limit)
                await asyncio.wait([running, self._failure], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not running.done() and not self._failure.done():
                    log.warning("drain took too long and is cut off", limit_seconds=limit)
            if self._failure.done():
                self._failure.result()
            if running.done():
                running.result()
        finally:
            await _cancel([running, stopped, *self._tasks])


async def _cancel(tasks: list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # taken: what counted has been raised already


def serve(name: str, main: Callable[[Service], Awaitable[None]], *, bus_later: bool = False) -> NoReturn:
    """Run a service until main returns, and exit: 0 done, 1 failed, 2 an error that a person can act on.

    With `bus_later` it starts, and is ready, without the server: connecting goes on in the background, and
    `Service.bus_ready` waits for it.

    Takes `--config FILE` and `--print-config` from the command line and everything else from the run file and the
    environment. The first SIGTERM or SIGINT drains, a second one exits at once.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=f"Run one {name} process.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="run file (TOML); default: $TAILRACE_CONFIG")
    parser.add_argument("--print-config", action="store_true", help="print the settings in force and exit")
    arguments = parser.parse_args()
    try:
        settings = load(arguments.config)
        if arguments.print_config:
            print(to_toml(settings), end="")
            sys.exit(0)
        instance = settings.service.instance or f"{name}-{_token(socket.gethostname())}-{os.getpid()}"
        telemetry.setup(name, instance, settings)
        asyncio.run(_live(name, instance, settings, main, bus_later))
        code = 0
    except Exception as error:
        if (cause := _user_error(error)) is not None:
            print(f"tailrace {name}: {cause}", file=sys.stderr, flush=True)
            code = EXIT_USER_ERROR
        else:
            log.exception("failed")
            code = EXIT_FAILURE
    telemetry.shutdown()
    sys.exit(code)


def _user_error(error: BaseException) -> UserError | None:
    """The error a person can act on, also where a task group wrapped it."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for part in error.exceptions if (found := _user_error(part)) is not None), None)
    return error if isinstance(error, UserError) else None


def _token(host: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in host.lower())


async def _live(
    name: str, instance: str, settings: Settings, main: Callable[[Service], Awaitable[None]], bus_later: bool
) -> None:
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def stop(signum: int) -> None:
        if interrupted.is_set():
            os._exit(128 + signum)
        interrupted.set()
        # A thread that computes cannot be cancelled: the exit must not wait for it beyond the limit.
        limit = threading.Timer(settings.service.drain_seconds + 2 * CLOSE_SECONDS, os._exit, (0,))
        limit.daemon = True
        limit.start()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop, signum)
    connecting = asyncio.create_task(_connect(name, instance, settings, bus_later))
    waiting = asyncio.create_task(interrupted.wait())
    await asyncio.wait({connecting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not connecting.done():
        await _cancel([connecting])
        return
    bus = connecting.result()
    service = Service(name, instance, settings, bus, interrupted, bus_later=bus_later)
    try:
        async with serve_health(service.health, bus, settings.service.http_host, settings.service.http_port) as port:
            log.info("started", pid=os.getpid(), health_port=port)
            service.spawn(service.heartbeats(), "heartbeats")
            if bus_later:
                service.spawn(service.prepare_bus(), "bus")
            await service.run(main)
            await service.heartbeat("stopped")
    finally:
        await bus.close()
        log.info("stopped")


async def _connect(name: str, instance: str, settings: Settings, bus_later: bool) -> Bus:
    if bus_later:
        return Bus.later(settings.nats, instance)
    bus = await Bus.connect(settings.nats, instance)
    await _bootstrap(bus, name, settings)
    return bus


async def _bootstrap(bus: Bus, name: str, settings: Settings) -> None:
    pools = sorted(settings.section(name).task_pools())
    await bootstrap(bus, settings.run.name, pools, create=settings.nats.manage_streams)
