"""Production requests: conversations in, tokens streamed back, rollouts out.

`Server` takes tasks of purpose serve and samples them with the promoted policy. Who asked gets the tokens while they
are sampled; everybody else gets the rollout, with log-probs and versions and without a verdict. Every request ends in
one of the ways of `Ending`, and is acknowledged only then: a task whose generator dies is answered by another one,
from its start and under a higher attempt number.
"""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import aclosing
from enum import StrEnum

import structlog
from transformers import PreTrainedTokenizerFast

from contracts import subjects
from contracts.messages import Cancel, Outcome, Purpose, Task
from contracts.serving import TokensError
from generator import conversations
from generator.answers import Answer, Stream
from generator.engines import EngineError, PromptTooLong, RequestRefused, SampleRequest
from generator.loading import Loader, sample
from generator.reports import Reports
from generator.rollouts import rollout_of
from generator.settings import GeneratorSettings
from generator.texts import AnswerText
from infra import instruments
from infra.bus import QueueFull, Received, Unavailable
from infra.grading import Grade
from infra.policies import PolicyStore
from infra.service import Service
from infra.work import Reject, Retry, work

log = structlog.get_logger(__name__)

FLUSH_SECONDS = 0.03  # tokens sampled within are sent together
CLOSE_SECONDS = 5.0  # for the engine to let go of a request that is given up
REMEMBERED = 4096  # cancelled tasks
RETRY_SECONDS = 1.0  # before a task is taken again whose tokens could not be sent
KEEP_SECONDS = 3600.0  # between looks at whether the store still holds what serves
SEEDS = 2**48


class Ending(StrEnum):
    """How a request ended, beside an answer: what the reports count."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REFUSED = "refused"  # the application was told why
    FAILED = "failed"  # it was told so


class Refusal(Exception):
    """The task ends with this error."""

    def __init__(self, code: TokensError, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


async def main(service: Service) -> None:
    """Answer requests until asked to stop; those that are not finished by then go back to the queue."""
    service.not_ready("waiting for a promoted policy")
    policies = PolicyStore(service.bus, service.settings.run.name)

    def make(loader: Loader, tokenizer: PreTrainedTokenizerFast) -> Server:
        return Server(service, service.settings.section("generator"), loader, tokenizer)

    await sample(service, policies, policies.production.follow(service.instance), make)


class Server:
    """One serving generator."""

    def __init__(
        self, service: Service, settings: GeneratorSettings, loader: Loader, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        self.service = service
        self.settings = settings
        self.loader = loader
        self.engine = loader.engine
        self.tokenizer = tokenizer
        self.reports = Reports(service, loader.engine, settings.role, lambda: self.engine.unable)
        self.sampling = 0  # completions of the tasks in hand
        self.active: dict[str, asyncio.Task[None]] = {}  # by task
        self.cancelled: OrderedDict[str, None] = OrderedDict()  # tasks, also those that have not come yet
        # Its own copy: a tokenizer that encodes in one thread refuses to decode in another.
        self._text = copy.deepcopy(tokenizer.backend_tokenizer)

    async def report(self) -> None:
        """See `loading.Worker`."""
        await self.reports.run()

    async def work(self) -> None:
        """Answer requests until asked to stop."""
        self.reports.tell_readiness()
        service, run = self.service, self.service.settings.run.name
        listening = await service.bus.listen(subjects.CANCEL, self.cancel, kind=Cancel, run=run)
        keeping = service.spawn(self._keep_stored(), "weights of production")
        try:
            await work(
                service.bus,
                subjects.TASK_WORKERS,
                self.handle,
                slots=self._slots,
                stopping=service.stopping,
                drain=service.settings.service.drain_seconds / 2,
                run=run,
                purpose=Purpose.SERVE.value,
                pool=self.settings.pool,
            )
        finally:
            keeping.cancel()
            await service.bus.connection.unsubscribe(listening)

    async def _keep_stored(self) -> None:
        """The store forgets weights after a while; what serves must be there for a generator that starts."""
        while True:
            await asyncio.sleep(KEEP_SECONDS * random.uniform(0.5, 1.5))  # not all generators at once
            try:
                await self.loader.keep_stored()
            except (Unavailable, QueueFull) as error:
                log.warning("weights of production not stored again", error=str(error))

    def cancel(self, message: Cancel) -> None:
        """Nobody waits for a task any more: it may be in hand, on its way, or another generator's."""
        self.cancelled[message.task_id] = None
        while len(self.cancelled) > REMEMBERED:
            self.cancelled.popitem(last=False)
        if message.task_id in self.active:
            self.active[message.task_id].cancel()

    def _slots(self) -> int:
        return 0 if self.engine.unable is not None else max(self.settings.max_requests - self.sampling, 0)

    async def handle(self, received: Received[Task]) -> None:
        """Answer one task, or see that nobody waits for it; returning acks it."""
        task = received.message
        self.reports.start()
        instruments.queue_age(subjects.TASK.template, (time.time_ns() - task.issued_ns) / 1e9)
        answer = Answer(self.service.bus, task, received.deliveries, self.service.instance)
        self.sampling += task.group_size
        try:
            ending = await self._until_nobody_waits(task, answer)
            if ending is not None:
                self.reports.outcomes[ending] += 1
                log.info("request not answered", task=task.id, ending=ending.value)
            if ending is Ending.EXPIRED:
                await answer.fail(TokensError.EXPIRED, "the deadline of the request has passed")
        except Refusal as refusal:
            failed = refusal.code is TokensError.FAILED
            self.reports.outcomes[Ending.FAILED if failed else Ending.REFUSED] += 1
            log.warning("request not answered", task=task.id, code=refusal.code.value)
            await answer.fail(refusal.code, str(refusal))
        except Unavailable as error:
            log.error("tokens or rollouts not sent, the task goes back", task=task.id, error=str(error))
            raise Retry(RETRY_SECONDS) from error
        except Exception as error:  # whoever asked must not wait for the same failure again
            log.exception("answering failed", task=task.id)
            self.reports.outcomes[Ending.FAILED] += 1
            await answer.fail(TokensError.FAILED, f"the generator failed: {type(error).__name__}")
            raise Reject("failed", f"task {task.id}: {type(error).__name__}") from error
        finally:
            self.sampling -= task.group_size

    async def _until_nobody_waits(self, task: Task, answer: Answer) -> Ending | None:
        """Answer, unless the task is cancelled or its deadline passes first; then the engine has let go of it."""
        remaining = (task.deadline_ns - time.time_ns()) / 1e9 if task.deadline_ns else None
        if task.id in self.cancelled:
            return Ending.CANCELLED
        if remaining is not None and remaining <= 0:
            return Ending.EXPIRED
        self.active[task.id] = answering = asyncio.create_task(self._answer(task, answer))
        try:
            done, _ = await asyncio.wait({answering}, timeout=remaining)
        finally:
            del self.active[task.id]
            answering.cancel()
            await asyncio.wait({answering}, timeout=CLOSE_SECONDS)
        if not done:
            return Ending.EXPIRED
        if answering.cancelled():
            return Ending.CANCELLED
        answering.result()
        return None

    async def _answer(self, task: Task, answer: Answer) -> None:
        """Sample and stream, publish the rollouts, and only then say that the answer is complete."""
        prompt = await self._prompt(task)
        answer.prompt_tokens = len(prompt)
        started_ns = time.time_ns()
        streams = [Stream(AnswerText(self._decode, task.sampling.stop), self._piece) for _ in range(task.group_size)]
        await self._sample(task, prompt, answer, streams)
        finished_ns = time.time_ns()
        texts = [self.tokenizer.decode(stream.completion.tokens, skip_special_tokens=True) for stream in streams]
        item = conversations.content_hash(task.turns, task.tools)
        rollouts = [
            rollout_of(
                task, item, index, prompt, stream.completion, text, Grade(Outcome.PENDING, None),
                generator=self.service.instance, started_ns=started_ns, finished_ns=finished_ns,
            )
            for index, (stream, text) in enumerate(zip(streams, texts, strict=True))
        ]  # fmt: skip
        messages = {f"{task.run}.{rollout.id}": rollout for rollout in rollouts}
        await self.service.bus.publish_all(subjects.ROLLOUT, messages, run=task.run, purpose=task.purpose)
        self.reports.rollouts += len(rollouts)
        self.reports.outcomes[Outcome.PENDING] += len(rollouts)
        for rollout, stream in zip(rollouts, streams, strict=True):
            await answer.finish(rollout.index, stream, rollout.id)

    async def _prompt(self, task: Task) -> list[int]:
        if not task.turns:
            raise Refusal(TokensError.REFUSED, "the request has no messages")
        if task.group_size > self.settings.max_requests:
            limit = f"generator.max_requests is {self.settings.max_requests}"
            raise Refusal(TokensError.REFUSED, f"{task.group_size} completions at once are too many: {limit}")
        try:
            return await asyncio.to_thread(conversations.encode, self.tokenizer, task)
        except ValueError as error:
            raise Refusal(TokensError.REFUSED, str(error)) from error

    async def _sample(self, task: Task, prompt: list[int], answer: Answer, streams: list[Stream]) -> None:
        request = SampleRequest(prompt, task.group_size, task.sampling, task.seed % SEEDS, stream=True)
        flushed = time.monotonic() - FLUSH_SECONDS
        try:
            async with aclosing(self.engine.submit(request)) as steps:
                async for step in steps:
                    for token in step:
                        streams[token.index].add(token)
                    if time.monotonic() - flushed >= FLUSH_SECONDS:
                        await answer.flush(streams)
                        flushed = time.monotonic()
        except PromptTooLong as error:
            raise Refusal(TokensError.PROMPT_TOO_LONG, str(error)) from error
        except RequestRefused as error:
            raise Refusal(TokensError.REFUSED, str(error)) from error
        except EngineError as error:
            raise Refusal(TokensError.FAILED, str(error)) from error
        await answer.flush(streams)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._text.decode(tokens, skip_special_tokens=True)

    def _piece(self, token: int) -> str:
        return self._text.decode([token], skip_special_tokens=False)
