"""The routing policy learns from what became of its decisions: a thin loop around pure parts.

It reads decisions, outcomes and feedback from the bus, fits a candidate when enough was judged, has it asked beside the
policy in force, and promotes it when its trial says so. Nothing but the store's head and versions is kept: after a
restart the loop reads the stream again and goes on where the head says. Of several routers one learns, all share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from math import log as ln
from typing import Any

import structlog
from nats.js.errors import NotFoundError

from contracts.subjects import FEEDBACK, ROUTE_DECISION, ROUTE_OUTCOME, Channel
from infra.bus import Bus, PublishFailed, QueueFull, Received, Unavailable
from infra.errors import UserError
from infra.leases import Lease, acquire
from router.policy.calibration import Calibration, Judged, fit
from router.policy.evidence import Journal
from router.policy.shadow import Judgement, judge
from router.policy.sharing import share
from router.policy.store import PolicyStore
from router.policy.versions import Document, Invalid

log = structlog.get_logger(__name__)

ENOUGH = 200  # judged answers, new since the last candidate, that make another one worth fitting
BACKLOG = 500_000  # messages of the stream that are read again at a start
TRIAL_SECONDS = 7 * 86400.0  # longest time on trial: as long as the stream remembers
SHARE_SECONDS = 5.0  # until a version promoted elsewhere is in force here
LEARN_SECONDS = 60.0  # what it takes grows with what is remembered
RETRY_SECONDS = 15.0  # until the bus, or the lease, is asked for again


async def learn(
    bus: Bus, run: str, store: PolicyStore, *, holder: str, every: float = LEARN_SECONDS, sharing: float = SHARE_SECONDS
) -> None:
    """Learn and share policies until cancelled. The bus may go away and come back; nothing here ends for that.

    `holder` names this process, `every` and `sharing` are the seconds between two attempts at either.
    """
    journal = Journal()
    async with asyncio.TaskGroup() as group:
        for channel in (ROUTE_DECISION, ROUTE_OUTCOME, FEEDBACK):
            group.create_task(_read(bus, channel, run, journal), name=f"policy reads {channel.name}")
        group.create_task(_steps(bus, run, store, journal, holder, every, sharing), name="policy learns")


def step(store: PolicyStore, journal: Journal, now_ns: int) -> None:
    """End a trial that has come to something, or begin one when enough was judged since the last."""
    if store.trial is not None:
        version = store.trial.version
        judgement = judge(journal.logged(version, store.policy.version))
        since = store.head.notes[version].since_ns if version in store.head.notes else 0
        if judgement is None and now_ns - since > TRIAL_SECONDS * 1e9:
            judgement = Judgement(False, f"too little came of it in {TRIAL_SECONDS / 86400:.0f} days", {})
        if judgement is not None and judgement.promote:
            store.promote(version, judgement.reason, judgement.metrics)
        elif judgement is not None:
            store.retire(version, judgement.reason, judgement.metrics)
        if judgement is not None:
            log.info("trial ended", version=version, promoted=judgement.promote, reason=judgement.reason)
        return
    model = store.policy.model.version  # logits of another cold-start model mean something else
    found = journal.judged()
    ours = {version for version in {version for _, version, _ in found} if store.model_of(version) == model}
    judged = [(at_ns, each) for at_ns, version, each in found if version in ours]
    last = max((note.since_ns for note in store.head.notes.values()), default=0)
    if sum(at_ns > last for at_ns, _ in judged) < ENOUGH:
        return
    samples = [each for _, each in judged]
    calibration = fit(samples, journal.answers())
    document = Document(
        model=model,
        calibration=calibration,
        parent=store.policy.version,
        metrics={
            "judged": float(len(samples)),
            "log_loss": log_loss(calibration, samples),
            "log_loss_in_force": log_loss(store.policy.calibration, samples),
        },
        made_ns=now_ns,
    )
    try:
        version = store.try_out(document, f"fitted to {len(samples)} judged answers")
    except Invalid as error:  # the evidence comes from the bus, and may be nonsense
        log.error("what was learned cannot be used", reason=str(error))
        return
    log.info("trial begins", version=version, **document.metrics)


def log_loss(calibration: Calibration, judged: list[Judged]) -> float:
    """Mean −ln of the probability given to what happened."""
    chances = [calibration.success(each.pool, each.tier, each.inputs) for each in judged]
    return -sum(ln(p if each.success else 1 - p) for p, each in zip(chances, judged, strict=True)) / len(judged)


async def _read(bus: Bus, channel: Channel, run: str, journal: Journal) -> None:
    while True:
        try:
            info = await bus.stream_info(channel.stream)
            start = max(info.state.first_seq, info.state.last_seq - BACKLOG, 1)
            source: AsyncGenerator[Received[Any], None] = bus.read(
                channel, start=start, consumer="routing-policy", run=run
            )
            async with aclosing(source) as messages:
                async for received in messages:
                    journal.add(received.message)
        except (Unavailable, UserError, NotFoundError) as error:
            log.info("nothing to learn from for now", subject=channel.template, reason=str(error))
        await asyncio.sleep(RETRY_SECONDS)


async def _steps(
    bus: Bus, run: str, store: PolicyStore, journal: Journal, holder: str, every: float, sharing: float
) -> None:
    lease: Lease | None = None
    taken, due = 0, 0.0
    try:
        while True:
            await asyncio.sleep(sharing)
            try:
                await asyncio.to_thread(store.refresh)
                if lease is None or lease.lost.is_set():
                    lease = await _lease(bus, run, holder)
                if lease is not None and time.monotonic() >= due and journal.taken > taken:
                    taken, due = journal.taken, time.monotonic() + every
                    await asyncio.to_thread(step, store, journal, time.time_ns())
                await share(bus, run, store)
            except (Unavailable, PublishFailed, QueueFull, OSError) as error:
                log.warning("routing policy not learned or shared for now", reason=str(error))
    finally:
        if lease is not None:
            await lease.release()


async def _lease(bus: Bus, run: str, holder: str) -> Lease | None:
    try:
        return await acquire(bus, f"{run}.routing", holder, wait=0.0)
    except UserError:  # another router learns
        return None
