"""From a completion to its grade: which sandbox function judges it, and what its verdict or its failure means."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from contracts.messages import Finish, Outcome
from infra.grading.verifiers import VERIFIERS
from infra.sandbox import Limits, Sandbox, SandboxCrash, SandboxTimeout

TEXT_ENTRY = "infra.grading.verifiers:grade"
GYM_ENTRY = "infra.grading.gym:grade"
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


def settle(verdict: Any, finish: str) -> Grade:
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
        self._limits = replace(Limits(), wall_seconds=wall_seconds, cpu_seconds=wall_seconds)
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self._collector: asyncio.Task[None] | None = None

    async def grade(self, verifier: str, completion: str, expected: Any, finish: str) -> Grade:
        """Judge one completion; `expected` is the item's gold as its environment gave it. Never raises on its input."""
        request = {"verifier": verifier, "completion": completion, "expected": expected}
        try:
            if verifier in VERIFIERS:
                verdict = await self._batched(request)
            elif verifier.startswith("gym:"):
                verdict = await self._alone(GYM_ENTRY, request)
            else:
                return Grade(Outcome.VERIFIER_ERROR, None, reason=f"there is no verifier {verifier!r}")
        except SandboxTimeout as error:
            return Grade(Outcome.VERIFIER_TIMEOUT, None, reason=str(error))
        except SandboxCrash as error:
            return Grade(Outcome.VERIFIER_ERROR, None, reason=str(error))
        return settle(verdict, finish)

    async def _alone(self, entry: str, request: dict[str, Any]) -> Any:
        verdicts = await self._sandbox.call(entry, [request], limits=self._limits)
        if not isinstance(verdicts, list) or len(verdicts) != 1:
            raise SandboxCrash(f"{entry}: the verdict is not one for one completion")
        return verdicts[0]

    async def _batched(self, request: dict[str, Any]) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect())
        return await answer

    async def _collect(self) -> None:
        await asyncio.sleep(0)  # let the rest of a group that is graded at once join the first batch
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
                if answer.done():  # its caller was cancelled
                    continue
                if isinstance(verdict, BaseException):
                    answer.set_exception(verdict)
                else:
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
        """One verdict or exception for each request."""
        if len(requests) > 1:
            try:
                verdicts = await self._sandbox.call(TEXT_ENTRY, requests, limits=self._limits)
                if isinstance(verdicts, list) and len(verdicts) == len(requests):
                    return verdicts
            except (SandboxTimeout, SandboxCrash):
                pass
        alone = (self._alone(TEXT_ENTRY, request) for request in requests)
        return await asyncio.gather(*alone, return_exceptions=True)
