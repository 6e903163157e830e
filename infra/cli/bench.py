"""`tailrace bench NAME`: the benchmarks of this package and of every installed service."""

from __future__ import annotations

import signal
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

GROUP = "tailrace.benchmarks"


class Benchmarks(TyperGroup):
    """The commands registered as entry points; each is imported only when it is named, or listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return sorted(_points())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one."""
        point = _points().get(cmd_name)
        if point is None:
            return None
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(cmd_name)(point.load())
        return typer.main.get_command(single)


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


app = typer.Typer(cls=Benchmarks, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this machine: every benchmark prints a table; --json and --plot write it to files as well."""
    from infra.telemetry import setup_logging

    # By itself SIGTERM would end this process alone, and not the ones that a benchmark has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    setup_logging("warning", {})  # between the progress lines only what a person has to know
