"""What is told to whoever asked, while their answer is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec import structs

from contracts import subjects
from contracts.messages import Finish, PolicyRef, Task, Tokens
from contracts.serving import TokensError
from generator.engines import SampledToken
from generator.rollouts import Completion
from generator.texts import AnswerText
from infra.bus import Bus, Unavailable

STRETCH_TOKENS = 1024  # in one message, at most: it must stay below the server's payload limit


@dataclass
class Stretch:
    """Tokens of one completion that one policy sampled and that have not been sent; their text may lag behind."""

    start: int  # tokens of the completion before it
    policy: PolicyRef
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Stream:
    """One completion while it is sampled: all of it, and what has not been sent. Pure."""

    def __init__(self, text: AnswerText, piece: Callable[[int], str]) -> None:
        """`piece` is the text of a token by itself."""
        self.completion = Completion()
        self.text = text
        self._piece = piece
        self._waiting: list[Stretch] = []

    def add(self, token: SampledToken) -> None:
        """Append the next token."""
        last = self._waiting[-1] if self._waiting else None
        if last is None or last.policy != token.policy or len(last.tokens) >= STRETCH_TOKENS:
            last = Stretch(len(self.completion.tokens), token.policy)
            self._waiting.append(last)
        self.completion.add(token)
        last.text += self.text.push(token.token)
        last.tokens.append(token.token)
        last.pieces.append(self._piece(token.token))
        last.logprobs.append(token.logprob)

    def take(self) -> list[Stretch]:
        """What has not been sent, in order."""
        waiting, self._waiting = self._waiting, []
        return waiting


class Answer:
    """One attempt at a task, as it is told."""

    def __init__(self, bus: Bus, task: Task, attempt: int, generator: str) -> None:
        self._bus = bus
        self._task = task
        self._attempt = attempt
        self.prompt_tokens = 0  # once they are known
        self._generator = generator

    async def flush(self, streams: Sequence[Stream]) -> None:
        """Send what has been sampled since the last time. Raises `Unavailable`."""
        for index, stream in enumerate(streams):
            for stretch in stream.take():
                await self._tell(self._message(index, stretch.start, stretch))

    async def finish(self, index: int, stream: Stream, rollout: str) -> None:
        """A completion has ended, and its rollout is stored. Raises `Unavailable`."""
        completion = stream.completion
        last = Stretch(len(completion.tokens), completion.policies[-1][1], stream.text.end())
        message = self._message(index, last.start, last)
        finish = completion.finish or Finish.STOP
        await self._tell(structs.replace(message, finish=finish, rollout=rollout))

    async def fail(self, code: TokensError, sentence: str) -> None:
        """The task ends with an error. Where that cannot be told, whoever waits finds out by waiting."""
        with suppress(Unavailable):
            await self._tell(structs.replace(self._message(0, 0, None), code=code, error=sentence))

    def _message(self, index: int, start: int, stretch: Stretch | None) -> Tokens:
        return Tokens(
            run=self._task.run,
            task_id=self._task.id,
            attempt=self._attempt,
            index=index,
            start=start,
            text=stretch.text if stretch else "",
            tokens=stretch.tokens if stretch else [],
            pieces=stretch.pieces if stretch else [],
            logprobs=stretch.logprobs if stretch else [],
            policy=stretch.policy if stretch else None,
            prompt_tokens=self.prompt_tokens,
            generator=self._generator,
        )

    async def _tell(self, message: Tokens) -> None:
        if self._task.reply:
            await self._bus.tell(subjects.TOKENS, message, run=self._task.run, reply=self._task.reply)
