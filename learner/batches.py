"""The wait for a batch, and what the load controller learns from it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from contracts import subjects
from contracts.messages import GeneratorReport
from infra.service import Service
from learner.fleet import Fleet
from learner.groups import Drop, TrainingGroup
from learner.intake import Intake
from learner.load import Load
from learner.settings import LearnerSettings
from learner.stopwatch import Stopwatch
from learner.tasks import taken_up_to

HOLD_CHECK = 0.25  # seconds between looks at who works on what while a batch waits for stragglers
SILENCE = 3  # heartbeats without a report until a generator counts as gone


class Batches:
    """Takes batches from the intake; its decisions are those of `Intake`, `Fleet` and `Load`."""

    def __init__(self, service: Service, settings: LearnerSettings, intake: Intake, stopwatch: Stopwatch) -> None:
        self.arrived = asyncio.Event()  # a batch may be there, or the service is stopping
        self.load = Load(settings.groups_per_step, intake.gate.limit)
        self.fleet = Fleet(SILENCE * service.settings.service.heartbeat_seconds)
        self._service = service
        self._run = service.settings.run.name
        self._pool = settings.pool
        self._intake = intake
        self._stopwatch = stopwatch
        self._waited = 0.0  # seconds since the last step for want of rollouts
        self._spare = 0  # groups that were ready beside the batch taken last

    async def follow_fleet(self) -> None:
        """Keep up with what the generators report, from the last report on."""
        reports = self._service.bus.read(
            subjects.GENERATOR, kind=GeneratorReport, last=True, consumer=self._service.instance, run=self._run
        )
        async with contextlib.aclosing(reports):
            async for received in reports:
                self.fleet.report(received.message, time.monotonic())

    async def next(
        self, version: int, discard: Callable[[list[Drop]], Awaitable[None]]
    ) -> tuple[list[TrainingGroup], list[Drop]] | None:
        """Wait for a batch; None when the service is stopping. Waiting burns no CPU and is what idle means here.

        What is dropped while it waits is discarded at once. What the batch itself drops comes with it, to be discarded
        while it is trained.
        """
        intake = self._intake
        while not self._service.stopping.is_set():
            self.arrived.clear()
            unfinished = {task: entry.floor for task, entry in intake.gate.outstanding.items()}
            batch, drops = intake.take(version, time.monotonic(), unfinished)
            if intake.stragglers:  # if anybody works on them
                await discard(drops)
                batch, drops = intake.take(version, time.monotonic(), await self._in_hand(version))
            if batch is not None:
                self._spare = len(intake.ready)
                return batch, drops
            await discard(drops)
            if intake.stragglers:
                intake.hold(time.monotonic())
                with self._stopwatch.idle("wait_for_stragglers"), contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.arrived.wait(), HOLD_CHECK)
            else:
                began = time.monotonic()
                await self.arrived.wait()
                self._waited += time.monotonic() - began
        return None

    async def _in_hand(self, version: int) -> dict[str, int]:
        """Tasks that somebody works on, as the queue and the generators say."""
        gate = self._intake.gate
        with self._stopwatch.idle("wait_for_stragglers"):
            taken = await taken_up_to(self._service.bus, self._run, self._pool)
        now = time.monotonic()
        if taken is not None:
            # generators may still have a version that a learner before this one made after its last checkpoint
            gate.observe_taken(taken, min(self.fleet.floor(now), version), now)
        return self.fleet.in_hand(gate.outstanding, now)

    def trained(self) -> None:
        """The batch last taken has become a version: set what may be under way from now on."""
        self._intake.trained()
        computed = self._stopwatch.lap_busy_seconds
        self._intake.gate.target = self.load.stepped(waited=self._waited, computed=computed, spare=self._spare)
        self._waited = 0.0
