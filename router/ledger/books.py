"""Where everything that becomes of requests is written down: the ledger, the bus, and the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.messages import Feedback, RouteDecision, RouteOutcome
from contracts.subjects import FEEDBACK, ROUTE_DECISION, ROUTE_OUTCOME
from router import instruments
from router.ledger.spending import Reservation
from router.ledger.store import Ledger
from router.outbox import Outbox


class Books:
    """Used by the gateway; nothing here waits but `key_of`."""

    def __init__(self, ledger: Ledger, outbox: Outbox) -> None:
        self._ledger = ledger
        self._outbox = outbox

    def spent(self, key: str) -> int:
        """Picodollars that a key has spent this month (UTC), reservations included."""
        return self._ledger.spent(key)

    def key_of(self, request_id: str) -> str | None:
        """Name of the API key that a request came with; None where there was no such request. May wait for the disk."""
        return self._ledger.key_of(request_id)

    def reserve(self, key: str, amount: int) -> Reservation:
        """Set aside what a request is expected to cost (picodollars) until it is released."""
        return self._ledger.reserve(key, amount)

    def record(self, outcome: RouteOutcome, decisions: Sequence[RouteDecision]) -> None:
        """A request has ended, however it did: once per request id."""
        self._ledger.record(outcome)
        self.decided(decisions)
        self._outbox.put(ROUTE_OUTCOME, outcome, id=outcome.request_id)
        instruments.ended(outcome)

    def decided(self, decisions: Sequence[RouteDecision]) -> None:
        """Decisions that are not, or not yet, followed by an outcome."""
        for decision in decisions:
            self._outbox.put(ROUTE_DECISION, decision, id=decision.id)
            instruments.decided(decision)

    def feedback(self, feedback: Feedback) -> None:
        """What became of an answer in the world."""
        self._outbox.put(FEEDBACK, feedback, id=feedback.id)
