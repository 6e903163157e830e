"""`tailrace bench scale`: what a learner and its queue look like with 1 to 32 generators, to size a fleet by.

The generators are simulated: they pull real tasks, follow the policies and publish real rollouts and reports over a
real server, but wait for a lognormal time instead of sampling, so that one machine can hold them all. The learner is a
real process that trains on what they send.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Annotated, Any

import typer

from contracts import subjects
from contracts.messages import Rollout, StepReport
from infra.benchmarks.cluster import Cluster, Value, cluster
from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, progress, publish
from infra.cli.interrupts import run_to_end
from infra.supervisor import Child, children

FLEETS = (1, 2, 4, 8, 16, 32)
SLOTS = 2  # groups that one generator works on at once
SIGMA = 0.5  # of the lognormal time for a group
GROUP_STEPS = 1.0  # its mean, in steps of the learner on this machine: one group in a thousand outlasts the bound
FIRST_GUESS = 0.2  # seconds for a group while the learner's step is timed
FIRST_SECONDS = 8.0
TOKENS = 120  # per completion: what makes a step of the learner long beside its messages
STALENESS = 4
GROUPS, GROUP = 8, 4
START_SECONDS = 180.0  # from the start of the processes to the first step

SETTINGS: dict[str, Value] = {
    "run.environment": "reverse-text",  # for the name: nothing is asked and nothing is answered
    "service.heartbeat_seconds": 0.5,
    "learner.steps": 1_000_000,
    "learner.max_staleness": STALENESS,
    "learner.groups_per_step": GROUPS,
    "learner.group_size": GROUP,
    "learner.minibatches": 2,
    "learner.precision": "fp32",
    "learner.threads": 1,
    "learner.checkpoint_every": 1_000_000,
    "learner.optimizer.learning_rate": 1e-6,  # the rewards are random: nothing is to be learned
    "learner.sampling.max_tokens": TOKENS,
}


@dataclass(frozen=True)
class Measured:
    """One fleet at work."""

    generators: int
    learner_idle_ratio: float
    straggler_ratio: float  # of wall time, idle for groups that the next step would have made too stale
    generator_idle_ratio: float  # share of the slots without a group
    staleness_mean: float
    staleness_max: int
    queue_age_mean: float  # seconds from the publication of a task until a generator began with it
    queue_age_p95: float
    steps_per_second: float
    learner_step_seconds: float  # the learner computed so long for one step
    discarded: Mapping[str, int]  # rollouts by reason


def median_of(mean: float, sigma: float) -> float:
    """Median of a lognormal time with that mean."""
    return mean / math.exp(sigma**2 / 2)


def generators_needed(groups_per_second: float, seconds: float, slots: int) -> float:
    """How many generators keep a learner busy that trains so many groups a second.

    Each group occupies a slot for `seconds`: by Little's law `groups_per_second * seconds` slots are in use.
    """
    return groups_per_second * seconds / slots


def predicted_idle(generators: int, needed: float) -> float:
    """Idle ratio of the learner with fewer generators than it needs; 0 with as many or more."""
    return max(1.0 - generators / needed, 0.0)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below `share` of all."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def measured(
    generators: int, summary: Mapping[str, Any], rollouts: Sequence[Rollout], steps: Sequence[StepReport]
) -> Measured:
    """A fleet's figures from the run's summary, the age of its tasks from the rollouts, waits from the steps."""
    ages = [(rollout.started_ns - rollout.issued_ns) / 1e9 for rollout in rollouts if rollout.index == 0]
    busy = (1.0 - summary["learner_idle_ratio"]) * summary["training_seconds"]
    return Measured(
        generators=generators,
        learner_idle_ratio=summary["learner_idle_ratio"],
        straggler_ratio=sum(step.seconds.get("wait_for_stragglers", 0.0) for step in steps)
        / summary["training_seconds"],
        generator_idle_ratio=summary["generator_idle_ratio"],
        staleness_mean=summary["staleness_mean"],
        staleness_max=summary["staleness_max"],
        queue_age_mean=fmean(ages),
        queue_age_p95=quantile(ages, 0.95),
        steps_per_second=summary["steps"] / summary["training_seconds"],
        learner_step_seconds=busy / summary["steps"],
        discarded=summary["rollouts_discarded"],
    )


async def work(machine: Cluster, name: str, generators: int, group_seconds: float, seconds: float) -> Measured:
    """One fleet and one learner for so long."""
    from infra import models  # heavy, and not needed for help

    folder = machine.directory / "model"
    if not folder.is_dir():
        models.make_tiny(folder, 1, width=128)
    shape = [str(value) for value in (generators, SLOTS, median_of(group_seconds, SIGMA), SIGMA, TOKENS)]
    fleet = Child("fleet", "fleet", (sys.executable, "-m", "infra.benchmarks.fleet", *shape))
    settings = {**SETTINGS, "learner.model": folder}
    async with machine.run(name, settings, processes=[*children({"learner": 1}), fleet]) as run:
        await run.until_step(1, limit=START_SECONDS)
        await run.go_on(seconds)
        rollouts = await run.records(subjects.ROLLOUT, Rollout)
        found = measured(generators, await run.summary(), rollouts, await run.steps())
    progress(
        f"{name}, {generators} generators: {found.steps_per_second:.2f} steps/s, idle learner "
        f"{found.learner_idle_ratio:.1%} generators {found.generator_idle_ratio:.1%}"
    )
    return found


async def measure(seconds: float) -> tuple[list[Measured], float]:
    """All fleets, one after the other, and how long a group takes them in the mean."""
    async with cluster() as machine:
        first = await work(machine, "timing", max(FLEETS), FIRST_GUESS, FIRST_SECONDS)
        group = GROUP_STEPS * first.learner_step_seconds
        return [await work(machine, f"fleet-{count}", count, group, seconds) for count in FLEETS], group


def figures_of(fleets: Sequence[Measured], group_seconds: float) -> dict[str, Any]:
    """Everything that was found, and what the rule for sizing says."""
    step = fmean(fleet.learner_step_seconds for fleet in fleets)
    needed = generators_needed(GROUPS / step, group_seconds, SLOTS)
    return {
        "generators_needed": needed,
        "learner_step_seconds": step,
        "group_seconds": group_seconds,
        "slots": SLOTS,
        "groups_per_step": GROUPS,
        "staleness_bound": STALENESS,
        "simulated": True,
        "fleets": [
            {**asdict(fleet), "predicted_learner_idle_ratio": predicted_idle(fleet.generators, needed)}
            for fleet in fleets
        ],
    }


def scale_benchmark(
    seconds: Annotated[float, typer.Option(min=5.0, max=600.0, help="How long each fleet works.")] = 25.0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Idle time, staleness and queue age with 1 to 32 generators, which are simulated: some four minutes.

    A learner trains for real on what they publish. The last line is a rule for how many generators a learner needs.
    """
    figures = figures_of(*run_to_end(measure(seconds)))
    publish(report_of(figures), json_file=json_file, plot_file=plot_file)


def report_of(figures: Mapping[str, Any]) -> Report:
    """A row for each fleet, and the rule."""
    fleets = figures["fleets"]
    return Report(
        figures=figures,
        columns=[
            "generators", "learner idle", "predicted", "for stragglers", "generators idle", "staleness", "max",
            "queue age", "p95", "steps/s",
        ],
        rows=[
            [
                str(fleet["generators"]),
                f"{fleet['learner_idle_ratio']:.1%}",
                f"{fleet['predicted_learner_idle_ratio']:.1%}",
                f"{fleet['straggler_ratio']:.1%}",
                f"{fleet['generator_idle_ratio']:.1%}",
                f"{fleet['staleness_mean']:.2f}",
                str(fleet["staleness_max"]),
                f"{fleet['queue_age_mean']:.2f} s",
                f"{fleet['queue_age_p95']:.2f} s",
                f"{fleet['steps_per_second']:.2f}",
            ]
            for fleet in fleets
        ],
        notes=[
            f"The generators are simulated: real messages, but no model; each works on {SLOTS} groups at once, for "
            f"{figures['group_seconds']:.2f} s each (lognormal, σ = {SIGMA:g}). Their idle time is that of slots.",
            f"Staleness may be at most {STALENESS}; a batch is {GROUPS} groups of {GROUP}.",
            f"Rule: generators = groups a second that the learner trains x seconds for a group / groups at once = "
            f"{GROUPS / figures['learner_step_seconds']:.1f} x {figures['group_seconds']:.2f} / {SLOTS} = "
            f"{figures['generators_needed']:.1f}; with fewer, the learner is idle for 1 - generators / that.",
        ],
        chart=Chart(
            title="Idle time by size of the fleet (simulated generators)",
            x_label="generators",
            y_label="% of wall time",
            x=[float(fleet["generators"]) for fleet in fleets],
            series={
                "learner": [100 * fleet["learner_idle_ratio"] for fleet in fleets],
                "learner, predicted": [100 * fleet["predicted_learner_idle_ratio"] for fleet in fleets],
                "generators": [100 * fleet["generator_idle_ratio"] for fleet in fleets],
            },
        ),
    )  # fmt: skip
