"""What a generator says of itself: readiness, and how the time was spent."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import structlog

from contracts import subjects
from contracts.messages import GeneratorReport
from generator import instruments
from generator.engines import Engine
from infra.bus import PublishFailed, QueueFull
from infra.service import Service

log = structlog.get_logger(__name__)


class Reports:
    """One process's counters, filled by who works."""

    def __init__(self, service: Service, engine: Engine, role: str, unable: Callable[[], str | None]) -> None:
        """`unable` says why no task can be taken at present, or None."""
        self.outcomes: Counter[str] = Counter()  # by what became of them
        self.rollouts = 0  # published
        self.tasks: dict[str, int] = {}  # training tasks being worked on -> version loaded when sampling began
        self._service = service
        self._engine = engine
        self._role = role
        self._unable = unable
        self._started: float | None = None  # monotonic time from which the time is counted
        self._before = engine.stats  # at that time

    def start(self) -> None:
        """The first task has come: from now on the time is counted."""
        if self._started is None:
            self._started, self._before = time.monotonic(), self._engine.stats

    async def run(self) -> None:
        """Say every heartbeat how the time was spent; end the service when the engine cannot go on.

        Alive means: this loop turns, and an engine with requests in flight makes tokens.
        """
        service, engine = self._service, self._engine
        run, interval = service.settings.run.name, service.settings.service.heartbeat_seconds
        before = engine.stats
        while True:
            await asyncio.sleep(interval)
            if engine.error is not None:
                raise RuntimeError(f"the engine stopped: {engine.error}")
            self.tell_readiness()
            stats = engine.stats
            if not stats.inflight or stats.tokens > before.tokens:
                service.beat()
            before = stats
            if engine.policy is None:
                continue
            report = self._report(run)
            instruments.idle(report.idle_seconds / max(report.wall_seconds, 1e-9))
            try:
                id = f"{service.instance}.{report.at_ns}"
                await service.bus.publish(subjects.GENERATOR, report, id=id, patience=interval, run=run)
            except (PublishFailed, QueueFull) as error:
                log.warning("report not published", error=str(error))

    def tell_readiness(self) -> None:
        """Ready is a generator with a policy that can take tasks at present."""
        service, unable, policy = self._service, self._unable(), self._engine.policy
        if service.stopping.is_set():
            return
        if unable is not None and service.health.detail != unable:
            service.not_ready(unable)
        elif unable is None and policy is not None and not service.health.is_ready:
            service.ready(f"version {policy.version}")

    def _report(self, run: str) -> GeneratorReport:
        stats, policy = self._engine.stats, self._engine.policy
        assert policy is not None, "reports start with the first policy"
        wall = 0.0 if self._started is None else time.monotonic() - self._started
        busy = stats.busy_seconds - self._before.busy_seconds if self._started is not None else 0.0
        load = stats.load_seconds - self._before.load_seconds if self._started is not None else 0.0
        idle = max(wall - busy - load, 0.0)
        return GeneratorReport(
            run=run,
            generator=self._service.instance,
            generation=policy.generation,
            version=policy.version,
            seconds={"busy": busy, "load": load, "idle": idle},
            wall_seconds=wall,
            idle_seconds=idle,
            tokens=stats.tokens,
            rollouts=self.rollouts,
            outcomes=dict(self.outcomes),
            inflight=stats.inflight,
            at_ns=time.time_ns(),
            tasks=dict(self.tasks),
            role=self._role,
        )
