"""What is known of one request while it is answered, and the messages that are made of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.trace import INVALID_SPAN, Span

from contracts.routing import Attempt, RouteDecision, RouteOutcome, Status, Verdict
from router.admission.keys import Caller
from router.admission.models import Asked
from router.chat import ChatRequest
from router.decomposition.plan import Subtask
from router.ledger.account import Facts, outcome
from router.ledger.spending import Reservation
from router.policy.decision import Decision, Question
from router.settings import PoolSettings


@dataclass
class Record:
    """One request. `attempts` grows as the relay makes calls, whatever becomes of them."""

    run: str
    request: ChatRequest
    caller: Caller
    asked: Asked
    budget: int | None = None  # picodollars that are left to its key; None = without limit
    cached: Mapping[str, int] = field(default_factory=dict)  # pool -> tokens of its session in the pool's cache before
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    span: Span = INVALID_SPAN
    kind: str = ""
    whole: bool = True  # it is not taken apart
    decisions: list[RouteDecision] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    expected: dict[str, int] = field(default_factory=dict)  # subtask under way -> picodollars it will probably cost
    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0  # seconds for pools, those of before `waiting_since`
    waiting: int = 0  # parts of it that wait for pools
    waiting_since: float = 0.0  # when the first of these began to
    reservations: list[Reservation] = field(default_factory=list)  # of its key's budget
    streaming: str = ""  # pool that a stream comes from
    begun: bool = False  # a part of the answer has been given to the application
    outcome: RouteOutcome | None = None  # set once, at the end

    @property
    def conversation(self) -> str:
        """Whose session it is a turn of: what one key's sessions do is nothing to those of another."""
        return f"{self.caller.name}/{self.request.session}"

    @property
    def cost(self) -> int:
        """Picodollars of all calls that have ended."""
        return sum(attempt.cost for attempt in self.attempts)

    @property
    def left(self) -> int | None:
        """Picodollars that this request may still cost; None = without limit."""
        return None if self.budget is None else max(self.budget - self.cost, 0)

    @property
    def tokens(self) -> int:
        """Prompt and answer tokens of all calls that have ended."""
        return sum(attempt.prompt_tokens + attempt.completion_tokens for attempt in self.attempts)

    @property
    def overhead(self) -> float:
        """Seconds spent here so far: those in which no part of it waited for pools."""
        now = time.perf_counter()
        return now - self.started - self.waited - (now - self.waiting_since if self.waiting else 0.0)

    def deferred(self, subtask: str) -> bool:
        """Whether the last answer to a subtask was left to the strong tier, with nothing wrong about it."""
        verdicts = [attempt.verdict for attempt in self.attempts if attempt.subtask == subtask]
        return bool(verdicts) and verdicts[-1] == Verdict.DEFERRED

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around what waits for pools: it does not count as time spent here."""
        if not self.waiting:
            self.waiting_since = time.perf_counter()
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            if not self.waiting:
                self.waited += time.perf_counter() - self.waiting_since

    def decided(self, question: Question, decision: Decision, subtask: Subtask) -> None:
        """Keep a decision as what is published of it: figures, never text."""
        name = subtask.name
        before = sum(each.subtask == name for each in self.decisions)
        self.decisions.append(
            RouteDecision(
                id=".".join([self.id, *([name] if name else []), *([str(before + 1)] if before else [])]),
                run=self.run,
                request_id=self.id,
                subtask=name,
                session=self.request.session,
                key=self.caller.name,
                requested=self.request.model,
                kind=question.kind,
                demand=question.demand,
                pool=decision.pool,
                order=[pool for pool in decision.order if pool != decision.pool],
                reason=decision.reason,
                scores=decision.scores,
                excluded=decision.excluded,
                features=decision.features,
                propensity=decision.propensity,
                tolerance=question.tolerance,
                policy=decision.policy,
                shadow=decision.shadow,
                at_ns=time.time_ns(),
            )
        )

    def end(self, status: Status, error: str, pools: Mapping[str, PoolSettings]) -> RouteOutcome:
        """The outcome; a request has one."""
        assert self.outcome is None, "a request ends once"
        facts = Facts(
            request_id=self.id,
            run=self.run,
            key=self.caller.name,
            session=self.request.session,
            requested=self.request.model,
            kind=self.kind,
            prompt_tokens=self.request.prompt_tokens,
            allowed=self.asked.pools,
            cached=self.cached,
        )
        self.outcome = outcome(
            facts,
            self.attempts,
            pools,
            status=status,
            decisions=[each.id for each in self.decisions],
            seconds=time.perf_counter() - self.started,
            overhead_seconds=self.overhead,
            at_ns=time.time_ns(),
            error=error,
        )
        return self.outcome
