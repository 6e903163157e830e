"""The ledger: every request of a router on disk, and what each key has spent in memory.

Recording never waits: a thread of its own commits what has come together. Outcomes are also published, and `follow`
reads them back: so whatever a killed process had not committed yet comes in again, and several routers of one run know
what a key has spent on all of them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from contracts.messages import RouteOutcome
from contracts.subjects import ROUTE_OUTCOME
from infra.bus import Bus
from router.ledger import report, schema
from router.ledger.spending import Reservation, Spending, month_of

log = structlog.get_logger(__name__)

QUEUE = 20_000  # outcomes that wait for the disk
BATCH = 512
BATCH_SECONDS = 0.2  # how long one that came alone waits for company
RETRY_SECONDS = 1.0  # after the disk refused a batch
CLOSE_SECONDS = 10.0
FULL_SECONDS = 0.1  # before an outcome from the bus is offered again


@dataclass(frozen=True)
class _Entry:
    outcome: RouteOutcome
    sequence: int  # in the ROUTES stream; 0 = recorded here


class Ledger:
    """One router's ledger; used by one thread. `clock` gives unix ns."""

    def __init__(self, directory: Path, clock: Callable[[], int] = time.time_ns) -> None:
        """Open or make `directory`/ledger.sqlite. Raises `UserError` where it cannot be used."""
        self.path = directory / schema.NAME
        self._connection = schema.connect(self.path, write=True)
        self._spending = Spending(clock)
        now = clock()
        with schema.readable(self.path):
            for key, spent in report.spent_by_key(self._connection, month_of(now)).items():
                self._spending.add(key, spent, now)
            self.position = report.position(self._connection, ROUTE_OUTCOME.stream)
        self.lost = 0  # outcomes that found the queue full, because the disk takes nothing
        self.trouble = ""  # why the disk takes nothing; empty when it does
        self._queue: queue.Queue[_Entry | None] = queue.Queue(QUEUE)
        self._recent: dict[str, str] = {}  # request id -> key, of the last requests, which may not be on disk yet
        self._elsewhere: deque[RouteOutcome] = deque()  # added to the file from the bus, not yet to what was spent
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def record(self, outcome: RouteOutcome) -> None:
        """Count an outcome at once and store it soon, once per request id; never waits."""
        try:
            self._queue.put_nowait(_Entry(outcome, 0))
        except queue.Full:  # not counted either: it is when it comes back from the bus
            self.lost += 1
            if self.lost & (self.lost - 1) == 0:
                log.error("the ledger is behind, an outcome is not in it", lost=self.lost, trouble=self.trouble)
            return
        self._spending.add(outcome.key, outcome.cost, outcome.at_ns)
        self._recent[outcome.request_id] = outcome.key
        if len(self._recent) > QUEUE:
            del self._recent[next(iter(self._recent))]

    def heard(self, outcome: RouteOutcome, sequence: int) -> bool:
        """Store an outcome from the bus unless it is known; False when there is no room now."""
        with suppress(queue.Full):
            self._queue.put_nowait(_Entry(outcome, sequence))
            return True
        return False

    def spent(self, key: str) -> int:
        """Picodollars that a key has spent this month (UTC), and that are set aside for its requests under way."""
        while self._elsewhere:
            outcome = self._elsewhere.popleft()
            self._spending.add(outcome.key, outcome.cost, outcome.at_ns)
        return self._spending.spent(key)

    def key_of(self, request_id: str) -> str | None:
        """Name of the API key that a request came with; None where there was no such request. May wait for the disk."""
        if (key := self._recent.get(request_id)) is not None:
            return key
        with closing(schema.connect(self.path)) as connection:
            found = connection.execute("SELECT key FROM requests WHERE request_id = ?", (request_id,)).fetchone()
        return None if found is None else str(found[0])

    def reserve(self, key: str, amount: int) -> Reservation:
        """Set aside what a request is expected to cost until it is released, so that parallel ones do not overshoot."""
        return self._spending.reserve(key, amount)

    def close(self) -> None:
        """Commit what is left, in bounded time."""
        self._closing.set()
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._connection.close()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            batch = self._batch()
            while batch:
                try:
                    self._commit(batch)
                    self.trouble = ""
                    break
                except Exception as error:  # a full disk above all; the thread must outlive whatever it is
                    if not self.trouble:
                        log.exception("the ledger cannot be written", path=str(self.path))
                    self.trouble = str(error) or type(error).__name__
                    if self._closing.wait(RETRY_SECONDS):
                        log.error("outcomes are not in the ledger", outcomes=len(batch), error=str(error))
                        return
            if self._closing.is_set() and self._queue.empty():
                return

    def _batch(self) -> list[_Entry]:
        """The next outcomes, waiting for the first without end and for more a moment; empty when it is time to stop."""
        batch: list[_Entry] = []
        deadline: float | None = None
        while len(batch) < BATCH:
            try:
                entry = self._queue.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                break
            if entry is None:
                break
            batch.append(entry)
            deadline = deadline or time.monotonic() + BATCH_SECONDS
        return batch

    def _commit(self, batch: list[_Entry]) -> None:
        added: list[RouteOutcome] = []
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for entry in batch:
                self._connection.execute("SAVEPOINT entry")
                try:
                    new = schema.insert(self._connection, entry.outcome)
                except (UnicodeError, OverflowError) as error:  # says something about this one alone
                    self._connection.execute("ROLLBACK TO entry")
                    log.error("an outcome is not in the ledger", request=entry.outcome.request_id, error=str(error))
                    continue
                self._connection.execute("RELEASE entry")
                if new and entry.sequence:
                    added.append(entry.outcome)
            position = max(entry.sequence for entry in batch)
            if position:
                statement = "INSERT OR REPLACE INTO position VALUES (?, ?)"
                self._connection.execute(statement, (ROUTE_OUTCOME.stream, position))
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._elsewhere.extend(added)


async def follow(bus: Bus, ledger: Ledger, run: str) -> None:
    """Take the run's outcomes from the bus into the ledger, without end, beginning behind those it has heard."""
    info = await bus.stream_info(ROUTE_OUTCOME.stream)
    # Behind the stream's end: the server has been set up anew, and counts from 1.
    start = ledger.position + 1 if 0 < ledger.position <= info.state.last_seq else None
    async with aclosing(bus.read(ROUTE_OUTCOME, kind=RouteOutcome, start=start, consumer="ledger", run=run)) as heard:
        async for received in heard:
            while not ledger.heard(received.message, received.sequence):  # noqa: ASYNC110  # a thread makes room
                await asyncio.sleep(FULL_SECONDS)
