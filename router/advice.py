"""Decisions for those who only want to know where a request would go: `route.request` in, `route.decision` out.

All routers of a run share one durable consumer, so a request is answered once, by whichever has a moment; asked again
under the same id it gets no second decision. What cannot be decided, a body that is no chat request or a model that
does not exist, is a decision too: with an empty pool, the reason `refused`, and the sentence that the gateway would
have said. A message that is no `RouteRequest` at all goes to the dead letters.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256

from contracts.messages import RouteDecision, RouteRequest
from contracts.subjects import ROUTE_DECISION, ROUTE_WORKERS
from infra.bootstrap import ensure_consumer
from infra.bus import Bus, Received
from infra.work import work
from router import instruments
from router.admission.keys import EVERYONE
from router.admission.models import asked
from router.admission.parse import LONG_BODY, MAX_BYTES, parse
from router.answering import NEVER, Answering
from router.chat import ApiError, ChatRequest
from router.decomposition.planner import plan
from router.record import Record

SLOTS = 32  # requests at once
DRAIN_SECONDS = 2.0
REFUSED = "refused"

Decide = Callable[[RouteRequest], Awaitable[RouteDecision]]


async def answer_requests(bus: Bus, run: str, decide: Decide, *, create: bool, stopping: asyncio.Event) -> None:
    """Answer the run's route requests until `stopping`; `create` the shared consumer where it is missing.

    Raises `UserError` where it is missing and must not be created, or differs from the catalogue.
    """
    await ensure_consumer(bus, ROUTE_WORKERS, create=create, run=run)

    async def answer(received: Received[RouteRequest]) -> None:
        decision = await decide(received.message)
        # The id is the asker's: it must neither break a header, nor stand in the way of another message's.
        name = sha256(decision.request_id.encode()).hexdigest()
        await bus.publish(ROUTE_DECISION, decision, id=f"asked.{name}", run=run)
        instruments.decided(decision)

    await work(bus, ROUTE_WORKERS, answer, slots=SLOTS, stopping=stopping, drain=DRAIN_SECONDS, run=run)


class Advisor:
    """Decides about requests as `Answering` would, taken as a whole, without calling or booking anything."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def __call__(self, asking: RouteRequest) -> RouteDecision:
        """Where a request would go now, or why it could go nowhere. A long one is read beside the event loop."""
        try:
            raw = asking.body.encode()
            if len(raw) > MAX_BYTES:
                raise ApiError(413, f"the body has {len(raw)} bytes, {MAX_BYTES} are allowed")
            long = len(raw) > LONG_BODY
            request = await asyncio.to_thread(parse, raw, asking.session) if long else parse(raw, asking.session)
            return self._decided(asking, request)
        except ApiError as error:
            return refusal(asking, error.message)

    def _decided(self, asking: RouteRequest, request: ChatRequest) -> RouteDecision:
        a = self._answering
        caller = a.keys.named(asking.key) if asking.key else EVERYONE
        wanted = asked(request.model, a.settings.pools, caller, a.settings.tolerance)
        left = None if caller.budget is None else max(caller.budget - a.books.spent(caller.name), 0)
        record = Record(a.run, request, caller, wanted, left, id=asking.id)
        made = plan(request, NEVER)
        a.deciding.decide(record, made, made.subtasks[0], a.deciding.view(record), explores=False)
        return record.decisions[0]


def refusal(asking: RouteRequest, sentence: str) -> RouteDecision:
    """The decision that a request can go nowhere."""
    return RouteDecision(
        id=asking.id,
        run=asking.run,
        request_id=asking.id,
        subtask="",
        session="",
        key=asking.key,
        requested=_model(asking.body),
        kind="",
        demand="",
        pool="",
        order=[],
        reason=REFUSED,
        scores={},
        excluded={},
        features={},
        propensity=0.0,
        tolerance=0.0,
        policy="",
        shadow={},
        at_ns=time.time_ns(),
        error=sentence,
    )


def _model(body: str) -> str:
    """The model that a body asks for, as far as that can be read in a moment."""
    if len(body) > LONG_BODY:
        return ""
    try:
        model = json.loads(body)["model"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return model[:100].encode("utf-8", "replace").decode() if isinstance(model, str) else ""
