"""Checks of answers by name, in the sandbox: what comes of a check, whatever the answer does to its verifier."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog

from contracts.routing import Verdict
from infra.sandbox import Limits, Sandbox, SandboxCrash, SandboxTimeout
from router.verification.check import Check
from router.verification.registry import VERIFIERS, validate
from router.verification.result import BadCheck, Result, sentence, undecided

log = structlog.get_logger(__name__)

ENTRY = "router.verification.checks.entry:run"
MAX_ANSWER_CHARACTERS = 1_000_000
WAIT_SECONDS = 20.0  # for a free worker and the verdict together
LIMITS = Limits(wall_seconds=4.0, cpu_seconds=4.0, memory_bytes=512 * 1024**2)


class Verifiers:
    """Checks answers: in `workers` processes what takes some milliseconds, in as many others what runs for seconds.

    So nobody's tests that never end keep an agent's tool calls from being looked at. A verifier that times out, breaks
    or finds nothing to check says `UNDECIDED`, never `FAILED`.
    """

    def __init__(self, workers: int = 1) -> None:
        self._workers = workers
        self._reading, self._running = (Sandbox(workers, LIMITS, packages=("router.verification",)) for _ in range(2))
        self._bounds_processes = False

    async def start(self) -> None:
        """Start the workers and have them import what they need. Raises `UserError`."""
        await self._reading.start()
        await self._running.start()
        self._bounds_processes = {"own processes", "process count"} <= set(self._reading.enforced)
        await asyncio.gather(*(self.check(Check("json"), "{}") for _ in range(self._workers)))

    async def close(self) -> None:
        """Kill the workers and what runs in them."""
        await asyncio.gather(self._reading.close(), self._running.close())

    async def check(self, check: Check, text: str, tool_calls: Sequence[dict[str, Any]] = ()) -> Result:
        """The verdict on an answer: its text, and the tool calls of its turn. Raises `BadCheck` on a bad check."""
        validate(check)
        if check.name == "tool_call":
            text = json.dumps({"calls": list(tool_calls), "text": text[:MAX_ANSWER_CHARACTERS]})
        elif tool_calls:
            return undecided("The answer calls tools; there is nothing to check yet.")
        if len(text) > MAX_ANSWER_CHARACTERS:
            return undecided(f"The answer has more than {MAX_ANSWER_CHARACTERS} characters.")
        if not text.strip():
            return undecided("The answer is empty.")
        token = secrets.token_hex(16)
        payload = {"name": check.name, "arguments": check.arguments, "answer": text, "token": token}
        processes = VERIFIERS[check.name].processes if self._bounds_processes else 0
        sandbox = self._running if check.name == "tests" else self._reading
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                report = await sandbox.call(ENTRY, payload, limits=replace(LIMITS, processes=processes))
        except (SandboxTimeout, TimeoutError):
            return undecided("The check did not end in time.")
        except SandboxCrash:  # its text may quote the answer, which no log may hold
            log.warning("a check broke", check=check.name)
            return undecided("The check broke on this answer.")
        return _read(report, token)


def _read(report: Any, token: str) -> Result:
    """A report of the sandbox, which the answer's code may have written."""
    if not isinstance(report, dict) or report.get("token") != token:
        return undecided("The check broke on this answer.")
    if "refused" in report:
        raise BadCheck(report["refused"])
    return Result(Verdict(report["verdict"]), sentence(report["reason"]))
