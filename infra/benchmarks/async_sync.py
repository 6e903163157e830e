"""`tailrace bench async-sync`: how long each side waits for the other, and what that costs, with and without a barrier.

The same code, machine, model, tasks and seeds, in turn: asynchronous with staleness up to 4, synchronous with staleness
0. Every rollout waits for a simulated tool between sampling and scoring. A server, a learner and a generator run as
processes; the figures come from their records on the bus, as those of every run do.

Two kinds of runs. How the sides spend their time is measured under a steady load, where a step costs the same from the
first to the last: with next to no learning rate. What is learned is measured by learning, where it does not: groups of
equal rewards, few in the middle of the way and most at its end, cost the learner nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from contracts import subjects
from contracts.messages import GeneratorReport
from infra.benchmarks.cluster import Cluster, Value, cluster
from infra.benchmarks.pairs import (
    WARM_UP,
    Measured,
    Pair,
    learning_of,
    load_of,
    measured,
)
from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, progress, publish
from infra.cli.interrupts import run_to_end

SIGMAS = (0.5, 1.0)
STALENESS = 4
GROUPS, GROUP = 32, 8
BATCH = GROUPS * GROUP
WIDTH = 384  # of the model: computing outweighs what a rollout costs besides
SLOTS = (256, 128, 88, 64)  # a batch in one to four rounds, which cost more and more
CALIBRATION_STEPS = WARM_UP + 15
LOAD_STEPS = WARM_UP + 40  # a batch more or less under way at the end counts little then
LEARNING_SIGMA = 1.0  # of the tool in runs that learn
RUN_SECONDS = 240.0  # longest time for one run

SETTINGS: dict[str, Value] = {
    "service.heartbeat_seconds": 0.5,
    "learner.groups_per_step": GROUPS,
    "learner.group_size": GROUP,
    "learner.minibatches": 1,
    "learner.precision": "fp32",
    "learner.token_budget": 16384,
    "learner.objective.eps_clip": 0.1,
    "learner.optimizer.beta2": 0.999,
    "learner.sampling.max_tokens": 6,
    "learner.sampling.stop": [],
    "generator.precision": "fp32",
}
STEADY: dict[str, Value] = {"learner.optimizer.learning_rate": 1e-9}
LEARNING: dict[str, Value] = {"learner.optimizer.learning_rate": 1e-4}


def threads(count: int) -> dict[str, Value]:
    """Both sides compute with so many threads."""
    return {"learner.threads": count, "generator.threads": count}


# Each side has a core of its own; or they alternate, so that both could use both, and a batch is sampled as one.
ASYNCHRONOUS: dict[str, Value] = {"learner.max_staleness": STALENESS, **threads(1)}
SYNCHRONOUS: dict[str, Value] = {"learner.max_staleness": 0, "generator.max_requests": BATCH}


class Bench:
    """Runs on one server, with models made for them."""

    def __init__(self, machine: Cluster, tool_seconds: float) -> None:
        self.machine = machine
        self.tool_seconds = tool_seconds
        self.runs = 0

    async def run(self, what: str, settings: Mapping[str, Value], *, sigma: float, seed: int, steps: int) -> Measured:
        """One run from its first task to the end of step `steps`."""
        self.runs += 1
        mode = {
            **SETTINGS,
            **settings,
            "run.environment": f"tools:{self.tool_seconds:g}:{sigma:g}:reverse-text",
            "run.seed": seed,
            "learner.model": self._model(seed),
            # A run goes on without end here: its last steps, for which no task is published any more, are left out.
            "learner.steps": steps + STALENESS + 2,
        }
        async with self.machine.run(f"bench-{self.runs}", mode) as run:
            await run.until_step(steps, limit=RUN_SECONDS)
            summary = await run.summary()
            reports = await run.records(subjects.GENERATOR, GeneratorReport)
            result = measured(summary, (await run.steps())[:steps], reports)
        progress(
            f"{what}: {result.steps} steps in {result.seconds:.1f} s, idle learner {result.learner_idle_ratio:.1%} "
            f"generator {result.generator_idle_ratio:.1%}, computing per step {result.learner_step_seconds:.2f} and "
            f"{result.generator_step_seconds:.2f} s"
        )
        return result

    def _model(self, seed: int) -> Path:
        from infra import models  # heavy, and not needed for help

        folder = self.machine.directory / f"model-{seed}"
        if not folder.is_dir():
            models.make_tiny(folder, seed, width=WIDTH)
        return folder

    async def balance(self) -> dict[str, Any]:
        """How many completions to sample at once so that both sides compute for as long, and synchronous threads."""
        costs = {}  # in seconds of the learner beside it: what else the machine does slows both
        for slots in SLOTS:
            what = f"balancing, {slots} slots"
            run = await self._short(what, {**ASYNCHRONOUS, "generator.max_requests": slots})
            costs[slots] = run.generator_step_seconds / run.learner_step_seconds
        slots = min(costs, key=lambda each: abs(math.log(costs[each])))
        rates = {
            count: (await self._short(f"synchronous, {count} threads", {**SYNCHRONOUS, **threads(count)})).throughput
            for count in (1, 2)
        }
        return {
            "generator_over_learner_seconds_by_slots": costs,
            "slots": slots,
            "sync_rollouts_per_second_by_threads": rates,
            "sync_threads": max(rates, key=lambda count: rates[count]),
        }

    async def _short(self, what: str, settings: Mapping[str, Value]) -> Measured:
        return await self.run(what, {**STEADY, **settings}, sigma=SIGMAS[0], seed=1, steps=CALIBRATION_STEPS)

    async def pair(self, modes: Mapping[str, Mapping[str, Value]], *, sigma: float, seed: int, steps: int) -> Pair:
        """An asynchronous and a synchronous run, one after the other."""
        free, barred = [
            await self.run(f"σ {sigma:g}, seed {seed}, {name}", settings, sigma=sigma, seed=seed, steps=steps)
            for name, settings in modes.items()
        ]
        return Pair(sigma, seed, free, barred)


@dataclass(frozen=True)
class Found:
    """All runs, and what the calibration chose."""

    load: list[Pair]
    learning: list[Pair]
    chosen: dict[str, Any]


async def measure(seeds: int, steps: int, tool_seconds: float) -> Found:
    """All pairs, in turn."""
    async with cluster() as machine:
        bench = Bench(machine, tool_seconds)
        chosen = await bench.balance()
        progress(
            f"{chosen['slots']} slots for asynchronous runs, {chosen['sync_threads']} threads for synchronous ones"
        )
        modes: dict[str, dict[str, Value]] = {
            "asynchronous": {**ASYNCHRONOUS, "generator.max_requests": chosen["slots"]},
            "synchronous": {**SYNCHRONOUS, **threads(chosen["sync_threads"])},
        }
        steady, learning = ({name: {**mode, **rate} for name, mode in modes.items()} for rate in (STEADY, LEARNING))
        found = Found([], [], chosen)
        for seed in range(1, seeds + 1):
            for sigma in SIGMAS:
                found.load.append(await bench.pair(steady, sigma=sigma, seed=seed, steps=LOAD_STEPS))
            progress(f"learning, {steps} steps")
            found.learning.append(await bench.pair(learning, sigma=LEARNING_SIGMA, seed=seed, steps=steps))
    return found


def figures_of(found: Found, tool_seconds: float) -> dict[str, Any]:
    """Everything that was found. The top level holds means over all pairs, `by_sigma` the load at each σ."""
    return {
        **load_of(found.load),
        **learning_of(found.learning),
        "by_sigma": {f"{sigma:g}": load_of([pair for pair in found.load if pair.sigma == sigma]) for sigma in SIGMAS},
        "load_pairs": [asdict(pair) for pair in found.load],
        "learning_pairs": [
            asdict(pair)
            | {
                "time_to_reward_ratio": pair.time_to_reward_ratio,
                "target_reward": pair.target_reward,
                "reward_gap": pair.reward_gap,
            }
            for pair in found.learning
        ],
        "tool_seconds": tool_seconds,
        "staleness_bound": STALENESS,
        "calibration": found.chosen,
    }


def async_sync_benchmark(
    seeds: Annotated[int, typer.Option(min=1, help="Pairs of runs for each σ.")] = 3,
    steps: Annotated[int, typer.Option(min=2 * WARM_UP, help="Steps of the runs that learn.")] = 60,
    tool_seconds: Annotated[float, typer.Option(min=0.001, max=10.0, help="Median latency of the tool.")] = 0.03,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Asynchronous against synchronous training: idle time, throughput and reward, some twelve minutes.

    The sides are balanced first, by how many completions the generator samples at once. Synchronous runs get the number
    of threads they do best with. Wants a machine that does nothing else: two cores are what the sides share.
    """
    figures = figures_of(run_to_end(measure(seeds, steps, tool_seconds)), tool_seconds)
    publish(report_of(figures), json_file=json_file, plot_file=plot_file)


def report_of(figures: Mapping[str, Any]) -> Report:
    """The table has a column for each σ and one for all pairs."""
    columns = {**{f"σ {sigma}": found for sigma, found in figures["by_sigma"].items()}, "all": figures}

    def row(name: str, key: str, form: str) -> list[str]:
        return [name, *(format(found[key], form) for found in columns.values())]

    chosen = figures["calibration"]
    bars = {f"{side}, σ {sigma}": (sigma, side) for sigma in figures["by_sigma"] for side in ("learner", "generator")}
    pairs = [*figures["load_pairs"], *figures["learning_pairs"]]
    mismatches = sum(len(pair[mode]["mismatches"]) for pair in pairs for mode in ("asynchronous", "synchronous"))
    return Report(
        figures=figures,
        columns=["tool latency", *columns],
        rows=[
            row("learner idle, asynchronous", "learner_idle_ratio", ".1%"),
            row("generator idle, asynchronous", "generator_idle_ratio", ".1%"),
            row("  of them the bottleneck", "bottleneck_idle_ratio", ".1%"),
            row("learner idle, synchronous", "sync_learner_idle_ratio", ".1%"),
            row("generator idle, synchronous", "sync_generator_idle_ratio", ".1%"),
            row("throughput, asynchronous / synchronous", "throughput_ratio", ".2f"),
            row("throughput of the asynchronous ideal", "ideal_fraction", ".1%"),
            row("throughput of the synchronous ideal", "sync_ideal_fraction", ".1%"),
            row("staleness, mean", "staleness_mean", ".2f"),
            row("imbalance of the sides", "imbalance", ".1%"),
        ],
        notes=[
            _learned(figures),
            "Ideal: the slower side computes without a pause (asynchronous), or the sides alternate and nothing else "
            "takes time (synchronous); each by what that run's sides computed.",
            f"The generator samples {chosen['slots']} completions at once where it is asynchronous, the whole batch of "
            f"{BATCH} where it is synchronous; synchronous runs use {chosen['sync_threads']} threads a side.",
            f"The first {WARM_UP} steps of each run, in which processes start and the pipeline fills, count only for "
            "rewards and the time to them.",
            "Targets in the balanced case: idle below 3 % at the bottleneck and 8 % on both sides, 95 % of the ideal.",
            *(
                [f"The services' word and the records differ in {mismatches} places: see mismatches."]
                if mismatches
                else []
            ),
        ],
        chart=Chart(
            title="Idle time with lognormal tool latency",
            x_label="",
            y_label="% of wall time",
            x=list(bars),
            series={
                name: [100 * figures["by_sigma"][sigma][f"{prefix}{side}_idle_ratio"] for sigma, side in bars.values()]
                for name, prefix in (("asynchronous", ""), ("synchronous", "sync_"))
            },
        ),
    )


def _learned(figures: Mapping[str, Any]) -> str:
    ratio, ends = figures["time_to_reward_ratio"], figures["reward_gap_interval"]
    return (
        f"Learning, σ {LEARNING_SIGMA:g}: mean reward of the last steps {figures['reward']:.3f} asynchronous, "
        f"{figures['sync_reward']:.3f} synchronous, difference {figures['reward_gap']:+.3f}"
        + (f" (95 % interval {ends[0]:+.3f} to {ends[1]:+.3f})" if ends else "")
        + ("; no common reward was reached." if ratio is None else f"; the same reward {ratio:.2f} times as soon.")
    )
