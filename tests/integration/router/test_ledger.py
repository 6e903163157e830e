"""The ledger on a real disk: exact, once per request, readable while it is written, and there after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from contracts.examples import EXAMPLES
from contracts.messages import RouteOutcome
from infra.bus import Bus
from infra.cli.main import make_app
from infra.errors import UserError
from router.ledger import report, schema
from router.ledger.store import Ledger, follow
from tests.integration.helpers import until

EXAMPLE: RouteOutcome = EXAMPLES["route_outcome"]  # type: ignore[assignment]
NOW = 1_796_000_000_000_000_000  # 2026-11-30 00:53 UTC
DAY = 86_400_000_000_000
SMALL, LARGE = (attempt.cost for attempt in EXAMPLE.attempts)


def outcome(name: str, at_ns: int = NOW, **changes: object) -> RouteOutcome:
    return msgspec.structs.replace(EXAMPLE, request_id=name, at_ns=at_ns, **changes)


def now() -> int:
    return NOW


def opened(directory: Path) -> sqlite3.Connection:
    return schema.connect(directory / schema.NAME)


def costs(directory: Path, *arguments: str, columns: int = 200) -> dict:
    """What the command writes for machines."""
    file = directory / "costs.json"
    command = ["costs", "--directory", str(directory), "--json", str(file), *arguments]
    result = CliRunner().invoke(make_app(), command, catch_exceptions=False, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return {**json.loads(file.read_text()), "shown": result.stdout}


def test_sums_by_day_key_kind_and_pool_are_exact_while_the_router_runs(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, now)
    for number in range(20):
        ledger.record(outcome(f"a{number}"))
    for number in range(3):
        ledger.record(outcome(f"b{number}", NOW - 2 * DAY, key="", kind="chat", attempts=[], cost=0, counterfactual=0))
    ledger.record(outcome("a0"))  # the same again
    try:
        connection = opened(tmp_path)
        assert _waited(lambda: report.total(connection).requests == 23)
        by_day = costs(tmp_path)
        assert [(row["name"], row["requests"]) for row in by_day["rows"]] == [("2026-11-28", 3), ("2026-11-30", 20)]
        total = by_day["total"]
        assert total["cost_picodollars"] == 20 * (SMALL + LARGE)
        assert (total["compact_tokens"], total["strong_tokens"]) == (20 * 464, 20 * 540)
        assert total["escalations"] == 20
        assert total["saved_usd"] == pytest.approx(20 * (EXAMPLE.counterfactual - EXAMPLE.cost) / 1e12)
        assert [row["name"] for row in costs(tmp_path, "--by", "key")["rows"]] == ["build-bots", ""]
        assert [row["name"] for row in costs(tmp_path, "--by", "kind")["rows"]] == ["syntax", "chat"]
        by_pool = costs(tmp_path, "--by", "pool", "--since", "2026-11-29")
        assert [(r["name"], r["requests"], r["cost_picodollars"], r["saved_usd"]) for r in by_pool["rows"]] == [
            ("large", 20, 20 * LARGE, None),
            ("small", 20, 20 * SMALL, None),
        ]
        assert "need not add up" not in by_day["shown"] and "need not add up" in by_pool["shown"]
        nothing = costs(tmp_path, "--since", "2026-12-01")
        assert nothing["total"]["requests"] == 0
        assert nothing["shown"] == "no requests since 2026-12-01\n"
        assert re.search(r"2026-11-30 +20 +9280 +10.8k +\$0\.0481 +\$0\.042 +-14\.6%", by_day["shown"])
    finally:
        ledger.close()


def test_a_key_has_spent_what_its_requests_of_this_month_cost(tmp_path: Path) -> None:
    first = Ledger(tmp_path, now)
    first.record(outcome("r1"))
    first.record(outcome("r2", key="others"))
    first.record(outcome("r3", NOW - 40 * DAY))
    assert first.spent("build-bots") == EXAMPLE.cost
    with first.reserve("build-bots", 500):
        assert first.spent("build-bots") == EXAMPLE.cost + 500
    assert first.spent("build-bots") == EXAMPLE.cost
    first.close()
    again = Ledger(tmp_path, now)
    assert [again.spent(key) for key in ("build-bots", "others", "nobody")] == [EXAMPLE.cost, EXAMPLE.cost, 0]
    again.close()
    later = Ledger(tmp_path, lambda: NOW + DAY)
    assert later.spent("build-bots") == 0  # December
    later.close()


def test_sums_may_exceed_what_sqlite_can_add(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, now)
    huge = 2**62
    attempt = msgspec.structs.replace(EXAMPLE.attempts[0], cost=huge)
    for number in range(4):
        ledger.record(outcome(f"r{number}", attempts=[attempt], cost=huge, counterfactual=huge))
    ledger.close()
    assert report.total(opened(tmp_path)).cost == 4 * huge
    again = Ledger(tmp_path, now)
    assert again.spent("build-bots") == 4 * huge
    again.close()


WRITER = """
import sys
from pathlib import Path
from tests.integration.router.test_ledger import outcome, now
from router.ledger.store import Ledger

ledger = Ledger(Path(sys.argv[1]), now)
number = 0
while True:
    ledger.record(outcome(f"r{number}"))
    number += 1
    if number % 50 == 0:
        print(number, flush=True)
        __import__("time").sleep(0.02)
"""


def test_a_kill_loses_at_most_what_was_being_committed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said: list[tuple[float, int]] = []
    for line in process.stdout:
        said.append((time.monotonic(), int(line)))
        if said[-1][0] - said[0][0] > 2.0:
            break
    os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    process.communicate()
    connection = opened(tmp_path)
    (kept,) = connection.execute("SELECT count(*) FROM requests").fetchone()
    (last,) = connection.execute("SELECT max(cast(substr(request_id, 2) AS INTEGER)) FROM requests").fetchone()
    assert kept == last + 1  # without gaps
    assert kept >= max(number for at, number in said if at < killed - 1.0)  # the last second at most
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("SELECT count(*) FROM attempts").fetchone() == (2 * kept,)  # requests are whole


async def test_what_a_killed_router_and_others_have_published_comes_in_from_the_bus(
    tmp_path: Path, bus: Bus, run: str
) -> None:
    from contracts.subjects import ROUTE_OUTCOME

    ledger = Ledger(tmp_path, now)
    ledger.record(outcome("mine"))
    for name in ("mine", "lost", "of-another-router"):
        await bus.publish(ROUTE_OUTCOME, outcome(name, run=run), id=name, run=run)
    import asyncio

    following = asyncio.create_task(follow(bus, ledger, run))
    assert await until(lambda: ledger.spent("build-bots") == 3 * EXAMPLE.cost)
    following.cancel()
    ledger.close()
    again = Ledger(tmp_path, now)
    assert again.spent("build-bots") == 3 * EXAMPLE.cost and again.position > 0
    following = asyncio.create_task(follow(bus, again, run))
    await bus.publish(ROUTE_OUTCOME, outcome("later", run=run), id="later", run=run)
    assert await until(lambda: again.spent("build-bots") == 4 * EXAMPLE.cost)
    following.cancel()
    again.close()
    assert report.total(opened(tmp_path)).requests == 4


BROKEN = {
    "not a database": lambda path: path.write_bytes(b"these are no tables" * 100),
    "of a newer version": lambda path: sqlite3.connect(path).execute("PRAGMA user_version = 9"),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:5000]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_said_in_one_sentence(tmp_path: Path, name: str) -> None:
    ledger = Ledger(tmp_path, now)
    ledger.record(outcome("r1"))
    ledger.close()
    BROKEN[name](tmp_path / schema.NAME)
    with pytest.raises(UserError, match=schema.NAME) as raised:
        Ledger(tmp_path, now)
    assert "\n" not in str(raised.value)
    result = CliRunner().invoke(make_app(), ["costs", "--directory", str(tmp_path)])
    assert isinstance(result.exception, UserError)


@pytest.mark.parametrize(("name", "widest"), [("translation", 80), ("a-team-with-a-name-of-its-own-of-forty-one", 120)])
def test_no_name_is_broken_at_80_columns(tmp_path: Path, name: str, widest: int) -> None:
    ledger = Ledger(tmp_path, now)
    dear = 10**16
    attempts = [msgspec.structs.replace(attempt, prompt_tokens=123_456_789, cost=dear) for attempt in EXAMPLE.attempts]
    ledger.record(outcome("r1", kind=name, attempts=attempts, cost=2 * dear, counterfactual=3 * dear))
    ledger.close()
    shown = costs(tmp_path, "--by", "kind", columns=80)["shown"].splitlines()
    wide = costs(tmp_path, "--by", "kind")["shown"].splitlines()
    assert [line.split() for line in shown[:3]] == [line.split() for line in wide[:3]]
    assert shown[1].startswith(name + " ") and max(map(len, shown)) <= widest


def test_costs_without_a_ledger_say_where_it_was_looked_for(tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(), ["costs", "--directory", str(tmp_path / "nowhere")])
    assert isinstance(result.exception, UserError) and "nowhere" in str(result.exception)


def test_an_outcome_that_cannot_be_stored_costs_itself_only(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, now)
    broken = msgspec.structs.replace(EXAMPLE.attempts[-1], error="half a character: \ud83d")
    ledger.record(outcome("bad", error="half a character: \ud83d"))
    ledger.record(outcome("half bad", attempts=[EXAMPLE.attempts[0], broken]))
    ledger.record(outcome("good"))
    ledger.close()
    for table in ("requests", "attempts"):
        assert opened(tmp_path).execute(f"SELECT DISTINCT request_id FROM {table}").fetchall() == [("good",)]


def _waited(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
