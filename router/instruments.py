"""What the router measures: OpenTelemetry's conventions for generative AI (`gen_ai.*`), and its own `tailrace.route.*`.

A request is a span `chat {model}` of kind SERVER whose parent is the application's, by its `traceparent`; each call of
a pool is one of kind CLIENT below it, and its context goes to the upstream in the same header. No prompt, answer or API
key is ever in a span or a label; `tailrace.key` is the name that the operator gave a key. Everything records on the
process's providers, and does nothing while none are set.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer

from contracts.routing import Attempt, Role, RouteDecision, RouteOutcome, Status, Verdict
from infra.instruments import SCOPE, counter, histogram, up_down_counter
from router.prices import DOLLAR

Labels = dict[str, str | int]

# Bucket boundaries that the conventions recommend.
TOKEN_BUCKETS = tuple(float(4**power) for power in range(14))
DURATION_BUCKETS = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
OVERHEAD_BUCKETS = tuple(0.00025 * 2**power for power in range(14))

CHAT = "chat"
MODEL_CHARACTERS = 64  # of a name that an application or an upstream made up

# --- spans ------------------------------------------------------------------------------------------------------------


def request(requested: str, headers: Mapping[str, str]) -> Span:
    """Begin the span of a request; `headers` are the application's. `answered` ends it."""
    model = requested[:MODEL_CHARACTERS]
    attributes = _common(model, "", "tailrace")
    parent = propagate.extract(headers)
    return _tracer().start_span(f"{CHAT} {model}", context=parent, kind=SpanKind.SERVER, attributes=attributes)


def within(span: Span) -> AbstractContextManager[Span]:
    """Make a span the current one for a while, without ending it: calls begun meanwhile are its children."""
    return trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False)


def answered(span: Span, outcome: RouteOutcome) -> None:
    """End the span of a request with what came of it."""
    answer = next((attempt for attempt in reversed(outcome.attempts) if attempt.pool == outcome.pool), None)
    span.set_attributes(
        _common(outcome.requested[:MODEL_CHARACTERS], answer.model if answer else "", "tailrace")
        | {
            "gen_ai.usage.input_tokens": sum(attempt.prompt_tokens for attempt in outcome.attempts),
            "gen_ai.usage.output_tokens": sum(attempt.completion_tokens for attempt in outcome.attempts),
            "tailrace.request": outcome.request_id,
            "tailrace.key": outcome.key,
            "tailrace.kind": outcome.kind,
            "tailrace.pool": outcome.pool,
            "tailrace.attempts": len(outcome.attempts),
            "tailrace.cost": outcome.cost / DOLLAR,
        }
    )
    _end(span, outcome.status)


def call(pool: str, role: str, subtask: str) -> Span:
    """Begin the span of one call, below the current one. Send its context upstream, and end it with `called`."""
    attributes: Labels = {**_common(pool, "", ""), "tailrace.role": role, "tailrace.subtask": subtask}
    return _tracer().start_span(f"{CHAT} {pool}", kind=SpanKind.CLIENT, attributes=attributes)


def called(span: Span, attempt: Attempt) -> None:
    """End the span of a call with what came of it."""
    span.set_attributes(
        _of_attempt(attempt)
        | {
            "gen_ai.usage.input_tokens": attempt.prompt_tokens,
            "gen_ai.usage.output_tokens": attempt.completion_tokens,
            "tailrace.cost": attempt.cost / DOLLAR,
        }
    )
    _end(span, attempt.status)


def _end(span: Span, status: str) -> None:
    if status in (Status.ERROR, Status.PARTIAL):
        span.set_status(StatusCode.ERROR)
    if status != Status.OK:
        span.set_attribute("error.type", str(status))
    span.end()


# Before the set-up it is a proxy that turns into a real one.
@cache
def _tracer() -> Tracer:
    return trace.get_tracer(SCOPE)


# --- metrics ----------------------------------------------------------------------------------------------------------


def decided(decision: RouteDecision) -> None:
    """Where a request or subtask was sent."""
    counter("tailrace.route.decisions", "{decision}", "Requests and subtasks, by the pool chosen and why").add(
        1,
        {
            "tailrace.pool": decision.pool,
            "tailrace.reason": decision.reason,
            "tailrace.kind": decision.kind,
            "tailrace.demand": decision.demand,
        },
    )


def ended(outcome: RouteOutcome) -> None:
    """What a request cost and how it ended."""
    who: Labels = {"tailrace.key": outcome.key, "tailrace.kind": outcome.kind}
    counter("tailrace.route.requests", "{request}", "Requests that have ended").add(
        1, {**who, "tailrace.status": outcome.status, "tailrace.pool": outcome.pool}
    )
    saved = (outcome.counterfactual - outcome.cost) / DOLLAR
    up_down_counter("tailrace.route.saved", "{USD}", "Against one call of the strongest pool for each request").add(
        saved, who
    )
    histogram("tailrace.route.overhead", "s", "Time of a request spent in the router itself", OVERHEAD_BUCKETS).record(
        outcome.overhead_seconds
    )
    for attempt in outcome.attempts:
        _attempted(attempt, who)


def _attempted(attempt: Attempt, who: Labels) -> None:
    pool: Labels = {"tailrace.pool": attempt.pool, "tailrace.tier": attempt.tier}
    counter("tailrace.route.attempts", "{call}", "Calls of pools, by role and how they ended").add(
        1, {**pool, "tailrace.role": attempt.role, "tailrace.status": attempt.status}
    )
    counter("tailrace.route.cost", "{USD}", "What calls have cost, failed ones included").add(
        attempt.cost / DOLLAR, {**pool, **who}
    )
    if attempt.role == Role.ESCALATION:
        counter("tailrace.route.escalations", "{call}", "Answers that were refused and asked for again").add(1, who)
    if attempt.verdict != Verdict.NONE:
        counter("tailrace.route.verdicts", "{verdict}", "What verifiers said about answers").add(
            1, {**pool, "tailrace.verdict": attempt.verdict}
        )
    labels = _of_attempt(attempt)
    failed: Labels = {} if attempt.status == Status.OK else {"error.type": attempt.status}
    histogram("gen_ai.client.operation.duration", "s", "Time of one call", DURATION_BUCKETS).record(
        attempt.seconds, labels | failed
    )
    if attempt.first_token_seconds:
        histogram("gen_ai.server.time_to_first_token", "s", "Time to the first token", FIRST_TOKEN_BUCKETS).record(
            attempt.first_token_seconds, labels
        )
    for kind, tokens in (("input", attempt.prompt_tokens), ("output", attempt.completion_tokens)):
        if tokens:
            histogram("gen_ai.client.token.usage", "{token}", "Tokens of one call", TOKEN_BUCKETS).record(
                tokens, {**labels, "gen_ai.token.type": kind}
            )


def _of_attempt(attempt: Attempt) -> Labels:
    # An upstream speaks OpenAI's protocol; what our generators serve comes with the weights that served it.
    return _common(attempt.pool, attempt.model, "openai" if attempt.policy is None else "tailrace")


def _common(requested: str, answered: str, provider: str) -> Labels:
    found: Labels = {"gen_ai.operation.name": CHAT, "gen_ai.request.model": requested}
    if provider:
        found["gen_ai.provider.name"] = provider
    if answered:  # whatever an upstream calls itself: one name that cannot be written down would cost a whole batch
        found["gen_ai.response.model"] = answered[:MODEL_CHARACTERS].encode("utf-8", "replace").decode()
    return found
