"""`tailrace demo` and `tailrace run`: a whole run on this machine."""

from __future__ import annotations

from enum import StrEnum
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.interrupts import run_to_end
from infra.cli.rundir import choose, names_server, shown
from infra.runfile import to_toml
from infra.settings import load


class Preset(StrEnum):
    """The run files that come with the package."""

    SMOLLM2 = "smollm2"
    SMOLLM2_VLLM = "smollm2-vllm"
    TINY = "tiny"


RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        help="Folder of the run. One that holds a run is continued from its last checkpoint. "
        "Without this option every call starts a new run: runs/NAME, then runs/NAME-2, …",
        show_default=False,
    ),
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the settings in force and exit.")]


def demo(
    preset: Annotated[
        Preset,
        typer.Option(
            help="smollm2: a 135M language model learns quick facts; smollm2-vllm: the same, sampled by vLLM; "
            "tiny: two minutes, from scratch."
        ),
    ] = Preset.SMOLLM2,
    run_dir: RunDir = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of prompts and initial weights.", show_default=False)
    ] = None,
    print_config: PrintConfig = False,
) -> None:
    """Train a small language model on this machine and measure what it has learned.

    Starts a NATS server, a learner and generators as processes, shows their progress, and writes the figures to
    summary.json in the run's folder. Ctrl-C stops everything.
    """
    with as_file(files("infra") / "presets" / f"{preset}.toml") as file:
        _run(file, run_dir, seed, print_config, again=f"tailrace demo --preset {preset}")


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run file (TOML); --print-config shows every setting.")],
    run_dir: RunDir = None,
    print_config: PrintConfig = False,
) -> None:
    """Carry out a run described by a file.

    With nats.url in the file or TAILRACE_NATS__URL in the environment the run uses that server; otherwise it starts
    one of its own. How many processes of each service are started here is said in the table `processes`; the default is
    one learner and one generator.
    """
    _run(file, run_dir, None, print_config, again=f"tailrace run {file}")


def _run(file: Path, run_dir: Path | None, seed: int | None, print_config: bool, *, again: str) -> None:
    directory, settings = choose(load(file), run_dir, seed=seed)
    if print_config:
        typer.echo(to_toml(settings), nl=False)
        return
    from rich.console import Console  # what follows takes half a second to import

    from infra.cli.session import execute, learns

    console = Console(highlight=False)
    try:
        run_to_end(execute(settings, directory, embedded=not names_server(file), console=console))
    except typer.Exit:
        onward = f"; to go on from the last checkpoint: {again} --run-dir {shown(directory.path)}"
        console.print(f"stopped{onward if learns(settings) else ''}", soft_wrap=True)
        raise
