"""The generator from top to bottom: tasks in, rollouts out.

`main` takes the newest policy from the bus and starts sampling; `loading.Loader` loads each newer one while requests
are in flight; `_handle` turns one task into a group of scored rollouts. The engine never stops for any of it.
Production requests are `serving`'s, which another role runs in its place, with the promoted policy.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from functools import partial

import structlog
from transformers import PreTrainedTokenizerFast

from contracts import subjects
from contracts.messages import Purpose, Split, Task
from generator.engines import EngineError, RequestRefused, SampleRequest
from generator.environments import Environment, Item, environment
from generator.instruments import reward
from generator.loading import Loader, sample
from generator.reports import Reports
from generator.rollouts import Completion, rollout_of, sampling_seed
from generator.settings import GeneratorSettings
from infra import instruments, models
from infra.bus import Received
from infra.errors import UserError
from infra.grading import Grader
from infra.policies import PolicyStore
from infra.sandbox import Limits, Sandbox
from infra.service import Service
from infra.work import Reject, Retry, work

log = structlog.get_logger(__name__)

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

        def make(loader: Loader, tokenizer: PreTrainedTokenizerFast) -> Generator:
            grader = Grader(sandbox, settings.verifier_seconds)
            return Generator(service, settings, loader, tokenizer, grader, environments)

        await sample(service, policies, policies.follow(service.instance), make)
    finally:
        await sandbox.close()


class Generator:
    """One training generator: an engine, a verifier pool, and the policy they work with."""

    def __init__(
        self,
        service: Service,
        settings: GeneratorSettings,
        loader: Loader,
        tokenizer: PreTrainedTokenizerFast,
        grader: Grader,
        environments: dict[str, Environment],
    ) -> None:
        self.service = service
        self.settings = settings
        self.loader = loader
        self.engine = loader.engine
        self.tokenizer = tokenizer
        self.grader = grader
        self.environments = environments
        self.reports = Reports(service, loader.engine, settings.role, lambda: self._unable)
        self.freed = asyncio.Event()  # set for a moment when `sampling` has become less
        self.sampling = 0  # completions promised to the engine and not yet finished
        self.group_sizes: dict[str, int] = {}  # by purpose, of the last task: how many slots the next one will take

    async def report(self) -> None:
        """See `loading.Worker`."""
        await self.reports.run()

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
        loader = self.loader
        async with loader.loaded:
            await loader.loaded.wait_for(lambda: self._has(task) or loader.stuck)
        if not self._has(task):
            log.error("no policy can be loaded, the task goes back", task=task.id, needed=task.min_version)
            raise Retry(RETRY_SECONDS)

    @property
    def _unable(self) -> str | None:
        """Why no task can be taken at present, or None."""
        return self.engine.unable or ("no newer policy can be loaded" if self.loader.stuck else None)

    async def work(self) -> None:
        """Take tasks of both purposes until asked to stop."""
        self.reports.tell_readiness()
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
            self.reports.tasks.pop(received.message.id, None)

    async def _do(self, received: Received[Task]) -> None:
        """One task: wait for its policy, sample the group, score it, publish every rollout."""
        task = received.message
        if task.group_size > self.settings.max_requests:  # before anything is counted or made in that number
            limit = f"generator.max_requests is {self.settings.max_requests}"
            raise Reject("bad_task", f"task {task.id}: asks for a group of {task.group_size}, {limit}")
        if task.purpose == Purpose.TRAIN:
            self.reports.start()
        instruments.queue_age(subjects.TASK.template, (time.time_ns() - task.issued_ns) / 1e9)
        self.group_sizes[task.purpose] = task.group_size
        self.sampling += task.group_size
        try:
            item, prompt = await self._prompt(task)
            await self._wait_for_policy(task)
            started_ns = time.time_ns()
            if task.purpose == Purpose.TRAIN and self.engine.policy is not None:
                self.reports.tasks[task.id] = self.engine.policy.version
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
                task, item.hash, index, prompt, completion, text, grade,
                generator=self.service.instance, started_ns=started_ns, finished_ns=finished_ns,
            )
            for index, (completion, text, grade) in enumerate(zip(completions, texts, grades, strict=True))
        ]  # fmt: skip
        messages = {f"{task.run}.{rollout.id}": rollout for rollout in rollouts}
        await self.service.bus.publish_all(subjects.ROLLOUT, messages, run=task.run, purpose=task.purpose)
        self.reports.rollouts += len(rollouts)
        for rollout in rollouts:
            self.reports.outcomes[rollout.outcome] += 1
            if rollout.reward is not None:
                reward(rollout.reward, rollout.environment)
