"""`tailrace tco`: a month on a generic fleet of accelerators against a month on this stack."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.errors import UserError
from router.cli.costs import print_table, write_json
from router.ledger import tco as comparison
from router.prices import DOLLAR

R = comparison.REFERENCE
MILLION = 1e6
GENERATING_SHARE = 0.75


def _option(text: str, default: object, **changes: Any) -> Any:
    return typer.Option(help=f"{text} Default: {default}.", show_default=False, **changes)


def tco(
    summary: Annotated[
        Path | None, _option("summary.json of a run of this stack: idle share of both sides.", "supposed idle shares")
    ] = None,
    generic_summary: Annotated[
        Path | None, _option("summary.json of a run that stands for the generic fleet, e.g. a synchronous one.", "none")
    ] = None,
    ledger: Annotated[
        Path | None, _option("The router's folder: tokens, prices and compact share.", "nothing is served")
    ] = None,
    since: Annotated[
        datetime | None, _option("First day (UTC) of the ledger that counts.", "all", formats=["%Y-%m-%d"])
    ] = None,
    hours: Annotated[float | None, _option("Hours a month.", R.hours, min=0)] = None,
    accelerators: Annotated[float | None, _option("Accelerators of the generic fleet.", R.accelerators, min=0)] = None,
    price: Annotated[float | None, _option("Dollars per accelerator and hour.", R.price, min=0)] = None,
    memory: Annotated[float | None, _option("GB of one accelerator.", R.memory_gb, min=1)] = None,
    generic_idle: Annotated[float | None, _option("Idle share there, 0..1.", R.generic.idle)] = None,
    idle: Annotated[float | None, _option("Idle share here, 0..1.", R.stack.idle)] = None,
    generic_teacher: Annotated[float | None, _option("GB of a teacher there.", R.generic.teacher_gb, min=0)] = None,
    teacher: Annotated[float | None, _option("GB of a teacher here.", R.stack.teacher_gb, min=0)] = None,
    generating_share: Annotated[
        float, _option("Share of the accelerators that generate, to weigh both sides' idle shares.", GENERATING_SHARE)
    ] = GENERATING_SHARE,
    tokens: Annotated[
        float | None, _option("Million tokens served a month.", "all in the ledger, taken for a month's", min=0)
    ] = None,
    compact_share: Annotated[float | None, _option("Of the tokens, 0..1.", "of the ledger", min=0, max=1)] = None,
    compact_price: Annotated[float | None, _option("Dollars per million there.", "of the ledger", min=0)] = None,
    other_price: Annotated[float | None, _option("Of the tokens elsewhere here.", "of the ledger", min=0)] = None,
    strong_price: Annotated[
        float | None, _option("Of a token on the strongest pool.", "of the ledger's counterfactual", min=0)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.", show_default=False)
    ] = None,
) -> None:
    """Compare a month of a generic accelerator fleet with one of this stack, for the same work.

    Beside it stands the reference scenario, alone while nothing is measured or given. What is not measured (from a
    run's summary.json and the router's ledger) or given by an option is supposed as in the reference scenario; every
    row says where its figure is from.
    """
    if not 0 <= generating_share <= 1:
        raise UserError(f"--generating-share {generating_share:g}: give a share from 0 to 1")
    for option, share in (("--generic-idle", generic_idle), ("--idle", idle)):
        if share is not None and not 0 <= share < 1:
            raise UserError(f"{option} {share:g}: give a share from 0 to 1, less than 1")
    said = _Said()
    run_idle = _idle(summary, generating_share)
    other_idle = _idle(generic_summary, generating_share)
    served = _served(ledger, since.strftime("%Y-%m-%d") if since else "") if ledger else {}
    generic = comparison.Fleet(
        idle=said.value("generic.idle", generic_idle, other_idle, R.generic.idle),
        teacher_gb=said.value("generic.teacher_gb", generic_teacher, None, R.generic.teacher_gb),
    )
    stack = comparison.Fleet(
        idle=said.value("stack.idle", idle, run_idle, R.stack.idle),
        teacher_gb=said.value("stack.teacher_gb", teacher, None, R.stack.teacher_gb),
    )
    strong = said.value("serving.strong_price", strong_price, served.get("strong_price"), 0.0)
    serving = comparison.Serving(
        millions=said.value("serving.millions", tokens, served.get("millions"), 0.0),
        strong_price=strong,
        compact_share=said.value("serving.compact_share", compact_share, served.get("compact_share"), 0.0),
        compact_price=said.value("serving.compact_price", compact_price, served.get("compact_price"), 0.0),
        other_price=said.value("serving.other_price", other_price, served.get("other_price"), strong),
    )
    scenario = comparison.Scenario(
        name="yours",
        hours=said.value("hours", hours, None, R.hours),
        accelerators=said.value("accelerators", accelerators, None, R.accelerators),
        price=said.value("price", price, None, R.price),
        memory_gb=said.value("memory_gb", memory, None, R.memory_gb),
        generic=generic,
        stack=stack,
        serving=serving,
    )
    try:
        both = comparison.compare(R), comparison.compare(scenario)
    except ValueError as error:
        raise UserError(f"tco: {error}; correct the options") from None
    _show(*both, said)
    if json_file is not None:
        write_json(
            json_file,
            {
                "given": comparison.REFERENCE_GIVEN,
                "reference": figures(both[0]),
                "yours": figures(both[1]) | {"sources": said.sources},
            },
        )


def figures(compared: comparison.Comparison) -> dict[str, Any]:
    """A comparison for machines; dollars a month, hours a month."""
    return {
        "assumptions": asdict(compared.scenario),
        "generic": asdict(compared.generic) | {"total": compared.generic.total},
        "stack": asdict(compared.stack) | {"total": compared.stack.total},
        "saved": compared.saved,
        "saved_share": compared.saved_share,
    }


class _Said:
    """Takes each assumption from where it is said best, and remembers where that was."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}

    @property
    def anything(self) -> bool:
        """Whether any assumption is measured or given."""
        return any(source != "supposed" for source in self.sources.values())

    def value(self, name: str, option: float | None, measured: float | None, supposed: float) -> float:
        """The option, else what was measured, else what is supposed."""
        for value, source in ((option, "option"), (measured, "measured")):
            if value is not None:
                self.sources[name] = source
                return value
        self.sources[name] = "supposed"
        return supposed


def _idle(file: Path | None, generating_share: float) -> float | None:
    if file is None:
        return None
    try:
        return comparison.idle_of(json.loads(file.read_text()), generating_share)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: {error}; give the summary.json of a finished run") from None


def _served(directory: Path, since: str) -> dict[str, float]:
    from router.ledger import report, schema

    path = directory / schema.NAME
    with schema.readable(path):
        connection = schema.connect(path, option="--ledger")
        try:
            tiers, total = report.by_tier(connection, since), report.total(connection, since)
        finally:
            connection.close()
    compact, compact_cost = tiers.get("compact", (0, 0))
    other, other_cost = tiers.get("strong", (0, 0))
    if not (everything := compact + other):
        raise UserError(f"ledger {path}: no token has been served; give another --ledger, --since, or none")

    def price(picodollars: int, tokens: int) -> float:
        return picodollars / DOLLAR / tokens * MILLION if tokens else 0.0

    return {
        "millions": everything / MILLION,
        "strong_price": price(total.counterfactual or 0, everything),
        "compact_share": compact / everything,
        "compact_price": price(compact_cost, compact),
        "other_price": price(other_cost, other),
    }


def _show(reference: comparison.Comparison, yours: comparison.Comparison, said: _Said) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    shown = {"reference": reference, "yours": yours} if said.anything else {"reference": reference}
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("\na month", no_wrap=True)
    for name in shown:
        table.add_column(f"{name}:\ngeneric", justify="right", no_wrap=True)
        table.add_column("\nstack", justify="right", no_wrap=True)
    if said.anything:
        table.add_column("\nyours is", no_wrap=True)

    def row(title: str, show: Any, *names: str) -> None:
        cells = [
            show(compared.scenario, getattr(compared.scenario, side), getattr(compared, side))
            for compared in shown.values()
            for side in ("generic", "stack")
        ]
        sources = [" / ".join(dict.fromkeys(said.sources[name] for name in names))] if said.anything else []
        table.add_row(title, *cells, *sources)

    row("hours", lambda s, f, m: f"{s.hours:,.0f}", "hours")
    row("$ an hour of one", lambda s, f, m: f"{s.price:.2f}", "price")
    row("GB of one", lambda s, f, m: f"{s.memory_gb:.0f}", "memory_gb")
    row("idle", lambda s, f, m: f"{f.idle:.1%}", "generic.idle", "stack.idle")
    row("teacher, GB", lambda s, f, m: f"{f.teacher_gb:.0f}", "generic.teacher_gb", "stack.teacher_gb")
    row("accelerators", lambda s, f, m: f"{m.accelerators:.2f}", "accelerators")
    row("idle hours", lambda s, f, m: f"{m.idle_hours:,.0f}")
    row("teacher's hours", lambda s, f, m: f"{m.teacher_hours:,.0f}")
    row("training", lambda s, f, m: f"${m.training:,.0f}")
    if any(compared.scenario.serving.millions for compared in shown.values()):
        row("million tokens", lambda s, f, m: f"{s.serving.millions:,.3f}", "serving.millions")
        row(
            "compact",
            lambda s, f, m: f"{s.serving.compact_share if f is s.stack else 0.0:.1%}",
            "serving.compact_share",
        )
        row("serving", lambda s, f, m: f"${m.serving:,.2f}", "serving.strong_price", "serving.compact_price")
    table.add_section()
    row("total", lambda s, f, m: f"${m.total:,.0f}")
    print_table(console, table)
    for name, compared in shown.items():
        dollars = f"${abs(compared.saved):,.0f}"
        change = f"saves {dollars}" if round(compared.saved) >= 0 else f"costs {dollars} more"
        console.print(f"{name}: this stack {change} a month, {abs(compared.saved_share):.1%}")
    if not said.anything:
        console.print("Your figures: --summary, --ledger, --accelerators, --price; more in --help.")
    console.print(f"The reference scenario gives: {comparison.REFERENCE_GIVEN}.")
    console.print(
        f"Supposed so that this comes out: {R.accelerators:g} accelerators of {R.memory_gb:g} GB at ${R.price:g}/h, "
        f"the middle of both ranges ({R.generic.idle:.1%}, {R.generic.teacher_gb:g} GB), {R.stack.idle:.0%} idle here."
    )
