"""An answer from our generators, put together from the stretches that they stream. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from contracts.base import PolicyRef
from contracts.messages import Task, Tokens
from contracts.serving import TokensError
from router.chat import Chunk, Reply, Usage
from router.pools.asking import refused
from router.pools.base import Fault, PoolError
from router.pools.toolcalls import ToolText


@dataclass
class Choice:
    """One completion so far."""

    tokens: int = 0
    text: list[str] = field(default_factory=list)  # that may be shown
    tools: ToolText | None = None  # holds back calls of tools, where tools are on offer
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str = ""  # as OpenAI says it

    def add(self, message: Tokens, name: str) -> str:
        """Take the next stretch; the text that it lets be shown. `name` begins the ids of calls."""
        self.tokens += len(message.tokens)
        self.finish = message.finish
        text = message.text
        if self.tools is not None:
            text = self.tools.push(text)
            if message.finish:
                rest, self.calls = self.tools.end(name)
                text, self.finish = text + rest, "tool_calls" if self.calls else message.finish
        self.text.append(text)
        return text


class Assembly:
    """One answer. `take` gives chunks as OpenAI shapes them; `last` and `reply` are for when it is `complete`.

    Once something has been `shown`, another attempt at the task cannot take its place: it would answer twice.
    """

    def __init__(self, name: str, task: Task, *, logprobs: bool, keeps: bool) -> None:
        """`name` is the pool's, for error sentences, and `keeps` says that nothing is shown before the end."""
        self._name = name
        self._task = task
        self._logprobs = logprobs
        self._keeps = keeps
        self._frame: dict[str, Any] = {"id": task.id, "created": task.issued_ns // 1_000_000_000, "model": name}
        self._choices: list[Choice] = []
        self._attempt = 0
        self._shown = False
        self._prompt_tokens = 0
        self._policy: PolicyRef | None = None  # that sampled the newest token
        self._rollout = ""

    @property
    def complete(self) -> bool:
        """Whether all has come."""
        return bool(self._choices) and all(choice.finish for choice in self._choices)

    @property
    def began(self) -> bool:
        """Whether a token has come."""
        return any(choice.tokens for choice in self._choices)

    @property
    def usage(self) -> Usage:
        """Of what has come."""
        return Usage(self._prompt_tokens, sum(choice.tokens for choice in self._choices))

    def take(self, message: Tokens) -> list[Chunk]:
        """The chunks that a stretch makes.

        Raises `PoolError` for the error that it reports, where stretches are missing before it, and where the answer
        would begin anew after some of it was shown.
        """
        if message.attempt < self._attempt:
            return []
        if message.attempt > self._attempt:
            self._begin(message.attempt)
        if message.code:
            raise self._error(message)
        if message.index >= len(self._choices):
            return []
        choice = self._choices[message.index]
        if message.start < choice.tokens or choice.finish:  # told twice
            return []
        if message.start > choice.tokens:
            raise self.broken("some of the answer was lost on its way")
        return self._add(choice, message)

    def _begin(self, attempt: int) -> None:
        if self._shown:
            raise self.broken("the generator was lost in mid-answer")
        self._attempt = attempt
        tools = bool(self._task.tools)
        self._choices = [Choice(tools=ToolText() if tools else None) for _ in range(self._task.group_size)]

    def _add(self, choice: Choice, message: Tokens) -> list[Chunk]:
        first = not choice.tokens
        text = choice.add(message, f"call-{self._task.id}-{message.index}")
        self._prompt_tokens = message.prompt_tokens or self._prompt_tokens
        self._policy = message.policy or self._policy
        if message.rollout and not message.index:
            self._rollout = message.rollout
        entries = (
            [_entry(*each) for each in zip(message.pieces, message.logprobs, strict=True)] if self._logprobs else []
        )
        choice.logprobs += entries
        if self._policy is not None:
            version = f"{self._policy.generation}.{self._policy.version}"
            self._frame |= {
                "model": f"{self._name}@{version}",
                "system_fingerprint": f"{version}.{self._policy.digest[:12]}",
            }
        if self._keeps or not (text or entries or choice.finish or first):
            return []
        self._shown = True
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text or first:
            delta["content"] = text
        if choice.calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(choice.calls)]
        chunk = {
            "index": message.index,
            "delta": delta,
            "logprobs": {"content": entries, "refusal": None} if entries else None,
            "finish_reason": choice.finish or None,
        }
        of_first = message.index == 0
        return [
            Chunk(
                self._body("chat.completion.chunk", [chunk]),
                text=text if of_first else "",
                finish=(choice.finish or None) if of_first else None,
            )
        ]

    def last(self) -> Chunk:
        """The chunk after all others: usage, and what served the answer."""
        body = self._body("chat.completion.chunk", []) | {"usage": self.usage.body()}
        return Chunk(body, usage=self.usage, policy=self._served(), rollout=self._rollout)

    def reply(self) -> Reply:
        """The whole answer."""
        choices = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._logprobs else None,
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(self._choices)
        ]
        body = self._body("chat.completion", choices) | {"usage": self.usage.body()}
        return Reply(
            body,
            text="".join(self._choices[0].text),
            finish=self._choices[0].finish,
            usage=self.usage,
            model=self._frame["model"],
            tool_calls=tuple(self._choices[0].calls),
            policy=self._served(),
            rollout=self._rollout,
        )

    def broken(self, sentence: str) -> PoolError:
        """The answer cannot be completed; what has come was paid for."""
        return PoolError(Fault.BROKEN, f"{self._name}: {sentence}", usage=self.usage)

    def _error(self, message: Tokens) -> PoolError:
        if message.code == TokensError.PROMPT_TOO_LONG:
            body = {
                "message": message.error,
                "type": "invalid_request_error",
                "param": "messages",
                "code": "context_length_exceeded",
            }
            return PoolError(Fault.TOO_LONG, message.error, status=400, body=body)
        if message.code == TokensError.REFUSED:
            return refused(message.error, None)
        fault = (
            Fault.TIMEOUT if message.code == TokensError.EXPIRED else Fault.BROKEN if self._shown else Fault.UNAVAILABLE
        )
        return PoolError(fault, f"{self._name}: {message.error}", usage=self.usage)

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._frame, "object": kind, "choices": choices}

    def _served(self) -> tuple[int, int, str] | None:
        policy = self._policy
        return None if policy is None else (policy.generation, policy.version, policy.digest)


def _message(choice: Choice) -> dict[str, Any]:
    text = "".join(choice.text)
    message = {"role": "assistant", "content": text or (None if choice.calls else ""), "refusal": None}
    return {**message, "tool_calls": choice.calls} if choice.calls else message


def _entry(piece: str, logprob: float) -> dict[str, Any]:
    """One token's log-prob in OpenAI's shape; the bytes of one that is no whole character are not known."""
    known = "\N{REPLACEMENT CHARACTER}" not in piece
    return {"token": piece, "logprob": logprob, "bytes": list(piece.encode()) if known else None, "top_logprobs": []}
