"""What a whole-system benchmark measures: a server of its own and the services as processes, as a user starts them.

    async with cluster() as machine:
        async with machine.run("async-1", {"learner.model": "tiny", "learner.steps": 20}) as run:
            await run.until_step(20, limit=120.0)
            summary = await run.summary()

Runs of one cluster share its server and follow each other. When the block is left, what still runs is stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from contracts import subjects
from contracts.messages import GeneratorReport, Message, StepReport
from contracts.subjects import Channel
from infra.benchmarks.report import progress
from infra.bootstrap import bootstrap
from infra.bus import Bus
from infra.cli.feed import collect, observe
from infra.errors import UserError
from infra.server import EmbeddedServer
from infra.settings import PREFIX
from infra.supervisor import Child, Supervisor, children

STOP_SECONDS = 3.0  # from SIGTERM to SIGKILL: what was measured is over by then
GRACE_SECONDS = 5.0  # until what a completed run has published is read
POOL = "default"
ONE_OF_EACH = {"learner": 1, "generator": 1}

M = TypeVar("M", bound=Message)

Value = str | int | float | list[str] | Path


def variables(settings: Mapping[str, Value]) -> dict[str, str]:
    """Settings by their dotted names, `learner.group_size`, as the environment variables of a service."""
    return {
        PREFIX + name.upper().replace(".", "__"): json.dumps(value) if isinstance(value, list) else str(value)
        for name, value in settings.items()
    }


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    """A server in a new folder, which is deleted at the end; after an error it stays, for the logs in it.

    Enter it on the main thread: the server ends with the thread that started it.
    """
    directory = Path(tempfile.mkdtemp(prefix="tailrace-bench-"))
    server, failed = EmbeddedServer(directory / "nats"), False
    try:
        server.start()
        bus = await Bus.connect(server.settings, "bench")
        try:
            yield Cluster(directory, server, bus)
        finally:
            await bus.close()
    except Exception:
        failed = True
        progress(f"what the processes said is in {directory}")
        raise
    finally:
        server.stop()
        if not failed:
            shutil.rmtree(directory, ignore_errors=True)


class Cluster:
    """A running server and an onlooker's connection to it; `cluster` makes one."""

    def __init__(self, directory: Path, server: EmbeddedServer, bus: Bus) -> None:
        self.directory = directory
        self.server = server
        self.bus = bus

    @asynccontextmanager
    async def run(
        self,
        name: str,
        settings: Mapping[str, Value],
        *,
        processes: Mapping[str, int] | Sequence[Child] = ONE_OF_EACH,
        environment: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Run]:
        """Start the processes of a run: services and how many, or any commands, which get the same environment.

        Settings that are not given have their defaults: variables of ours around the benchmark do not count.
        """
        nats, directory = self.server.settings, self.directory / name
        own: dict[str, Value] = {
            "run.name": name,
            "run.directory": directory,
            "nats.url": nats.url,
            "nats.user": nats.user,
            "nats.password": nats.password.get_secret_value(),
        }
        foreign = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        spoiled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await bootstrap(self.bus, name, [POOL], create=True)
        supervisor = Supervisor(
            children(processes) if isinstance(processes, Mapping) else processes,
            completes="learner",
            environment={**foreign, **(environment or {}), **variables({**settings, **own})},
            logs=directory / "logs",
            stop_seconds=STOP_SECONDS,
            say=lambda sentence: _fail(spoiled, sentence),
        )
        running = asyncio.create_task(supervisor.run())
        try:
            yield Run(name, self.bus, supervisor, running, spoiled)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            spoiled.cancel()


def _fail(spoiled: asyncio.Future[None], sentence: str) -> None:
    """A process that had to be started again makes every figure of its run worthless."""
    if not spoiled.done():
        spoiled.set_exception(RuntimeError(sentence))


class Run:
    """Processes at work on one run."""

    def __init__(
        self, name: str, bus: Bus, supervisor: Supervisor, running: asyncio.Task[None], spoiled: asyncio.Future[None]
    ) -> None:
        self.name = name
        self._bus = bus
        self._supervisor = supervisor
        self._running = running
        self._spoiled = spoiled

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by instance."""
        return self._supervisor.pids

    async def until_step(self, step: int, *, limit: float) -> StepReport:
        """The report of that step, as soon as it is on the bus; the processes go on.

        Raises `UserError` if it is not there within `limit` seconds or a process refuses to start, `RuntimeError` if
        one fails.
        """
        return await self._within(limit, f"step {step}", self._step(step))

    async def until_complete(self, *, limit: float) -> None:
        """Return when the learner has done all its steps and the processes have been stopped. Raises likewise."""
        await self._within(limit, "the end", self._running)

    async def go_on(self, seconds: float) -> None:
        """Let the processes work for so long. Raises likewise."""
        await self._within(seconds + GRACE_SECONDS, "the time", asyncio.sleep(seconds))

    async def summary(self) -> dict[str, Any]:
        """The figures of the run so far, as `tailrace run` writes them into summary.json."""
        return await collect(self._bus, self.name)

    async def generators(self) -> list[GeneratorReport]:
        """The last report of each generator."""
        reports = await self.records(subjects.GENERATOR, GeneratorReport)
        last = {report.generator: report for report in reports}
        return [last[name] for name in sorted(last)]

    async def steps(self) -> list[StepReport]:
        """The reports of all steps so far, in order."""
        return await self.records(subjects.STEP, StepReport)

    async def records(self, channel: Channel, kind: type[M]) -> list[M]:
        """Every message of the run on a channel so far, in order."""
        records = observe(self._bus, channel, {"run": self.name}, follow=False)
        async with aclosing(records):
            return [received.message async for received in records if isinstance(received.message, kind)]

    async def _step(self, step: int) -> StepReport:
        reports = observe(self._bus, subjects.STEP, {"run": self.name})
        async with aclosing(reports):
            async for received in reports:
                if isinstance(report := received.message, StepReport) and report.step >= step:
                    return report
        raise AssertionError("a subject is followed without end")

    async def _within(self, limit: float, what: str, wanted: Awaitable[Any]) -> Any:
        waited = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait(
                {waited, self._running, self._spoiled}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            for failed in (self._spoiled, self._running):
                if failed.done():
                    failed.result()
            await asyncio.wait({waited}, timeout=GRACE_SECONDS if self._running.done() else 0)
            if not waited.done():
                raise UserError(f"run {self.name}: {what} was not reached in {limit:g} s; is the machine busy?")
            return waited.result()
        finally:
            if waited is not self._running and not waited.done():
                waited.cancel()
                await asyncio.gather(waited, return_exceptions=True)
