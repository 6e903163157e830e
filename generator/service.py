"""The generator from top to bottom: tasks in, rollouts out.

`main` takes the newest policy from the bus and starts sampling; `_follow` loads each newer one while requests are in
flight; `_handle` turns one task into a group of scored rollouts. The engine never stops for any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog
from transformers import PreTrainedTokenizerFast

from contracts import subjects
from contracts.errors import InvalidMessage
from contracts.messages import GeneratorReport, PolicyVersion, Purpose, Split, Task
from generator.engines import Engine, EngineError, RequestRefused, SampleRequest, make_engine
from generator.environments import Environment, Item, environment
from generator.rollouts import Completion, rollout_of, sampling_seed
from generator.settings import GeneratorSettings
from infra import instruments, models, weights
from infra.blobs import BlobError
from infra.bus import PublishFailed, QueueFull, Received, Unavailable
from infra.errors import UserError
from infra.grading import Grader
from infra.policies import PolicyStore
from infra.sandbox import Limits, Sandbox
from infra.service import Service
from infra.work import Reject, Retry, work

log = structlog.get_logger(__name__)

T = TypeVar("T")

POLICY_RETRY_SECONDS = 5.0  # before a policy that could not be read or loaded is tried again
STUCK_SECONDS = 60.0  # a generator that has failed to load for so long leaves its tasks to others
TURNS = {Purpose.EVAL: 0.01, Purpose.TRAIN: 0.1}  # seconds in turn for which a task of each purpose is waited for
AHEAD = 4  # an engine has no pause between groups with one in so many of its slots promised twice
RETRY_SECONDS = 1.0  # before another generator, or this one, takes a task whose sampling failed


async def main(service: Service) -> None:
    """Sample until asked to stop; tasks that are not finished by then go back to the queue."""
    settings: GeneratorSettings = service.settings.section("generator")
    environments = {service.settings.run.environment: environment(service.settings.run.environment)}
    sandbox = Sandbox(settings.verifiers, Limits(wall_seconds=settings.verifier_seconds))
    try:
        await sandbox.start()
        log.info("verifiers are confined", enforced=sandbox.enforced, missing=sandbox.missing)
        service.not_ready("waiting for the first policy")
        policies = PolicyStore(service.bus, service.settings.run.name)
        async with aclosing(policies.follow(service.instance)) as versions:
            first = await _unless_stopped(service, anext(versions))
            if first is None:
                return
            with tempfile.TemporaryDirectory(prefix="tailrace-model-") as folder:
                models.unbundle(await policies.get_bundle(first.bundle), Path(folder))
                tokenizer = models.load_tokenizer(Path(folder))
                engine = await asyncio.to_thread(make_engine, settings, Path(folder), tokenizer)
            try:
                grader = Grader(sandbox, settings.verifier_seconds)
                generator = Generator(service, settings, policies, engine, tokenizer, grader, environments)
                loops = [
                    service.spawn(generator.follow(first, versions), "policies"),
                    service.spawn(generator.report(), "reports"),
                ]
                try:
                    await _unless_stopped(service, generator.has_policy())
                    await generator.work()
                finally:
                    for loop in loops:
                        loop.cancel()
                    await asyncio.wait(loops)  # `versions` can be closed only when nobody reads it
            finally:
                await engine.close()
    finally:
        await sandbox.close()


async def _unless_stopped(service: Service, waited_for: Awaitable[T]) -> T | None:
    """What was waited for, or None if the service is asked to stop first."""
    waiting = asyncio.ensure_future(waited_for)
    stopping = asyncio.ensure_future(service.stopping.wait())
    try:
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        stopping.cancel()
        waiting.cancel()
        await asyncio.wait({waiting})


class Generator:
    """One generator process: an engine, a verifier pool, and the policy they work with."""

    def __init__(
        self,
        service: Service,
        settings: GeneratorSettings,
        policies: PolicyStore,
        engine: Engine,
        tokenizer: PreTrainedTokenizerFast,
        grader: Grader,
        environments: dict[str, Environment],
    ) -> None:
        self.service = service
        self.settings = settings
        self.policies = policies
        self.mirror = policies.mirror()
        self.engine = engine
        self.tokenizer = tokenizer
        self.grader = grader
        self.environments = environments
        self.loaded = asyncio.Condition()  # notified after each load, and each attempt at one
        self.failing_since: float | None = None  # monotonic time since when no policy could be loaded
        self.freed = asyncio.Event()  # set for a moment when `sampling` has become less
        self.sampling = 0  # completions promised to the engine and not yet finished
        self.group_sizes: dict[str, int] = {}  # by purpose, of the last task: how many slots the next one will take
        self.tasks: dict[str, int] = {}  # training tasks being worked on -> version loaded when sampling began
        self.outcomes: Counter[str] = Counter()
        self.started: float | None = None  # monotonic time of the first training task
        self.before_start = engine.stats

    # -- policies in ---------------------------------------------------------------------------------------------

    async def follow(self, first: PolicyVersion, versions: AsyncGenerator[PolicyVersion]) -> None:
        """Load each newer policy while requests are in flight. One that cannot be loaded is tried again."""
        version, waiting = first, asyncio.ensure_future(anext(versions))
        try:
            while True:
                loaded = await self._try(version)
                self.failing_since = None if loaded else self.failing_since or time.monotonic()
                async with self.loaded:
                    self.loaded.notify_all()
                done, _ = await asyncio.wait({waiting}, timeout=None if loaded else POLICY_RETRY_SECONDS)
                if done:
                    version, waiting = waiting.result(), asyncio.ensure_future(anext(versions))
        finally:
            waiting.cancel()
            await asyncio.wait({waiting})

    async def _try(self, version: PolicyVersion) -> bool:
        """Load a policy; False when it has to be tried again: the learner may wait for what is sampled with it.

        Where it could not be read, the learner has been asked to see to it.
        """
        try:
            await self.load(version)
        except EngineError as error:
            log.error("policy not loaded", version=version.policy.version, error=str(error))
            return False
        except (BlobError, InvalidMessage, QueueFull, Unavailable) as error:
            log.error("policy not loaded", version=version.policy.version, error=str(error))
            with contextlib.suppress(Unavailable, QueueFull):
                await self.policies.ask_for_whole(version.policy)
            return False
        return True

    async def has_policy(self) -> None:
        """Return when the engine holds a policy: from then on there is a point in taking tasks."""
        async with self.loaded:
            await self.loaded.wait_for(lambda: self.engine.policy is not None)
        self._tell_readiness()

    def _tell_readiness(self) -> None:
        """Ready is a generator with a policy that can take tasks at present."""
        health, unable, policy = self.service.health, self._unable, self.engine.policy
        if self.service.stopping.is_set():
            return
        if unable is not None and health.detail != unable:
            self.service.not_ready(unable)
        elif unable is None and policy is not None and not health.is_ready:
            self.service.ready(f"version {policy.version}")

    async def load(self, version: PolicyVersion) -> None:
        """Fetch, verify and swap in one policy."""
        got = await self.mirror.bring_to(version)
        await self.engine.load(version.policy, weights.unpack(got.data, version.tensors))
        seconds = (time.time_ns() - version.published_ns) / 1e9
        instruments.weights(got.fetched, "load")
        instruments.weights_applied(seconds)
        log.info("policy loaded", version=version.policy.version, seconds_since_published=round(seconds, 2))

    def _has(self, task: Task) -> bool:
        policy = self.engine.policy
        return policy is not None and (policy.generation, policy.version) >= (task.generation, task.min_version)

    async def _wait_for_policy(self, task: Task) -> None:
        """Return when the engine holds a policy the task allows; give it back where this generator cannot load any.

        Otherwise without a limit: that none comes, as while the learner is down, is not the task's fault. It is kept
        alive meanwhile, and given back when the service stops.
        """
        if not self._has(task):
            log.info("waiting for the policy of a task", task=task.id, needed=task.min_version)
        async with self.loaded:
            await self.loaded.wait_for(lambda: self._has(task) or self._stuck)
        if not self._has(task):
            log.error("no policy can be loaded, the task goes back", task=task.id, needed=task.min_version)
            raise Retry(RETRY_SECONDS)

    @property
    def _stuck(self) -> bool:
        """Whether others should do the tasks: what this generator holds may be all that the learner waits for."""
        return self.failing_since is not None and time.monotonic() - self.failing_since > STUCK_SECONDS

    @property
    def _unable(self) -> str | None:
        """Why no task can be taken at present, or None."""
        return self.engine.unable or ("no newer policy can be loaded" if self._stuck else None)

    # -- tasks in, rollouts out ----------------------------------------------------------------------------------

    async def work(self) -> None:
        """Take tasks of both purposes until asked to stop."""
        service = self.service
        drain = service.settings.service.drain_seconds / 2
        turn = asyncio.Lock()

        async def loop(purpose: Purpose, turn_seconds: float) -> None:
            tokens = {"run": service.settings.run.name, "purpose": purpose.value, "pool": self.settings.pool}
            slots = partial(self._slots, purpose)
            await work(
                service.bus,
                subjects.TASK_WORKERS,
                self._handle,
                slots=slots,
                stopping=service.stopping,
                drain=drain,
                turn=turn,
                turn_seconds=turn_seconds,
                freed=self.freed,
                **tokens,
            )

        async with asyncio.TaskGroup() as group:
            for purpose, turn_seconds in TURNS.items():
                group.create_task(loop(purpose, turn_seconds))

    def _slots(self, purpose: str) -> int:
        """Tasks to take now: what the engine can begin with, and a little that is ready when it can begin with more."""
        if self._unable is not None:
            return 0
        ahead = max(self.settings.max_requests // AHEAD, self.group_sizes.get(purpose, 0))
        free = max(self.settings.max_requests + ahead - self.sampling, 0)
        return free // self.group_sizes[purpose] if purpose in self.group_sizes else min(free, 1)

    async def _handle(self, received: Received[Task]) -> None:
        """Do one task; returning acks it. The learner is told of it meanwhile."""
        try:
            await self._do(received)
        finally:
            self.tasks.pop(received.message.id, None)

    async def _do(self, received: Received[Task]) -> None:
        """One task: wait for its policy, sample the group, score it, publish every rollout."""
        task = received.message
        if task.group_size > self.settings.max_requests:  # before anything is counted or made in that number
            limit = f"generator.max_requests is {self.settings.max_requests}"
            raise Reject("bad_task", f"task {task.id}: asks for a group of {task.group_size}, {limit}")
        if task.purpose == Purpose.TRAIN and self.started is None:
            self.started, self.before_start = time.monotonic(), self.engine.stats
        instruments.queue_age(subjects.TASK.template, (time.time_ns() - task.issued_ns) / 1e9)
        self.group_sizes[task.purpose] = task.group_size
        self.sampling += task.group_size
        try:
            item, prompt = await self._prompt(task)
            await self._wait_for_policy(task)
            started_ns = time.time_ns()
            if task.purpose == Purpose.TRAIN and self.engine.policy is not None:
                self.tasks[task.id] = self.engine.policy.version
            completions = await self._sample(task, prompt)
        finally:
            self.sampling -= task.group_size
            self.freed.set()  # whoever waits for it now
            self.freed.clear()
        await self._finish(task, item, completions, prompt, started_ns)

    async def _prompt(self, task: Task) -> tuple[Item, list[int]]:
        try:
            if task.environment not in self.environments:
                made = await asyncio.to_thread(environment, task.environment, files=False)
                self.environments[task.environment] = made
            return await asyncio.to_thread(self._encoded, self.environments[task.environment], task)
        except (UserError, ValueError, TypeError) as error:
            raise Reject("bad_task", f"task {task.id}: {error}") from error

    def _encoded(self, environment: Environment, task: Task) -> tuple[Item, list[int]]:
        item = environment.item(task.seed, Split(task.split))
        return item, models.encode_prompt(self.tokenizer, item.prompt)

    async def _sample(self, task: Task, prompt: list[int]) -> list[Completion]:
        completions = [Completion() for _ in range(task.group_size)]
        request = SampleRequest(prompt, task.group_size, task.sampling, sampling_seed(task))
        try:
            async with aclosing(self.engine.submit(request)) as steps:
                async for step in steps:
                    for token in step:
                        completions[token.index].add(token)
        except RequestRefused as error:
            raise Reject("bad_request", f"task {task.id}: {error}") from error
        except EngineError as error:
            log.error("sampling failed, the task goes back", task=task.id, error=str(error))
            raise Retry(RETRY_SECONDS) from error
        return completions

    async def _finish(
        self, task: Task, item: Item, completions: list[Completion], prompt: list[int], started_ns: int
    ) -> None:
        """Score a group and publish it."""
        texts = [self.tokenizer.decode(each.tokens, skip_special_tokens=True) for each in completions]
        if item.tool is not None:  # by now the engine has given the slots to others
            await asyncio.sleep(max(item.tool.seconds(index) for index in range(task.group_size)))
        grades = await self.grader.grade(item.verifier, texts, item.expected, [each.finish for each in completions])
        finished_ns = time.time_ns()
        rollouts = [
            rollout_of(
                task, item, index, prompt, completion, text, grade,
                generator=self.service.instance, started_ns=started_ns, finished_ns=finished_ns,
            )
            for index, (completion, text, grade) in enumerate(zip(completions, texts, grades, strict=True))
        ]  # fmt: skip
        messages = {f"{task.run}.{rollout.id}": rollout for rollout in rollouts}
        await self.service.bus.publish_all(subjects.ROLLOUT, messages, run=task.run, purpose=task.purpose)
        for rollout in rollouts:
            self.outcomes[rollout.outcome] += 1
            if rollout.reward is not None:
                instruments.reward(rollout.reward, rollout.environment)

    # -- reports out ---------------------------------------------------------------------------------------------

    async def report(self) -> None:
        """Say every heartbeat how the time was spent; end the service when the engine cannot go on.

        Alive means: this loop turns, and an engine with requests in flight makes tokens.
        """
        run, interval = self.service.settings.run.name, self.service.settings.service.heartbeat_seconds
        before = self.engine.stats
        while True:
            await asyncio.sleep(interval)
            if self.engine.error is not None:
                raise RuntimeError(f"the engine stopped: {self.engine.error}")
            self._tell_readiness()
            stats = self.engine.stats
            if not stats.inflight or stats.tokens > before.tokens:
                self.service.beat()
            before = stats
            if self.engine.policy is None:
                continue
            report = self._report(run)
            instruments.generator_idle(report.idle_seconds / max(report.wall_seconds, 1e-9))
            try:
                await self.service.bus.publish(
                    subjects.GENERATOR, report, id=f"{self.service.instance}.{report.at_ns}", patience=interval, run=run
                )
            except (PublishFailed, QueueFull) as error:
                log.warning("report not published", error=str(error))

    def _report(self, run: str) -> GeneratorReport:
        stats, policy = self.engine.stats, self.engine.policy
        assert policy is not None, "reports start with the first policy"
        wall = 0.0 if self.started is None else time.monotonic() - self.started
        busy = stats.busy_seconds - self.before_start.busy_seconds if self.started is not None else 0.0
        load = stats.load_seconds - self.before_start.load_seconds if self.started is not None else 0.0
        idle = max(wall - busy - load, 0.0)
        return GeneratorReport(
            run=run,
            generator=self.service.instance,
            generation=policy.generation,
            version=policy.version,
            seconds={"busy": busy, "load": load, "idle": idle},
            wall_seconds=wall,
            idle_seconds=idle,
            tokens=stats.tokens,
            rollouts=self.outcomes.total(),
            outcomes=dict(self.outcomes),
            inflight=stats.inflight,
            at_ns=time.time_ns(),
            tasks=dict(self.tasks),
        )
