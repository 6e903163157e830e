"""The protocol between the generator service and whatever samples: groups in, tokens with log-probs out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from contracts.messages import Finish, PolicyRef, Sampling


class EngineError(RuntimeError):
    """A request, a load or the engine itself failed; the message says what and why."""


class EngineFull(EngineError):
    """Too many completions wait already: give the task back."""


class RequestRefused(EngineError):
    """This engine can never sample the request: a setting out of range, a token unknown to the model, too large."""


class PromptTooLong(RequestRefused):
    """The prompt leaves no room for a sampled token in the model's window."""


@dataclass(frozen=True)
class SampleRequest:
    """One prompt to sample a group of completions for."""

    prompt: list[int]  # token ids, at least one
    group_size: int  # completions, 1 .. the engine's max_requests
    sampling: Sampling
    seed: int  # with the policy, it determines the completions
    stream: bool = False  # somebody reads along: tokens are wanted as they come, not only at the end


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of one completion, in order of sampling."""

    index: int  # of the completion in its group
    token: int
    logprob: float  # natural log, under the distribution it was sampled from
    policy: PolicyRef  # whose logits these were
    finish: Finish | None = None  # set on the last token of the completion


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine started."""

    tokens: int  # sampled
    busy_seconds: float  # wall time computing prefill and decode steps
    load_seconds: float  # wall time that sampling stood still for new weights
    inflight: int  # completions being sampled now
    queued: int  # completions of groups that wait for free slots


class Engine(Protocol):
    """Samples groups with the newest policy it was given; one instance per process and model."""

    @property
    def policy(self) -> PolicyRef | None:
        """The policy that the next token is sampled with; None until the first `load`."""

    @property
    def error(self) -> str | None:
        """Why the engine cannot go on, or None while it is healthy."""

    @property
    def unable(self) -> str | None:
        """Why nothing can be sampled at present although the engine will recover by itself, or None."""

    @property
    def stats(self) -> EngineStats: ...

    async def load(self, policy: PolicyRef, weights: dict[str, Tensor]) -> float:
        """Swap the weights between two decode steps; returns seconds. Requests in flight go on with their cache kept.

        All or nothing: raises `EngineError` when names, shapes or numbers do not fit the model, which then stays as it
        was. Afterwards `weights` are the caller's again, who patches them in place.
        """

    def submit(self, request: SampleRequest) -> AsyncGenerator[list[SampledToken], None]:
        """The tokens of all completions of the group, in lists, until all have finished.

        Closing the iterator (`contextlib.aclosing`) aborts the group and frees its slots. Raises, on the first step,
        `RequestRefused`, `EngineFull`, or `EngineError` before the first `load`; later `EngineError` when a step fails
        or the engine is closed.
        """

    async def close(self) -> None:
        """Fail what is in flight and stop the engine, in bounded time."""
