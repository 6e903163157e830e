"""The learner from top to bottom: rollouts in, policy versions out.

Three loops share one `Intake`: `_admit` publishes prompts as far as load and staleness bound allow, `_receive` reads
rollouts in stream order, and `run` trains whenever a batch is there, while the version before is still on its way to
the generators. Everything that is decided is decided in `Intake`, `AdmissionGate`, `Load` and `Trainer`; `Batches`
waits for the first two and tells the third what it saw.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import msgspec
import structlog

from contracts import subjects
from contracts.messages import PolicyRef, PolicyVersion, Purpose, Reason, Rollout, StepReport
from contracts.policies import TensorSpec
from infra import instruments, models, telemetry
from infra.errors import UserError
from infra.leases import Lease, acquire
from infra.service import Service
from learner.advantages import group_advantages
from learner.batches import Batches
from learner.checkpoints import Checkpoints
from learner.evaluation import evaluate
from learner.followers import ranks_of
from learner.gate import AdmissionGate
from learner.groups import Drop, TrainingGroup
from learner.intake import Intake
from learner.lineage import Lineage
from learner.packing import Sample, sample_of
from learner.progress import Progress
from learner.publisher import Publisher
from learner.ranks import Ranks
from learner.reports import discard, record_step, step_report
from learner.saver import Saver
from learner.settings import LearnerSettings
from learner.stopwatch import Stopwatch
from learner.tasks import dead_tasks, publish_tasks, queue_is_empty, training_task
from learner.torch_thread import TorchThread
from learner.trainer import StepStats, Trainer

log = structlog.get_logger(__name__)

LEASE_WAIT = 60.0  # seconds for a former learner's lease to expire
BEAT_SECONDS = 5.0
IDLE_CHECK = 2.0  # seconds between looks at the task queue while nothing arrives


async def main(service: Service) -> None:
    """Train until the run's steps are done or the service is asked to stop; a checkpoint is written either way."""
    settings: LearnerSettings = service.settings.section("learner")
    run = service.settings.run
    lease = await acquire(service.bus, f"{run.name}.learner", service.instance, wait=LEASE_WAIT)
    service.spawn(_watch(lease), "lease")
    try:
        async with ranks_of(service, settings) as ranks:
            learner = await Learner.start(service, settings, lease.generation, ranks)
            await learner.run()
    finally:
        await lease.release()


async def _watch(lease: Lease) -> None:
    await lease.lost.wait()
    raise RuntimeError("the learner's lease was taken by another process: only one learner may train a run")


class Learner:
    """One learner process, holder of one generation."""

    def __init__(
        self,
        service: Service,
        settings: LearnerSettings,
        generation: int,
        trainer: Trainer,
        thread: TorchThread,
        intake: Intake,
    ) -> None:
        self.service = service
        self.settings = settings
        self.generation = generation
        self.trainer = trainer
        self.thread = thread
        self.intake = intake
        self.run_name = service.settings.run.name
        self.publisher = Publisher(service.bus, self.run_name, settings, generation)
        checkpoints = Checkpoints(_directory(service), settings.keep_checkpoints, generation)
        self.saver = Saver(checkpoints, service.spawn)
        self.stopwatch = Stopwatch(time.monotonic)
        self.batches = Batches(service, settings, intake, self.stopwatch)
        self.version = trainer.version  # the trainer's own moves inside its thread, this one between steps
        self.room = asyncio.Event()  # the gate may have room: `_admit` looks
        self.last_arrival = 0.0
        self.traces: dict[str, dict[str, str]] = {}  # headers of rollouts not yet trained, for the links of the step
        self.training = False
        self.progress = Progress(max(2 * intake.gate.limit, 32))
        self.publishing: asyncio.Task[None] | None = None
        self.discarding: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, service: Service, settings: LearnerSettings, generation: int, ranks: Ranks) -> Learner:
        """Load the model and, where there is one, the newest complete checkpoint; announce the first policy."""
        run = service.settings.run
        service.not_ready("loading the model")
        folder = await asyncio.to_thread(models.resolve, settings.model, seed=run.seed)
        thread = TorchThread()
        trainer = await thread.run(Trainer, folder, settings, seed=run.seed, ranks=ranks)
        gate = AdmissionGate(settings.max_staleness, settings.groups_per_step, settings.steps)
        # Version 0 is made from model and seed alone, so an earlier generation's version 0 is an ancestor too.
        lineage = Lineage([(earlier, 0) for earlier in range(1, generation + 1)])
        intake = Intake(
            gate,
            lineage,
            max_staleness=settings.max_staleness,
            token_budget=min(settings.token_budget, trainer.window),
            vocabulary=trainer.vocabulary,
            straggler_seconds=settings.straggler_seconds,
        )
        checkpoint = await asyncio.to_thread(Checkpoints(_directory(service), settings.keep_checkpoints).latest)
        if checkpoint is not None:
            await thread.run(trainer.load_state, checkpoint.trainer)
            intake.restore(checkpoint.position)
            starts = [(start[0], start[1]) for start in checkpoint.position["lineage"]]
            intake.lineage = Lineage(starts).extended(generation, trainer.version)
            log.info("resumed", version=trainer.version, generation=generation, position=intake.position)
        learner = cls(service, settings, generation, trainer, thread, intake)
        await learner.publisher.start(models.bundle(folder))
        weights = await thread.run(trainer.weights)
        if checkpoint is None:
            await learner._check_start(await asyncio.to_thread(lambda: hashlib.sha256(weights[0]).hexdigest()))
        await learner.publisher.publish(weights, trainer.version)
        service.ready(f"version {trainer.version}, generation {generation}")
        return learner

    async def _check_start(self, digest: str) -> None:
        """Raise `UserError` if a run of this name began with other weights: its rollouts are not ours to train on."""
        begun = self.service.bus.read(
            subjects.POLICY_PUBLISHED,
            kind=PolicyVersion,
            follow=False,
            consumer=self.service.instance,
            run=self.run_name,
        )
        async with aclosing(begun):
            async for received in begun:
                if received.message.policy.version == 0 and received.message.policy.digest != digest:
                    raise UserError(
                        f"run {self.run_name!r} began on this server with another model or seed, and there is no "
                        f"checkpoint in {self.saver.checkpoints.directory}: choose another run.name"
                    )

    async def run(self) -> None:
        """Evaluate, train, evaluate."""
        self.service.spawn(self._beat(), "liveness")
        self.service.spawn(self.publisher.repair(), "repair")
        if self.version == 0:
            await self._evaluate()
        if self.version < self.settings.steps and not self.service.stopping.is_set():
            if self.intake.gate.outstanding:  # the tasks of the learner before
                self.stopwatch.start()
            loops = (
                self._receive,
                self._admit,
                self._expire,
                self._bury,
                self._wake_on_stop,
                self.batches.follow_fleet,
            )
            tasks = [self.service.spawn(loop(), loop.__name__) for loop in loops]
            try:
                while self.version < self.settings.steps and (batch := await self._next_batch()) is not None:
                    await self._step(batch)
                await self._settle()
            finally:
                for task in tasks:
                    task.cancel()
        if self.version >= self.settings.steps and not self.service.stopping.is_set():
            await self._evaluate()

    async def _evaluate(self) -> None:
        assert self.publisher.policy is not None, "announced at start"
        score = await evaluate(self.service, self.settings, self.publisher.policy)
        if score is not None:
            log.info("evaluated", version=self.version, accuracy=score)

    # -- prompts out ---------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Publish prompts whenever the gate has room; first, after a resume, those that may never have been out."""
        await self._publish_tasks([entry.index for entry in self.intake.gate.outstanding.values()])
        while True:
            self.room.clear()
            await self._publish_tasks(self.intake.gate.admit(self.version))
            await self.room.wait()

    async def _publish_tasks(self, indices: list[int]) -> None:
        if not indices:
            return
        run = self.service.settings.run
        tasks = [training_task(run, self.settings, self.generation, self.version, index) for index in indices]
        self.stopwatch.start()
        await publish_tasks(self.service, tasks, self.settings.pool, self.intake.gate.published)

    # -- rollouts in ---------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Read rollouts from the checkpoint's position on, in stream order."""
        start = self.intake.position
        rollouts = self.service.bus.read(
            subjects.ROLLOUT,
            kind=Rollout,
            start=start,
            consumer=self.service.instance,
            run=self.run_name,
            purpose=Purpose.TRAIN,
        )
        async with aclosing(rollouts):
            async for received in rollouts:
                rollout = received.message
                await self._publish_tasks(self.intake.gate.adopt(rollout.task_id, self.version))
                now = time.monotonic()
                instruments.queue_age(subjects.ROLLOUT.template, (time.time_ns() - rollout.finished_ns) / 1e9)
                self.last_arrival = now
                drops = self.intake.offer(rollout, received.sequence, self.version, now)
                if rollout.task_id in self.intake.groups:
                    self.traces[rollout.id] = received.headers
                await self._discard(drops)
                self.batches.arrived.set()

    async def _expire(self) -> None:
        """Close groups and tasks whose time is over; look at the queue when nothing comes."""
        settings = self.settings
        while True:
            await asyncio.sleep(IDLE_CHECK)
            now = time.monotonic()
            quiet = now - self.last_arrival > IDLE_CHECK
            self.intake.gate.observe_queue(
                quiet and await queue_is_empty(self.service.bus, self.run_name, self.settings.pool), now
            )
            await self._discard(
                self.intake.expire(now, group_deadline=settings.group_deadline, task_deadline=settings.task_deadline)
            )
            self.batches.arrived.set()

    async def _bury(self) -> None:
        """Give up tasks that became dead letters: no rollout of theirs will come."""
        async with aclosing(dead_tasks(self.service.bus, self.run_name, self.service.instance)) as dead:
            async for task, reason in dead:
                await self._discard(self.intake.give_up(task, f"dead letter: {reason}"))

    async def _discard(self, drops: list[Drop]) -> None:
        """Publish what became no gradient, together, since a batch may wait; let the gate admit in its place.

        A group whose members were all dropped one by one closes without a drop of its own: the gate is always asked.
        """
        messages = {}
        for drop in drops:
            if drop.reason is not Reason.ZERO_ADVANTAGE:  # those are part of a batch
                for rollout in drop.rollout_ids:
                    self.traces.pop(rollout, None)
            log.info("discarded", task=drop.task_id, reason=drop.reason, rollouts=drop.rollout_ids, detail=drop.detail)
            key = f"{self.run_name}.{self.generation}.{drop.task_id}.{drop.reason}.{'.'.join(drop.rollout_ids[:1])}"
            messages[key] = discard(self.run_name, drop, generation=self.generation, version=self.version)
        if messages:
            await self.service.bus.publish_all(subjects.DISCARD, messages, run=self.run_name)
        for drop in drops:
            if sentence := self.progress.hopeless(drop):
                raise UserError(sentence)
        self.room.set()

    # -- training ------------------------------------------------------------------------------------------------

    async def _next_batch(self) -> list[TrainingGroup] | None:
        found = await self.batches.next(self.version, self._discard)
        if found is None:
            return None
        batch, drops = found
        self.progress.made()
        self.discarding = self.service.spawn(self._discard(drops), "discards")  # the step does not wait for it
        return batch

    async def _wake_on_stop(self) -> None:
        await self.service.stopping.wait()
        self.batches.arrived.set()

    async def _beat(self) -> None:
        """Alive means: this loop turns, and training, which beats by itself, is not stuck."""
        while True:
            if not self.training:
                self.service.beat()
            await asyncio.sleep(BEAT_SECONDS)

    async def _step(self, batch: list[TrainingGroup]) -> None:
        """One optimizer step, then the next version on its way while the next batch is trained."""
        rollouts = [rollout for group in batch for rollout in group.rollouts]
        links = [self.traces.pop(rollout.id, {}) for rollout in rollouts]
        loop = asyncio.get_running_loop()

        def beat() -> None:
            loop.call_soon_threadsafe(self.service.beat)

        with telemetry.consumer_span(subjects.ROLLOUT.template, {}, links=links):
            self.training = True
            with self.stopwatch.busy("train"):
                stats = await self.thread.run(self._train, batch, beat)
            self.training = False
            log.info("stepped", version=self.trainer.version, loss=stats.loss, grad_norm=stats.grad_norm)
            with self.stopwatch.busy("pack"):
                weights = await self.thread.run(self.trainer.weights)
        self.version = self.trainer.version
        self.batches.trained()
        self.room.set()
        report = step_report(
            self.run_name,
            PolicyRef(self.generation, self.version, ""),  # the digest is known once the weights are published
            batch,
            stats,
            self.stopwatch,
            self.settings,
            outstanding=len(self.intake.gate.outstanding),
            target=self.intake.gate.target,
        )
        assert self.discarding is not None, "set with every batch"
        await self.discarding
        await self._published()
        self.publishing = self.service.spawn(self._announce(weights, report), "publication")
        if self.version % self.settings.checkpoint_every == 0 or self.version >= self.settings.steps:
            await self._checkpoint()

    def _train(self, batch: list[TrainingGroup], heartbeat: Callable[[], None]) -> StepStats:
        return self.trainer.step(_samples(batch, self.settings), heartbeat=heartbeat)

    async def _published(self) -> None:
        """At most one publication is under way: a bus slower than the training is waited for here."""
        if self.publishing is not None:
            with self.stopwatch.idle("publish"):
                await self.publishing
            self.publishing = None

    async def _settle(self) -> None:
        """Bring the last version and its checkpoint to safety."""
        await self._published()
        await self.saver.finished()
        if self.saver.version != self.version:
            await self._checkpoint()
            await self.saver.finished()

    async def _checkpoint(self) -> None:
        """Write weights, optimizer, random state and intake of this very moment; the disk is not waited for."""
        position = self.intake.state()
        with self.stopwatch.busy("checkpoint"):
            snapshot = await self.thread.run(self.trainer.state)
        with self.stopwatch.idle("save"):  # a disk slower than the training is waited for here
            # the version and its report are out before its checkpoint counts: what is resumed from has been announced
            await self.saver.save(self.version, snapshot, position, after=self.publishing)

    # -- versions out --------------------------------------------------------------------------------------------

    async def _announce(self, weights: tuple[memoryview, list[TensorSpec]], report: StepReport) -> None:
        """Publish the version, then the report of the step that made it; collect versions nobody needs."""
        version = report.step
        policy = await self.publisher.publish(weights, version)
        report = msgspec.structs.replace(report, policy=policy)
        key = f"{self.run_name}.{self.generation}.{version}"
        await self.service.bus.publish(subjects.STEP, report, id=key, run=self.run_name)
        record_step(report)
        mean = sum(report.rewards) / max(len(report.rewards), 1)
        log.info("step", version=version, reward=round(mean, 3), staleness=max(report.staleness, default=0))
        await self.publisher.collect()


def _samples(batch: list[TrainingGroup], settings: LearnerSettings) -> list[list[Sample]]:
    """The batch with its advantages; groups of equal rewards have advantage 0 and count in the means all the same."""
    return [
        [
            sample_of(rollout, advantage)
            for rollout, advantage in zip(
                group.rollouts, group_advantages(group.rewards, settings.advantage), strict=True
            )
        ]
        for group in batch
    ]


def _directory(service: Service) -> Path:
    return service.settings.run.directory / "learner"
