"""`tailrace bench bus`: what moving messages and weights costs, as a share of the CPU and wall time of a run.

CPU: the kernel counts the seconds of every process of a short demo, nats-server and verifiers included, and of every
thread. A Python thread's are divided by samples: `py-spy` looks from outside at all that run, a hundred times a second.
It waits for no GIL, so short calls between two releases of it are seen as often as they run; a profiler in the process
would see them too rarely (a thread) or slow down exactly what is measured (tracing every call). A sample belongs to
the innermost frame whose home is known, so that library code counts for its caller. Waiting is not CPU. The event loop
counts as the bus: nearly all it does beside calling us is reading and writing the connection.

Wall: the states in which the services say they were held up: the learner packing weights or waiting for the last
publication, the generators with a new policy entering the engine. What goes on meanwhile costs CPU, not time.

Start-up, evaluation and the first steps are outside of the window, and so is, as a rule, the whole transfer that comes
once in `learner.keyframe_every` versions.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.benchmarks.cpu import OTHERS, OVERHEAD, Place, Spy, Usage, count, divide, spy_binary
from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, progress, publish
from infra.cli.interrupts import run_to_end
from infra.cli.run import Preset
from infra.errors import UserError

if TYPE_CHECKING:
    from contracts.messages import GeneratorReport, StepReport
    from infra.benchmarks.cluster import Value

WARM_STEPS = 2  # until every part has done everything once
SPARE_STEPS = 100  # the run goes on while the window opens and closes, and is then stopped
STEP_SECONDS = 60.0  # longest step that is waited for
TARGET = 0.02
HOTTEST = 8  # places of the overhead that are named


def wall_figures(
    steps: Sequence[StepReport], before: Sequence[GeneratorReport], after: Sequence[GeneratorReport]
) -> dict[str, float]:
    """Wall seconds of learner and generators, and the held-up ones; `steps[0]` ends where the window begins."""
    former = {report.generator: (report.wall_seconds, report.seconds["load"]) for report in before}
    passed = [(report, *former.get(report.generator, (0.0, 0.0))) for report in after]
    return {
        "learner_wall_seconds": steps[-1].wall_seconds - steps[0].wall_seconds,
        "learner_pack_seconds": sum(step.seconds.get("pack", 0.0) for step in steps[1:]),
        "learner_publish_seconds": sum(step.seconds.get("publish", 0.0) for step in steps[1:]),
        "generator_wall_seconds": sum(report.wall_seconds - wall for report, wall, _ in passed),
        "generator_load_seconds": sum(report.seconds["load"] - load for report, _, load in passed),
    }


def demo_settings(name: str) -> tuple[dict[str, Value], dict[str, int]]:
    """The settings of a preset by their dotted names, and its processes."""
    table = tomllib.loads((files("infra") / "presets" / f"{name}.toml").read_text())
    processes = table.pop("processes")
    return dict(_flat(table, "")), processes


def _flat(table: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Value]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


async def measure(name: str, steps: int) -> dict[str, Any]:
    """All figures of the benchmark by name."""
    from infra.benchmarks.cluster import cluster

    settings, processes = demo_settings(name)
    settings |= {"learner.steps": steps + SPARE_STEPS, "learner.evaluation.prompts": 0}
    async with cluster() as machine, machine.run("bus", settings, processes=processes) as run:
        progress(f"starting the preset {name}; the window begins after step {WARM_STEPS}")
        await run.until_step(WARM_STEPS, limit=240.0)
        pids = run.pids
        spies = {instance: await Spy.on(pid, machine.directory / f"{instance}.raw") for instance, pid in pids.items()}
        began = {instance: Usage.of(pid) for instance, pid in pids.items()}
        server, generators = Usage.of(machine.server.pid), await run.generators()
        begun = await run.steps()
        progress(f"sampling {', '.join(pids)} for {steps} steps")
        last = await run.until_step(begun[-1].step + steps, limit=steps * STEP_SECONDS)
        used = {instance: Usage.of(pid).since(began[instance]) for instance, pid in pids.items()}
        served = Usage.of(machine.server.pid).since(server).own
        wall = wall_figures(
            [step for step in await run.steps() if begun[-1].step <= step.step <= last.step],
            generators,
            await run.generators(),
        )
        samples = {instance: count(await spy.stop()) for instance, spy in spies.items()}
    seconds: defaultdict[Place, float] = defaultdict(float, {("nats-server", "nats-server"): served})
    for instance, usage in used.items():
        service = instance.split("-")[0]
        seconds["verifiers", service] += usage.below
        for (name, frame), number in divide(usage, samples[instance]).items():
            seconds[name, f"{service}, {frame}"] += number
    return figures(seconds, wall)


def figures(seconds: Mapping[Place, float], wall: Mapping[str, float]) -> dict[str, Any]:
    """The shares, their parts, and the places that most of the overhead's CPU seconds were seen in."""
    cpu = dict.fromkeys((*OVERHEAD, *OTHERS), 0.0)
    overhead: defaultdict[str, float] = defaultdict(float)
    for (name, frame), number in seconds.items():
        cpu[name] += number
        if name in OVERHEAD:
            overhead[f"{name}: {frame}"] += number
    hottest = sorted(overhead.items(), key=lambda item: -item[1])
    total = sum(cpu.values())
    held = wall["learner_pack_seconds"] + wall["learner_publish_seconds"]
    loading = wall["generator_load_seconds"]
    all_wall = wall["learner_wall_seconds"] + wall["generator_wall_seconds"]
    return {
        "overhead_fraction": sum(cpu[name] for name in OVERHEAD) / total,
        "overhead_wall_fraction": (held + loading) / all_wall,
        "learner_wall_fraction": held / wall["learner_wall_seconds"],
        "generator_wall_fraction": loading / wall["generator_wall_seconds"],
        "cpu_seconds": cpu,
        "cpu_fractions": {name: number / total for name, number in cpu.items()},
        **wall,
        "hottest": {place: number / sum(overhead.values()) for place, number in hottest[:HOTTEST]},
    }


def bus_benchmark(
    steps: Annotated[int, typer.Option(min=2, help="Steps of the demo that are measured.")] = 10,
    preset: Annotated[Preset, typer.Option(help="Which demo; not one sampled by vLLM.")] = Preset.SMOLLM2,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Share of CPU and wall time that codec, NATS and weights take of a demo run.

    The demo runs as usual, without its evaluation; start-up and the first steps are not measured.
    """
    if preset is Preset.SMOLLM2_VLLM:
        raise UserError(f"--preset {preset}: vLLM's processes cannot be told from verifiers; choose another preset")
    spy_binary()
    found = run_to_end(measure(preset, steps))
    cpu, shares = found["cpu_seconds"], found["cpu_fractions"]
    names = [*OVERHEAD, *OTHERS]
    met = "met" if found["overhead_fraction"] < TARGET and found["overhead_wall_fraction"] < TARGET else "missed"
    hottest = ", ".join(f"{frame} {share:.0%}" for frame, share in list(found["hottest"].items())[:5])
    report = Report(
        figures=found,
        columns=["CPU of a run", "seconds", "share"],
        rows=[
            *([name, f"{cpu[name]:.2f}", f"{shares[name]:.2%}"] for name in names),
            [
                "**codec, NATS and weights**",
                f"{sum(cpu[n] for n in OVERHEAD):.2f}",
                f"{found['overhead_fraction']:.2%}",
            ],
        ],
        notes=[
            f"Wall time held up by packing, publishing and loading: {found['overhead_wall_fraction']:.2%} "
            f"(learner {found['learner_wall_fraction']:.2%}, generators {found['generator_wall_fraction']:.2%}).",
            f"Target below {TARGET:.0%} of both: {met}. Most of the overhead's CPU: {hottest}.",
        ],
        chart=Chart(
            title=f"Overhead in the {preset} demo",
            x_label="",
            y_label="share of CPU, %",
            x=list(OVERHEAD),
            series={"share of CPU": [100 * shares[name] for name in OVERHEAD]},
        ),
    )
    publish(report, json_file=json_file, plot_file=plot_file)
