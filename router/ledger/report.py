"""What the ledger says: sums by day, key, kind or pool, and what the monthly comparison needs. Only reads."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

# SQLite refuses sums above 2^63 - 1, which is 9.2 million dollars: in two halves they may be a million times that.
HALF = 1_000_000


class By(StrEnum):
    """What rows are made of."""

    DAY = "day"
    KEY = "key"
    KIND = "kind"
    POOL = "pool"  # of each call: what a pool was paid, whoever gave the answer in the end


@dataclass(frozen=True)
class Row:
    """One line of the table; money in picodollars."""

    name: str
    requests: int  # by pool: those that called it
    compact_tokens: int  # prompt and answer, of all calls
    strong_tokens: int
    cost: int
    counterfactual: int | None  # None by pool: a request has one, a call has none
    escalations: int

    @property
    def saved(self) -> int | None:
        """Against the strongest pool; negative where it would have been cheaper."""
        return None if self.counterfactual is None else self.counterfactual - self.cost

    @property
    def saved_share(self) -> float | None:
        """`saved` as a share of the counterfactual; None where there is none."""
        return None if self.saved is None or not self.counterfactual else self.saved / self.counterfactual

    @property
    def compact_share(self) -> float | None:
        """Share of the tokens that compact pools read and wrote; None without tokens."""
        tokens = self.compact_tokens + self.strong_tokens
        return self.compact_tokens / tokens if tokens else None


def costs(connection: sqlite3.Connection, by: By, since: str = "") -> list[Row]:
    """Rows from the day `since` (UTC, YYYY-MM-DD; empty = all) on: days in order, everything else the dearest first."""
    if by is By.POOL:
        tokens = "prompt_tokens + completion_tokens"
        query = f"""
            SELECT pool, count(DISTINCT request_id), sum(iif(tier = 'compact', {tokens}, 0)),
                   sum(iif(tier = 'compact', 0, {tokens})), {_sum("cost")}, NULL, NULL, sum(role = 'escalation')
            FROM attempts WHERE day >= ? GROUP BY pool
        """
    else:
        query = f"""
            SELECT {by.value}, count(*), sum(compact_tokens), sum(strong_tokens), {_sum("cost")},
                   {_sum("counterfactual")}, sum(escalations)
            FROM requests WHERE day >= ? GROUP BY {by.value}
        """
    rows = [_row(found) for found in connection.execute(query, (since,))]
    return sorted(rows, key=(lambda row: row.name) if by is By.DAY else (lambda row: (-row.cost, row.name)))


def total(connection: sqlite3.Connection, since: str = "") -> Row:
    """One row for all requests from the day `since` on."""
    query = f"""
        SELECT 'total', count(*), coalesce(sum(compact_tokens), 0), coalesce(sum(strong_tokens), 0), {_sum("cost")},
               {_sum("counterfactual")}, coalesce(sum(escalations), 0)
        FROM requests WHERE day >= ?
    """
    return _row(connection.execute(query, (since,)).fetchone())


def by_tier(connection: sqlite3.Connection, since: str = "") -> dict[str, tuple[int, int]]:
    """Tokens, prompt and answer, and picodollars of all calls by tier, from the day `since` on."""
    query = f"""
        SELECT iif(tier = 'compact', 'compact', 'strong'), sum(prompt_tokens + completion_tokens), {_sum("cost")}
        FROM attempts WHERE day >= ? GROUP BY 1
    """
    found = connection.execute(query, (since,))
    return {tier: (tokens, cost * HALF + rest) for tier, tokens, cost, rest in found}


def spent_by_key(connection: sqlite3.Connection, month: str) -> dict[str, int]:
    """Picodollars by key in a month (UTC, YYYY-MM)."""
    query = f"SELECT key, {_sum('cost')} FROM requests WHERE day BETWEEN ? AND ? GROUP BY key"
    return {
        key: millions * HALF + rest for key, millions, rest in connection.execute(query, (f"{month}-01", f"{month}-31"))
    }


def position(connection: sqlite3.Connection, stream: str) -> int:
    """Sequence of the last message of a stream that is in the ledger; 0 = none."""
    found = connection.execute("SELECT sequence FROM position WHERE stream = ?", (stream,)).fetchone()
    return int(found[0]) if found else 0


def _sum(column: str) -> str:
    return f"coalesce(sum({column} / {HALF}), 0), coalesce(sum({column} % {HALF}), 0)"


def _row(found: Sequence[object]) -> Row:
    name, requests, compact, strong, cost, cost_rest, other, other_rest, escalations = found
    return Row(
        name=str(name),
        requests=_int(requests),
        compact_tokens=_int(compact),
        strong_tokens=_int(strong),
        cost=_int(cost) * HALF + _int(cost_rest),
        counterfactual=None if other is None else _int(other) * HALF + _int(other_rest),
        escalations=_int(escalations),
    )


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
