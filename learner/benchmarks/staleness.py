"""`tailrace bench staleness`: what learning from old data costs each objective.

The tiny model learns to reverse six letters from rollouts that are exactly k versions old. What staleness costs is
speed: decoupled PPO at lag 4 learns as on-policy does, some steps later, and PPO around the behaviour policy would need
several times the steps. Single seeds scatter: a policy that never found one of the ten letters has an exact match of
.53. So compare rewards, over several seeds.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from statistics import fmean
from typing import Annotated, TypedDict

import typer

from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, progress, publish
from infra.errors import UserError
from learner.settings import ObjectiveSettings

# A narrow clip range makes it the range, not the learning rate, that limits a step: a policy held near one k versions
# old then moves k + 1 times more slowly. CISPO's weights are free below, as in its paper.
CLIP = {"eps_clip": 0.1, "eps_clip_high": 0.2}
OBJECTIVES = {
    "decoupled_ppo": ObjectiveSettings(name="decoupled_ppo", **CLIP),
    "tis": ObjectiveSettings(name="tis", **CLIP),
    "cispo": ObjectiveSettings(name="cispo", eps_clip=1.0, eps_clip_high=1.0),
    "ppo": ObjectiveSettings(name="ppo", **CLIP),
    "gspo": ObjectiveSettings(name="gspo", aggregation="sequence_mean", **CLIP),
    "reinforce": ObjectiveSettings(name="reinforce"),
}
LAGS = [0, 1, 4, 8, 16]
LAST = 5  # steps at the end whose mean is the reward of a run
GOAL = 0.8  # reward that learning is timed to
Cell = tuple[str, int]  # objective, lag
Curve = tuple[list[float], float]  # mean training reward of every step, greedy exact match at the end


class Figures(TypedDict):
    """One cell of the table, over the seeds."""

    exact_match: float  # share of held-out prompts with every letter right, sampled greedily
    reward: float  # share of right letters in training, last steps
    steps_to_goal: int | None  # until the mean reward of the seeds is GOAL


def summarise(curves: Sequence[Curve]) -> Figures:
    """Means over the runs of a cell."""
    rewards = [fmean(step) for step in zip(*(curve for curve, _ in curves), strict=True)]
    return {
        "exact_match": fmean(exact for _, exact in curves),
        "reward": fmean(rewards[-LAST:]),
        "steps_to_goal": next((step for step, reward in enumerate(rewards, 1) if reward >= GOAL), None),
    }


def train(objective: str, lag: int, seed: int, steps: int, learning_rate: float) -> Curve:
    """One run, in a process of its own."""
    import torch  # heavy, and the command line lists this module

    from learner.benchmarks import lagged

    torch.set_num_threads(1)
    return lagged.run(OBJECTIVES[objective], lag, seed, steps, learning_rate)


def measure(
    cells: Sequence[Cell], seeds: Sequence[int], steps: int, learning_rate: float, jobs: int
) -> dict[Cell, Figures]:
    """Train every cell with every seed, `jobs` runs at a time."""
    curves: dict[Cell, list[Curve]] = {cell: [] for cell in cells}
    found: dict[Cell, Figures] = {}
    started = time.monotonic()
    # A fresh interpreter each: a forked one would share torch's threads, which a fork does not copy.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = {pool.submit(train, *cell, seed, steps, learning_rate): cell for cell in cells for seed in seeds}
        try:
            for run in as_completed(runs):
                cell = runs[run]
                curves[cell].append(run.result())
                if len(curves[cell]) == len(seeds):
                    found[cell] = summarise(curves[cell])
                    progress(
                        f"{cell[0]} at lag {cell[1]}: {shown(found[cell])}; "
                        f"{len(found)} of {len(cells)} after {time.monotonic() - started:.0f} s"
                    )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def shown(figures: Figures) -> str:
    """Exact match / reward / steps to the goal."""
    return f"{figures['exact_match']:.2f} / {figures['reward']:.2f} / {figures['steps_to_goal'] or '-'}"


def report_of(found: Mapping[Cell, Figures], objectives: Sequence[str], lags: Sequence[int], steps: int) -> Report:
    """The table of objectives by lags."""
    return Report(
        figures={name: {str(lag): found[name, lag] for lag in lags} for name in objectives},
        columns=["objective", *(f"lag {lag}" for lag in lags)],
        rows=[[name, *(shown(found[name, lag]) for lag in lags)] for name in objectives],
        notes=[
            f"Greedy exact match / training reward of the last {LAST} steps / steps to a reward of {GOAL:g}; "
            f"- where {steps} steps were not enough.",
        ],
        chart=Chart(
            title=f"Reward after {steps} steps by the age of the data",
            x_label="lag, versions",
            y_label="share of right letters",
            x=list(lags),
            series={name: [found[name, lag]["reward"] for lag in lags] for name in objectives},
        ),
    )


def staleness_benchmark(
    objectives: Annotated[
        list[str] | None, typer.Option("--objective", help=f"One of {', '.join(OBJECTIVES)}; repeatable. Default: all.")
    ] = None,
    lags: Annotated[
        list[int] | None,
        typer.Option("--lag", min=0, help="Age of the data, versions; repeatable. Default: 0 1 4 8 16."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each pair of objective and lag.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run.")] = 60,
    learning_rate: Annotated[float, typer.Option(min=1e-8, help="Of AdamW.")] = 2e-3,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time. Default: one per core.", show_default=False)] = (
        os.cpu_count() or 1
    ),
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Reward after a fixed number of steps on data that are k versions old, per objective.

    All of it takes some ten minutes of one core.
    """
    names = objectives or list(OBJECTIVES)
    ages = lags or LAGS
    if unknown := [name for name in names if name not in OBJECTIVES]:
        raise UserError(f"objective {unknown[0]!r}: there is none of this name; known are {', '.join(OBJECTIVES)}")
    cells = [(name, lag) for name in dict.fromkeys(names) for lag in dict.fromkeys(ages)]
    progress(f"{len(cells) * seeds} runs of {steps} steps, {jobs} at a time; exact match / reward / steps to {GOAL:g}")
    found = measure(cells, range(first_seed, first_seed + seeds), steps, learning_rate, jobs)
    publish(
        report_of(found, list(dict.fromkeys(names)), list(dict.fromkeys(ages)), steps),
        json_file=json_file,
        plot_file=plot_file,
    )
