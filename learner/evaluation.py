"""Held-out evaluation over the bus: the same generators, greedy sampling, items that training never sees."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from statistics import fmean
from typing import Any

import structlog

from contracts import subjects
from contracts.messages import PolicyRef, Purpose, Rollout
from infra.errors import UserError
from infra.service import Service
from infra.summary import ACCURACY
from learner.settings import LearnerSettings
from learner.tasks import dead_tasks, evaluation_task, publish_tasks

log = structlog.get_logger(__name__)

PROGRESS_SECONDS = 5.0


async def evaluate(service: Service, settings: LearnerSettings, policy: PolicyRef) -> float | None:
    """Have every held-out item sampled with `policy` and return the share that is right, of those the verifier judged.

    Results that are already on the bus, from a learner that died while it waited, count; only missing ones are asked
    for. None if evaluation is off, the service is stopping, or the deadline passes first.
    """
    run = service.settings.run
    tasks = [evaluation_task(run, settings, policy, item) for item in range(settings.evaluation.prompts)]
    if not tasks:
        return None
    scores: dict[str, float | None] = {}  # by task; None where the verifier failed
    wanted = {task.id for task in tasks}
    lost: list[str] = []

    async def collect() -> None:
        rollouts = service.bus.read(
            subjects.ROLLOUT, kind=Rollout, consumer=service.instance, run=run.name, purpose=Purpose.EVAL
        )
        async with aclosing(rollouts):
            async for received in rollouts:
                rollout = received.message
                if rollout.task_id in wanted:
                    scores[rollout.task_id] = ACCURACY.get(rollout.outcome)
                if len(scores) == len(wanted):
                    return

    async def bury() -> None:
        """An item that became a dead letter has no score; when all of them did, the reason is for a person."""
        async with aclosing(dead_tasks(service.bus, run.name, service.instance)) as dead:
            async for task, reason in dead:
                if task in wanted and task not in scores:
                    scores[task] = None
                    lost.append(task)
                if len(lost) == len(wanted):
                    raise UserError(f"no held-out item can be evaluated: {reason}")
                if len(scores) == len(wanted):
                    return

    async def ask() -> None:
        await publish_tasks(service, tasks, settings.pool)

    collecting, asking, burying = (asyncio.create_task(work) for work in (collect(), ask(), bury()))
    stopping = asyncio.create_task(service.stopping.wait())
    running: list[asyncio.Task[Any]] = [collecting, asking, burying, stopping]
    deadline = time.monotonic() + settings.evaluation.deadline_seconds
    try:
        while len(scores) < len(wanted) and not stopping.done():
            log.info("evaluating", version=policy.version, done=len(scores), of=len(wanted))
            if time.monotonic() > deadline:
                log.error("evaluation given up", version=policy.version, done=len(scores), of=len(wanted))
                return None
            pending = [each for each in running if not each.done()]
            await asyncio.wait(pending, timeout=PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for each in (collecting, asking, burying):
                if each.done():
                    each.result()
    finally:
        for each in running:
            each.cancel()
        await asyncio.wait(running)
    judged = [score for score in scores.values() if score is not None]
    return fmean(judged) if judged and len(scores) == len(wanted) else None
