"""From a completion to its grade: which sandbox function judges it, and what its verdict or its failure means."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from contracts.messages import Finish, Outcome
from infra.grading.verifiers import VERIFIERS
from infra.sandbox import Limits, Sandbox, SandboxCrash, SandboxTimeout

TEXT_ENTRY = "infra.grading.verifiers:grade"
GYM_ENTRY = "infra.grading.gym:grade"
COMPARES_ENTRY = "infra.grading.gym:compares"
MAX_BATCH = 64  # completions judged by one sandbox call, where the verifier evaluates nothing
MAX_BATCH_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Grade:
    """What became of a completion. `reward` is None where the verifier failed; 0 is a statement, None is none."""

    outcome: Outcome
    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""  # of a verifier's failure, one sentence


def known(verifier: str) -> bool:
    """Whether a verifier of this name exists; a gym task's own name is not checked."""
    return verifier in VERIFIERS or verifier.startswith("gym:")


def settle(verdict: Any, finish: str | None) -> Grade:
    """A verdict from the sandbox, checked, and read in the light of how sampling ended."""
    try:
        outcome, reward = Outcome(verdict["outcome"]), float(verdict["reward"])
        parts = {str(name): float(value) for name, value in verdict["parts"].items()}
        complete = bool(verdict["complete"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Grade(Outcome.VERIFIER_ERROR, None, reason=f"the verifier's verdict cannot be read: {error!r}"[:300])
    if not 0.0 <= reward <= 1.0 or len(parts) > 32:
        return Grade(Outcome.VERIFIER_ERROR, None, reason="the verifier's verdict is out of bounds")
    if finish == Finish.LENGTH and outcome is not Outcome.OK and not complete:
        return Grade(Outcome.TRUNCATED, 0.0, dict.fromkeys(parts, 0.0))
    return Grade(outcome, reward, parts)


class Grader:
    """Grades completions in a sandbox. Verifiers that evaluate nothing judge all that waits in one call.

    If such a call fails, its completions are judged one by one, so that none suffers from another.
    """

    def __init__(self, sandbox: Sandbox, wall_seconds: float) -> None:
        """`wall_seconds`: of one sandbox call, imports not counted; its CPU seconds are bounded by the same figure."""
        self._sandbox = sandbox
        limits = replace(Limits(), wall_seconds=wall_seconds, cpu_seconds=wall_seconds)
        self._texts, self._gym = _Judge(sandbox, TEXT_ENTRY, limits), _Judge(sandbox, GYM_ENTRY, limits)
        self._comparing: dict[str, bool] = {}  # by gym task: whether its scorer evaluates nothing

    async def grade(
        self, verifier: str, completions: Sequence[str], expected: Any, finishes: Sequence[str | None]
    ) -> list[Grade]:
        """Judge the completions of one item, and how each ended; `expected` is its gold as its environment gave it.

        Never raises on its input.
        """
        requests = [{"verifier": verifier, "completion": text, "expected": expected} for text in completions]
        if verifier in VERIFIERS:
            verdicts = await self._texts.together(requests)
        elif not verifier.startswith("gym:"):
            return [Grade(Outcome.VERIFIER_ERROR, None, reason=f"there is no verifier {verifier!r}")] * len(requests)
        elif await self._compares(verifier.partition(":")[2]):
            verdicts = await self._gym.together(requests)
        else:
            verdicts = await self._gym.one_by_one(requests)
        return [_grade(verdict, finish) for verdict, finish in zip(verdicts, finishes, strict=True)]

    async def _compares(self, name: str) -> bool:
        if name not in self._comparing:
            try:
                self._comparing[name] = await self._sandbox.call(COMPARES_ENTRY, name) is True
            except (SandboxTimeout, SandboxCrash):
                return False  # the verdicts will say what is wrong
        return self._comparing[name]


def _grade(verdict: Any, finish: str | None) -> Grade:
    if isinstance(verdict, SandboxTimeout):
        return Grade(Outcome.VERIFIER_TIMEOUT, None, reason=str(verdict))
    if isinstance(verdict, SandboxCrash):
        return Grade(Outcome.VERIFIER_ERROR, None, reason=str(verdict))
    if isinstance(verdict, BaseException):
        raise verdict
    return settle(verdict, finish)


class _Judge:
    """One sandbox function over many completions: one verdict, or the exception in its place, for each request."""

    def __init__(self, sandbox: Sandbox, entry: str, limits: Limits) -> None:
        self._sandbox = sandbox
        self._entry = entry
        self._limits = limits
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self._collector: asyncio.Task[None] | None = None

    async def one_by_one(self, requests: list[dict[str, Any]]) -> list[Any]:
        """Each in a call of its own."""
        return await asyncio.gather(*map(self._alone, requests), return_exceptions=True)

    async def together(self, requests: list[dict[str, Any]]) -> list[Any]:
        """With all that waits, in as few calls as possible; each in its own where such a call fails."""
        loop = asyncio.get_running_loop()
        waiting = [(request, loop.create_future()) for request in requests]
        self._waiting += waiting
        if self._waiting and (self._collector is None or self._collector.done()):
            self._collector = loop.create_task(self._collect())
        return await asyncio.gather(*(answer for _, answer in waiting), return_exceptions=True)

    async def _collect(self) -> None:
        await asyncio.sleep(0)  # let the groups that end in the same step join the first batch
        while self._waiting:
            batch = self._take()
            try:
                verdicts = await self._judge([request for request, _ in batch])
            except BaseException:
                for _, answer in (*batch, *self._waiting):
                    answer.cancel()
                self._waiting.clear()
                raise
            for (_, answer), verdict in zip(batch, verdicts, strict=True):
                if not answer.done():  # or else its caller was cancelled
                    answer.set_result(verdict)

    def _take(self) -> list[tuple[dict[str, Any], asyncio.Future[Any]]]:
        count, characters = 0, 0
        for request, _ in self._waiting[:MAX_BATCH]:
            characters += len(request["completion"])
            if count and characters > MAX_BATCH_CHARACTERS:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _judge(self, requests: list[dict[str, Any]]) -> list[Any]:
        if len(requests) > 1:
            try:
                verdicts = await self._sandbox.call(self._entry, requests, limits=self._limits)
                if isinstance(verdicts, list) and len(verdicts) == len(requests):
                    return verdicts
            except (SandboxTimeout, SandboxCrash):
                pass
        return await self.one_by_one(requests)

    async def _alone(self, request: dict[str, Any]) -> Any:
        verdicts = await self._sandbox.call(self._entry, [request], limits=self._limits)
        if not isinstance(verdicts, list) or len(verdicts) != 1:
            raise SandboxCrash(f"{self._entry}: the verdict is not one for one completion")
        return verdicts[0]
