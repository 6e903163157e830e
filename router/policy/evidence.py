"""What became of decisions: decisions, outcomes and feedback joined by request, and read as success or failure. Pure.

Everything is kept by id, so that a message read twice changes nothing and the order of arrival does not matter. One
thread adds, another may read: it reads copies of what can grow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from contracts.routing import Attempt, Feedback, RouteDecision, RouteOutcome, Status, Verdict
from router.policy.calibration import MEAN, Judged, inputs_of
from router.policy.shadow import Logged

LIVE = 10_000  # requests that messages are still expected of
KEPT = 30_000  # older ones that are known to have gone well or badly; more than a trial takes
RAREST = 1e-4  # propensity below which a decision is not used: it would outweigh all others
GOOD = 0.5  # feedback's score from which an answer was right


@dataclass
class _Request:
    """The messages about one request."""

    decisions: dict[str, RouteDecision] = field(default_factory=dict)
    outcome: RouteOutcome | None = None
    feedback: Feedback | None = None  # the last one said

    def decision(self, subtask: str) -> RouteDecision | None:
        """The first decision about a subtask; later ones are escalations."""
        found = [each for each in list(self.decisions.values()) if each.subtask == subtask and each.pool]
        return min(found, key=lambda each: (each.at_ns, each.id), default=None)


@dataclass(frozen=True)
class _Known:
    """What one request says: its judged answers, each with the time of its decision and the policy that made it; kind
    and tokens of its answers; and for each judged decision who made it, what a trial would have chosen, how it went."""

    judged: list[tuple[int, str, Judged]]
    answers: list[tuple[str, int]]
    logged: list[tuple[str, dict[str, str], Logged]]


class Journal:
    """Recent requests and what is known of them. Bounded: the oldest are forgotten, later if something is known."""

    def __init__(self, live: int = LIVE, kept: int = KEPT) -> None:
        self._live, self._kept = live, kept
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._settled: OrderedDict[str, _Known] = OrderedDict()
        self.taken = 0  # messages so far

    def __len__(self) -> int:
        return len(self._requests) + len(self._settled)

    def add(self, message: RouteDecision | RouteOutcome | Feedback) -> None:
        """Take a message in; it may come again, and in any order."""
        if message.request_id in self._settled:
            return
        self.taken += 1
        request = self._requests.setdefault(message.request_id, _Request())
        if isinstance(message, RouteDecision):
            request.decisions[message.id] = message
        elif isinstance(message, RouteOutcome):
            request.outcome = message
        elif request.feedback is None or (message.at_ns, message.id) > (request.feedback.at_ns, request.feedback.id):
            request.feedback = message
        while len(self._requests) > self._live:
            id, oldest = self._requests.popitem(last=False)
            known = _known(oldest)
            if known.judged or known.logged:
                self._settled[id] = known
        while len(self._settled) > self._kept:
            self._settled.popitem(last=False)

    def judged(self) -> list[tuple[int, str, Judged]]:
        """Answers known to be right or wrong, each with its decision's time in unix ns and version of the policy."""
        return [each for known in self._all() for each in known.judged]

    def answers(self) -> list[tuple[str, int]]:
        """Kind and tokens of the answers that came to their end."""
        return [each for known in self._all() for each in known.answers]

    def logged(self, trial: str, policy: str) -> list[Logged]:
        """Judged decisions that `policy` made while `trial` was asked as well."""
        return [
            replace(logged, trial=shadow[trial])
            for known in self._all()
            for made_by, shadow, logged in known.logged
            if made_by == policy and shadow.get(trial) in logged.scores
        ]

    def _all(self) -> Iterator[_Known]:
        yield from list(self._settled.values())
        yield from map(_known, list(self._requests.values()))


def _known(request: _Request) -> _Known:
    known = _Known([], [], [])
    for attempt in request.outcome.attempts if request.outcome else []:
        decision = request.decision(attempt.subtask)
        if decision is not None and attempt.status == Status.OK and not attempt.estimated:
            known.answers.append((decision.kind, attempt.completion_tokens))
    last: dict[str, bool] = {}  # subtask -> whether it went well in the end
    for attempt, success in _labels(request):
        last[attempt.subtask] = success
        decision = request.decision(attempt.subtask)
        if decision is not None and f"logit.{attempt.pool}" in decision.features and attempt.tier in MEAN:
            inputs = inputs_of(attempt.pool, decision.kind, decision.demand, decision.features)
            judged = Judged(attempt.pool, attempt.tier, inputs, success)
            known.judged.append((decision.at_ns, decision.policy, judged))
    for subtask, success in last.items():
        decision = request.decision(subtask)
        if decision is not None and decision.shadow and request.outcome is not None:
            logged = _logged(decision, request.outcome, success)
            if logged is not None:
                known.logged.append((decision.policy, decision.shadow, logged))
    return known


def _labels(request: _Request) -> Iterator[tuple[Attempt, bool]]:
    """Attempts with what is known of their answers. What was cancelled, broke off or found no verdict says nothing.

    Feedback is about the whole answer: it says something of an attempt only where one attempt made that answer, and
    then counts more than a verifier, which sees less. A verdict counts where the decision reckoned with it
    (`checked`): a verifier that sees only the form, such as one of syntax, passes wrong answers.
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
            decision = request.decision(attempt.subtask)
            if decision is not None and decision.features.get("checked", 0.0) > 0:
                yield attempt, attempt.verdict == Verdict.PASSED


def _said(feedback: Feedback | None) -> bool | None:
    """Whether the answer was right, as somebody said; a correction alone says that it was not."""
    if feedback is None:
        return None
    if feedback.passed is not None:
        return feedback.passed
    return feedback.score >= GOOD if feedback.score is not None else False


def _logged(decision: RouteDecision, outcome: RouteOutcome, success: bool) -> Logged | None:
    """A decision for a trial to be judged by; None where there was no choice."""
    scores = decision.scores
    greedy = decision.order[0] if decision.reason == "explored" and decision.order else decision.pool
    if len(scores) < 2 or decision.propensity < RAREST or not {decision.pool, greedy} <= scores.keys():
        return None
    return Logged(
        pool=decision.pool,
        propensity=decision.propensity,
        greedy=greedy,
        trial="",
        scores=scores,
        checked=decision.features.get("checked", 0.0) > 0,
        tolerance=decision.tolerance,
        success=success,
        cost=sum(attempt.cost for attempt in outcome.attempts if attempt.subtask == decision.subtask),
    )
