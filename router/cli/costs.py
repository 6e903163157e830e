"""`tailrace costs`: what requests have cost, and what they would have cost on the strongest pool."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.errors import UserError
from infra.settings import load
from router.ledger.report import By, Row
from router.prices import DOLLAR

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NOBODY = "–"


def costs(
    by: Annotated[By, typer.Option(help="What the rows are.")] = By.DAY,
    since: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="First day (UTC). Default: all there are.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.", show_default=False)
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            help="The router's folder. Default: router.directory of the run file that TAILRACE_CONFIG names.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what requests have cost, retries and failures included, and what the router has saved.

    Saved is measured against one call of the strongest pool for each request. Works while the router runs.
    """
    from router.ledger import report, schema

    path = (directory or load().section("router").directory) / schema.NAME
    first = since.strftime("%Y-%m-%d") if since else ""
    with schema.readable(path):
        connection = schema.connect(path)
        try:
            rows, total = report.costs(connection, by, first), report.total(connection, first)
        finally:
            connection.close()
    _show(rows, total, by, first)
    if json_file is not None:
        write_json(json_file, {"by": by.value, "since": first, "rows": [*map(figures, rows)], "total": figures(total)})


def figures(row: Row) -> dict[str, Any]:
    """A row for machines: exact picodollars, and dollars beside them."""
    return {
        "name": row.name,
        "requests": row.requests,
        "compact_tokens": row.compact_tokens,
        "strong_tokens": row.strong_tokens,
        "compact_share": row.compact_share,
        "escalations": row.escalations,
        "cost_picodollars": row.cost,
        "cost_usd": row.cost / DOLLAR,
        "counterfactual_usd": None if row.counterfactual is None else row.counterfactual / DOLLAR,
        "saved_usd": None if row.saved is None else row.saved / DOLLAR,
        "saved_share": row.saved_share,
    }


def write_json(path: Path, content: Any) -> None:
    """Write figures for machines. Raises `UserError` where that is not possible."""
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another --json") from None


def print_table(console: Console, table: Table) -> None:
    """Print a table whole: closer together where the console is narrow, and beyond its edge rather than cut."""
    from rich.measure import Measurement

    def needed(gap: int) -> int:
        table.padding = (0, gap, 0, 0)
        return Measurement.get(console, console.options.update(width=10_000), table).maximum

    width = console.width
    if needed(2) > width:
        console.width = max(needed(1), width)
    console.print(table, crop=False)
    console.width = width


def _show(rows: Sequence[Row], total: Row, by: By, since: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not total.requests:
        console.print(f"no requests since {since}" if since else "no requests yet")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(by.value, no_wrap=True)
    for title in ("requests", "compact", "strong", "cost", "all strong", "saved", "escalated"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    table.add_section()
    table.add_row(*_cells(total), style="bold")
    print_table(console, table)
    console.print("compact, strong: tokens in and out; all strong: cost on the strongest pool alone")
    if by is By.POOL:
        console.print("a request counts in each pool it called: rows need not add up to the total")
    if total.saved is not None and total.saved >= 0:
        console.print(f"saved {_dollars(total.saved)} of {_dollars(total.counterfactual)}")
    elif total.saved is not None:
        console.print(f"{_dollars(-total.saved)} dearer than {_dollars(total.counterfactual)} on the strongest alone")


def _cells(row: Row) -> list[str]:
    return [
        row.name or NOBODY,
        f"{row.requests:,}",
        _short(row.compact_tokens),
        _short(row.strong_tokens),
        _dollars(row.cost),
        _dollars(row.counterfactual),
        NOBODY if row.saved_share is None else f"{row.saved_share:.1%}",
        f"{row.escalations:,}",
    ]


def _short(count: int) -> str:
    """A count in at most six characters."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size * 10:
            return f"{count / size:.4g}{unit}"
    return str(count)


def _dollars(picodollars: int | None) -> str:
    """To the cent, and what is less than a dollar to three digits."""
    if picodollars is None:
        return NOBODY
    dollars = picodollars / DOLLAR
    if abs(dollars) >= 1 or not dollars:
        return f"${dollars:,.2f}"
    places = min(max(2 - math.floor(math.log10(abs(dollars))), 2), 12)
    return f"${dollars:.{places}f}".rstrip("0")
