"""What every benchmark ends with: figures as JSON, a table to read, a chart to look at."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.errors import UserError


def _writable(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before the measuring, not after it."""
    if path is None:
        return None
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK) or path.is_dir():
        raise UserError(f"{path} cannot be written; name a file in a folder that exists and is writable")
    return path


def _drawable(path: Path | None) -> Path | None:
    if path is not None:
        if path.suffix not in (".svg", ".png"):
            raise UserError(f"{path}: a plot is written as .svg or .png; change the name's ending")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise UserError("--plot needs matplotlib; run `pip install -e '.[bench]'`") from None
    return _writable(path)


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the figures to this file.", callback=_writable),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Also draw them into this file, .svg or .png.", callback=_drawable),
]


@dataclass(frozen=True)
class Chart:
    """One picture. `series` maps a name to its y values over the common `x`; numbers make lines, texts make bars."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float] | Sequence[str]
    series: Mapping[str, Sequence[float | None]]  # None: not measured


@dataclass(frozen=True)
class Report:
    """What a benchmark found."""

    figures: Mapping[str, Any]  # JSON-able; the names are part of the command's interface
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]  # one sentence each: how to read it, which target it has and whether that was met
    chart: Chart


def progress(sentence: str) -> None:
    """Tell what is being measured now."""
    print(sentence, file=sys.stderr, flush=True)


def publish(report: Report, *, json_file: Path | None, plot_file: Path | None) -> None:
    """Print the table, in a form that is also Markdown, and write the files that were asked for."""
    print("\n" + "\n".join(table(report.columns, report.rows)) + "\n")
    for note in report.notes:
        print(note)
    if json_file is not None:
        json_file.write_text(json.dumps(report.figures, indent=2) + "\n")
    if plot_file is not None:
        draw(report.chart, plot_file)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of an aligned Markdown table; every column but the first is right-aligned."""
    cells = [list(columns), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(row: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    return [line(cells[0]), line(rule), *map(line, cells[1:])]


def points(chart: Chart, name: str) -> list[tuple[Any, float]]:
    """The (x, y) of a series where it was measured."""
    return [(x, y) for x, y in zip(chart.x, chart.series[name], strict=True) if y is not None]


def draw(chart: Chart, file: Path) -> None:
    """Lines over numbers, grouped bars over texts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if all(isinstance(x, str) for x in chart.x):
        width = 0.8 / len(chart.series)
        for number, (name, values) in enumerate(chart.series.items()):
            places = [place + (number - (len(chart.series) - 1) / 2) * width for place in range(len(chart.x))]
            axes.bar(places, [value or 0.0 for value in values], width, label=name)
        axes.set_xticks(range(len(chart.x)), [str(x) for x in chart.x])
    else:
        for name in chart.series:
            axes.plot(*zip(*points(chart, name), strict=True), marker="o", label=name)
        axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_ylim(bottom=0)
    axes.set_title(chart.title)
    axes.grid(axis="y", alpha=0.3)
    if len(chart.series) > 1:
        axes.legend()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
