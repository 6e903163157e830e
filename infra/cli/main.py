"""`tailrace`: the command line. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import typer

from infra.cli import bench, contracts
from infra.cli.bootstrap import bootstrap
from infra.cli.promote import promote
from infra.cli.run import demo, run
from infra.cli.status import status
from infra.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def make_app() -> typer.Typer:
    """The commands of this package and those that services register as entry points `tailrace.commands`."""
    app = typer.Typer(
        name="tailrace",
        help="Asynchronous reinforcement learning of language models on your own machines.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in (demo, run, status, promote, bootstrap):
        app.command()(command)
    app.add_typer(contracts.app, name="contracts")
    app.add_typer(bench.app, name="bench")
    for point in sorted(entry_points(group="tailrace.commands"), key=lambda point: point.name):
        command = point.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=point.name)
        else:
            app.command(point.name)(command)
    return app


def main() -> None:
    """Run the command line. Exit codes: 0 done, 2 an error that a person can act on, 130 after Ctrl-C."""
    try:
        make_app()()
    except UserError as error:
        print(f"tailrace: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
