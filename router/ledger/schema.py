"""The ledger's tables, and the one way in which a file is opened.

`requests` has a row per request, `attempts` a row per call. Money is in picodollars, times are unix ns, days are UTC.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contracts.routing import Attempt, Role, RouteOutcome
from infra.errors import UserError
from router.ledger.spending import day_of

NAME = "ledger.sqlite"
VERSION = 1
BUSY_SECONDS = 5.0

TABLES = """
CREATE TABLE requests (
    request_id TEXT PRIMARY KEY,
    at_ns INTEGER NOT NULL,
    day TEXT NOT NULL,
    key TEXT NOT NULL,
    session TEXT NOT NULL,
    requested TEXT NOT NULL,
    kind TEXT NOT NULL,
    pool TEXT NOT NULL,
    status TEXT NOT NULL,
    cost INTEGER NOT NULL,
    counterfactual INTEGER NOT NULL,
    compact_tokens INTEGER NOT NULL,
    strong_tokens INTEGER NOT NULL,
    escalations INTEGER NOT NULL,
    seconds REAL NOT NULL,
    overhead_seconds REAL NOT NULL,
    error TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX requests_by_day ON requests (day, key, cost);
CREATE TABLE attempts (
    request_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    day TEXT NOT NULL,
    subtask TEXT NOT NULL,
    pool TEXT NOT NULL,
    model TEXT NOT NULL,
    role TEXT NOT NULL,
    status TEXT NOT NULL,
    verdict TEXT NOT NULL,
    tier TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cost INTEGER NOT NULL,
    estimated INTEGER NOT NULL,
    seconds REAL NOT NULL,
    first_token_seconds REAL NOT NULL,
    error TEXT NOT NULL,
    PRIMARY KEY (request_id, number)
) WITHOUT ROWID;
CREATE INDEX attempts_by_day ON attempts (day, pool);
CREATE TABLE position (stream TEXT PRIMARY KEY, sequence INTEGER NOT NULL);
"""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Say in one sentence what is wrong with a file that is no ledger, or is broken. Raises `UserError`."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise UserError(
            f"ledger {path}: {error}; move the file away (the router makes a new one), or restore it from a copy"
        ) from None


def connect(path: Path, *, write: bool = False, option: str = "--directory") -> sqlite3.Connection:
    """Open a ledger; to write, it is made where there is none. `option` is the command's that names its folder.

    WAL: readers and one writer do not wait for each other, and what was committed survives the end of the process.
    Raises `UserError` where the file is missing, broken, of another program or of a newer version.
    """
    if not write and not path.is_file():
        raise UserError(f"there is no ledger {path}; start the router first, or name its folder with {option}")
    try:
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
        # autocommit: transactions are begun and ended by name
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.OperationalError) as error:
        raise UserError(f"ledger {path}: {error}; choose another router.directory") from None
    with readable(path):
        if write:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if write and version == 0 and tables == 0:
            connection.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT")
            version = VERSION
    if version != VERSION:
        connection.close()
        raise UserError(f"ledger {path} has version {version}, this program reads version {VERSION}; use the right one")
    return connection


def insert(connection: sqlite3.Connection, outcome: RouteOutcome) -> bool:
    """Add a request with its attempts; False where it is there already."""
    day = day_of(outcome.at_ns)
    tokens = {"compact": 0, "strong": 0}
    for attempt in outcome.attempts:
        tokens["compact" if attempt.tier == "compact" else "strong"] += (
            attempt.prompt_tokens + attempt.completion_tokens
        )
    row = (
        outcome.request_id, outcome.at_ns, day, outcome.key, outcome.session, outcome.requested, outcome.kind,
        outcome.pool, outcome.status, outcome.cost, outcome.counterfactual, tokens["compact"], tokens["strong"],
        sum(attempt.role == Role.ESCALATION for attempt in outcome.attempts), outcome.seconds,
        outcome.overhead_seconds, outcome.error,
    )  # fmt: skip
    added = connection.execute(f"INSERT OR IGNORE INTO requests VALUES ({_marks(row)})", row).rowcount == 1
    if added:
        rows = [_attempt(outcome.request_id, number, day, each) for number, each in enumerate(outcome.attempts)]
        if rows:
            connection.executemany(f"INSERT INTO attempts VALUES ({_marks(rows[0])})", rows)
    return added


def _attempt(request_id: str, number: int, day: str, attempt: Attempt) -> tuple[str | int | float, ...]:
    return (
        request_id, number, day, attempt.subtask, attempt.pool, attempt.model, attempt.role, attempt.status,
        attempt.verdict, attempt.tier, attempt.prompt_tokens, attempt.cached_tokens, attempt.completion_tokens,
        attempt.cost, attempt.estimated, attempt.seconds, attempt.first_token_seconds, attempt.error,
    )  # fmt: skip


def _marks(row: tuple[object, ...]) -> str:
    return ", ".join("?" * len(row))
