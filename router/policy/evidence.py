"""What became of decisions: decisions, outcomes and feedback joined by request, and read as success or failure. Pure.

Everything is kept by id, so that a message read twice changes nothing and the order of arrival does not matter. One
thread adds, another may read: it reads copies of what can grow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from contracts.routing import Attempt, Feedback, RouteDecision, RouteOutcome, Status, Verdict
from router.policy.calibration import MEAN, Judged, inputs_of
from router.policy.shadow import Logged

CAPACITY = 50_000  # requests; the oldest are forgotten
GOOD = 0.5  # feedback's score from which an answer was right


@dataclass
class _Request:
    decisions: dict[str, RouteDecision] = field(default_factory=dict)
    outcome: RouteOutcome | None = None
    feedback: Feedback | None = None  # the last one said

    def decision(self, subtask: str) -> RouteDecision | None:
        """The first decision about a subtask; later ones are escalations."""
        found = [each for each in list(self.decisions.values()) if each.subtask == subtask and each.pool]
        return min(found, key=lambda each: (each.at_ns, each.id), default=None)

    def subtasks(self) -> list[str]:
        return sorted({each.subtask for each in list(self.decisions.values())})


class Journal:
    """Recent requests and what is known of them."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self.taken = 0  # messages so far

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, message: RouteDecision | RouteOutcome | Feedback) -> None:
        """Take a message in; it may come again, and in any order."""
        self.taken += 1
        request = self._requests.setdefault(message.request_id, _Request())
        if isinstance(message, RouteDecision):
            request.decisions[message.id] = message
        elif isinstance(message, RouteOutcome):
            request.outcome = message
        elif request.feedback is None or (message.at_ns, message.id) > (request.feedback.at_ns, request.feedback.id):
            request.feedback = message
        while len(self._requests) > self._capacity:
            self._requests.popitem(last=False)

    def judged(self) -> list[tuple[int, Judged]]:
        """Answers known to be right or wrong, each with the time of its decision in unix ns."""
        found = []
        for request in list(self._requests.values()):
            for attempt, success in _labels(request):
                decision = request.decision(attempt.subtask)
                if decision is None or f"logit.{attempt.pool}" not in decision.features or attempt.tier not in MEAN:
                    continue
                inputs = inputs_of(attempt.pool, decision.kind, decision.demand, decision.features)
                found.append((decision.at_ns, Judged(attempt.pool, attempt.tier, inputs, success)))
        return found

    def answers(self) -> list[tuple[str, int]]:
        """Kind and tokens of the answers that came to their end."""
        found = []
        for request in list(self._requests.values()):
            for attempt in request.outcome.attempts if request.outcome else []:
                decision = request.decision(attempt.subtask)
                if decision is not None and attempt.status == Status.OK and not attempt.estimated:
                    found.append((decision.kind, attempt.completion_tokens))
        return found

    def logged(self, trial: str, policy: str) -> list[Logged]:
        """Judged decisions that `policy` made while `trial` was asked as well."""
        return [
            logged
            for request in list(self._requests.values())
            for subtask in request.subtasks()
            if (decision := request.decision(subtask)) is not None
            and decision.policy == policy
            and trial in decision.shadow
            and (logged := _logged(request, decision, decision.shadow[trial])) is not None
        ]


def _labels(request: _Request) -> Iterator[tuple[Attempt, bool]]:
    """Attempts with what is known of their answers. What was cancelled, broke off or found no verdict says nothing.

    Feedback is about the whole answer: it says something of an attempt only where one attempt made that answer, and
    then counts more than a verifier, which sees less.
    """
    outcome = request.outcome
    if outcome is None or outcome.status != Status.OK:
        return
    complete = [attempt for attempt in outcome.attempts if attempt.status == Status.OK]
    said = _said(request.feedback)
    whole = len({attempt.subtask for attempt in outcome.attempts}) == 1
    for attempt in complete:
        if said is not None and whole and attempt is complete[-1]:
            yield attempt, said
        elif attempt.verdict in (Verdict.PASSED, Verdict.FAILED):
            yield attempt, attempt.verdict == Verdict.PASSED


def _said(feedback: Feedback | None) -> bool | None:
    """Whether the answer was right, as somebody said; a correction alone says that it was not."""
    if feedback is None:
        return None
    if feedback.passed is not None:
        return feedback.passed
    return feedback.score >= GOOD if feedback.score is not None else False


def _logged(request: _Request, decision: RouteDecision, trial: str) -> Logged | None:
    """A decision for the trial; None where there was no choice, or nobody knows whether the answer was right."""
    scores = decision.scores
    greedy = decision.order[0] if decision.reason == "explored" and decision.order else decision.pool
    if len(scores) < 2 or decision.propensity <= 0 or not {decision.pool, trial, greedy} <= scores.keys():
        return None
    labels = [success for attempt, success in _labels(request) if attempt.subtask == decision.subtask]
    if not labels or request.outcome is None:
        return None
    attempts = [attempt for attempt in request.outcome.attempts if attempt.subtask == decision.subtask]
    return Logged(
        pool=decision.pool,
        propensity=decision.propensity,
        greedy=greedy,
        trial=trial,
        scores=scores,
        checked=decision.features.get("checked", 0.0) > 0,
        tolerance=decision.tolerance,
        success=labels[-1],
        cost=sum(attempt.cost for attempt in attempts),
    )
