"""The story of a request, from top to bottom: planned, sent where each part of it is cheapest, and booked.

However it goes, whoever asked gets an answer or an `ApiError`, and every request that was let in ends in exactly one
outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from typing import Any

import structlog

from contracts.routing import Demand, Role, Status, Verdict
from router import instruments
from router.admission.keys import Caller, Keys
from router.admission.models import asked
from router.cascade.cascade import STRONG, judged, solve
from router.chat import ApiError, ChatRequest, Chunk, Reply, internal
from router.deciding import Deciding, Policies
from router.decomposition import model_made
from router.decomposition.execute import JOIN, execute
from router.decomposition.plan import Kind, Plan, Subtask
from router.decomposition.planner import plan
from router.ledger.books import Books
from router.pieces import pieces
from router.policy.cost import at_most
from router.policy.decision import Decision
from router.pools.base import PoolError
from router.pools.errors import api_error, sentence
from router.pools.relay import Relay
from router.record import Record
from router.settings import PlanSettings, RouterSettings
from router.verification.verifiers import Verifiers

log = structlog.get_logger(__name__)

NO_HEADERS: Mapping[str, str] = {}
NEVER = PlanSettings(planner="none")
GONE = "cancelled: the application went away, or the router stopped"

Choose = Callable[[str, bool], Decision]  # from the least tier and whether the answer will be checked


def _once(first: Decision, choose: Choose) -> Choose:
    """The decision that was taken already, then those that `choose` takes."""
    taken = iter([first])
    return lambda minimum, checked: next(taken, None) or choose(minimum, checked)


class Answering:
    """Answers requests, any number at once."""

    def __init__(
        self,
        run: str,
        settings: RouterSettings,
        relay: Relay,
        keys: Keys,
        books: Books,
        verifiers: Verifiers,
        policies: Policies,
    ) -> None:
        """`policies` gives the routing policy in force, and the one on trial if there is one."""
        self.run = run
        self.settings = settings
        self.relay = relay
        self.keys = keys
        self.books = books
        self.verifiers = verifiers
        self.deciding = Deciding(relay, policies, settings.exploration)

    # -- the way of a request --------------------------------------------------------------------------------------

    def begin(self, request: ChatRequest, caller: Caller, headers: Mapping[str, str] = NO_HEADERS) -> Record:
        """Let a request in. Raises `ApiError` where its model, its key's budget or its key's limits say no.

        What it returns goes into `answer` or `stream`, at once. `headers` may bear the application's trace context.
        """
        wanted = asked(request.model, self.settings.pools, caller, self.settings.tolerance)
        spent = self.books.spent(caller.name)
        left = self.keys.admit(caller, request.prompt_tokens, spent, time.monotonic(), datetime.now(UTC))
        span = instruments.request(request.model, headers)
        record = Record(self.run, request, caller, wanted, left, span=span)
        record.cached = self.deciding.view(record).cached
        return record

    async def answer(self, record: Record) -> Reply:
        """The whole answer. Raises `ApiError`; cancellation stops the pools."""
        with self._recorded(record):
            plan = await self._plan(record)
            return await self._solved(record, plan)

    async def stream(self, record: Record) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes, or in pieces once it is whole where it has several parts or is checked first.

        Raises `ApiError`, also in mid-stream; closing it stops the pools.
        """
        with self._recorded(record):
            plan = await self._plan(record)
            async with aclosing(self._streamed(record, plan)) as chunks:
                async for chunk in chunks:
                    record.begun = True
                    yield chunk

    # -- planned ---------------------------------------------------------------------------------------------------

    async def _plan(self, record: Record) -> Plan:
        """How the request is taken apart; one that names a pool is not."""
        request, settings = record.request, NEVER if record.asked.named else self.settings.plan
        found = await self._planned_by_model(record) if model_made.worth_asking(request, settings) else None
        made = found or plan(request, settings)
        record.kind, record.whole = made.subtasks[-1].kind, made.whole
        return made

    async def _planned_by_model(self, record: Record) -> Plan | None:
        """The plan of a model; None where it gave none that can be used."""
        settings = self.settings.plan
        body = model_made.ask(record.request, settings)
        planning = Subtask("plan", Kind.DESIGN, Demand.DEEP, body["messages"][-1]["content"])
        try:
            decision = self._chooser(record, Plan((planning,), "model"), planning, body)("", False)
            with record.calling():
                reply = await self.relay.complete(
                    decision.order, body, record.attempts, subtask=planning.name, role=Role.PLAN
                )
        except (ApiError, PoolError) as error:
            log.info("no model made a plan", request=record.id, reason=type(error).__name__)
            return None
        found = model_made.read(reply.text, record.request, settings)
        if isinstance(found, Plan):
            return found
        log.info("the plan of a model is not used", request=record.id, pool=reply.pool)
        return None

    # -- decided ---------------------------------------------------------------------------------------------------

    def _chooser(self, record: Record, plan: Plan, subtask: Subtask, body: Mapping[str, Any]) -> Choose:
        """What decides where a subtask goes; called again where a verifier has refused the answer."""
        view = self.deciding.view(record)

        def choose(minimum: str, checked: bool) -> Decision:
            decision = self.deciding.decide(record, plan, subtask, view, body=body, minimum=minimum, checked=checked)
            expected = record.expected[subtask.name] = decision.scores[decision.pool].cost
            # What may be spent is set aside, not what probably will: requests side by side must not share a budget.
            request, pool = record.request, self.settings.pools[decision.pool]
            most = at_most(pool, request.prompt_tokens, request.max_tokens, request.choices)
            record.reservations.append(self.books.reserve(record.caller.name, max(expected, most)))
            return decision

        return choose

    # -- done ------------------------------------------------------------------------------------------------------

    async def _solved(self, record: Record, plan: Plan) -> Reply:
        """The answer of all subtasks together; of a request as it stands, that of its only one."""

        async def solve_one(subtask: Subtask, body: dict[str, Any]) -> Reply:
            return await self._solve(record, subtask, body, self._chooser(record, plan, subtask, body))

        return await execute(
            plan,
            record.request,
            solve_one,
            settings=self.settings.plan,
            spent=lambda: record.cost,
            expected=lambda: sum(record.expected.values()),
            budget=record.budget,
        )

    async def _solve(self, record: Record, subtask: Subtask, body: dict[str, Any], choose: Choose) -> Reply:
        """The answer of one subtask, checked and escalated where it can be. Raises `ApiError`."""
        role = Role.JOIN if subtask.name == JOIN else Role.ANSWER
        with record.calling():
            try:
                return await solve(subtask, body, choose, self.relay, self.verifiers, record.attempts, role)
            except PoolError as error:
                raise api_error(error) from error
            finally:
                record.expected.pop(subtask.name, None)

    async def _streamed(self, record: Record, plan: Plan) -> AsyncGenerator[Chunk, None]:
        """The answer in pieces: as it comes where that is possible, else once it is whole.

        It must be whole where it has several parts, or where a compact pool's answer is checked before it is given.
        """
        if not plan.whole:
            async for chunk in pieces(await self._solved(record, plan)):
                yield chunk
            return
        subtask, body = plan.subtasks[0], record.request.body
        choose = self._chooser(record, plan, subtask, body)
        first = choose("", judged(subtask))
        if subtask.check is not None and self.settings.pools[first.pool].tier != STRONG:
            async for chunk in pieces(await self._solve(record, subtask, body, _once(first, choose))):
                yield chunk
            return
        with record.calling():
            try:
                async with aclosing(self.relay.stream(first.order, body, record.attempts)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except PoolError as error:
                raise api_error(error) from error

    # -- booked ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _recorded(self, record: Record) -> Iterator[None]:
        """See to it that the request ends in one outcome, and that whoever asked is told no more than an `ApiError`."""
        status, error = Status.OK, ""
        try:
            with instruments.within(record.span):
                yield
        except (asyncio.CancelledError, GeneratorExit):
            status, error = Status.CANCELLED, GONE
            raise
        except ApiError as problem:
            # What goes to the bus and into logs is said in our own words: an upstream's may repeat the prompt.
            cause = problem.__cause__
            told = sentence(cause) if isinstance(cause, PoolError) else problem.message
            status, error = Status.PARTIAL if record.begun else Status.ERROR, told
            raise
        except Exception as problem:
            status, error = Status.PARTIAL if record.begun else Status.ERROR, internal().message
            log.exception("a request met a fault of the router", request=record.id)
            raise internal() from problem
        finally:
            self._book(record, status, error)

    def _book(self, record: Record, status: Status, error: str) -> None:
        """Write down what a request cost and how it ended; nothing here waits."""
        request, now = record.request, time.monotonic()
        outcome = record.end(status, error, self.settings.pools)
        if error and status != Status.CANCELLED:
            log.warning("a request failed", request=record.id, key=record.caller.name, status=status, reason=error)
        try:
            self.books.record(outcome, record.decisions)
        except Exception:  # an answer that was paid for is given all the same
            log.exception("a request is not in the books", request=record.id)
        instruments.answered(record.span, outcome)
        for reservation in record.reservations:
            reservation.release()
        self.keys.settle(record.caller, request.prompt_tokens, record.tokens, now)
        if status == Status.OK and record.whole:
            self.deciding.affinity.used(record.conversation, outcome.pool, request.prompt_tokens, now)
        if any(attempt.verdict == Verdict.FAILED and attempt.tier != STRONG for attempt in record.attempts):
            self.deciding.affinity.escalated(record.conversation)
