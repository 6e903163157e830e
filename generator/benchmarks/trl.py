"""`tailrace bench trl`: a demo run against TRL's GRPOTrainer, on the same cores of the same machine.

Both train the same model on the same prompts, with the same verifier, batch, advantages, clip range and optimizer,
sequence means (GRPO), no KL term, bf16 autocast over fp32 weights. TRL's data are fresh; ours may be four versions
old, which our default objective, decoupled PPO, corrects for. TRL trains in one process, with its own batched
generation and all cores as torch threads; ours as a user starts it: a server, a learner, generators.

They take turns: TRL does some of its steps and waits, a run of ours follows, and so on; one that waits uses no core. A
clock of ours starts with the first sampled token and one of TRL's with its first step, so loading is in neither, and
filling and draining our pipeline is in ours. A rollout of a group of equal rewards counts on both sides, although it
gives no gradient: TRL computes its update all the same, ours does not.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, progress, publish
from infra.cli.interrupts import run_to_end
from infra.errors import UserError

if TYPE_CHECKING:
    from infra.benchmarks.cluster import Cluster, Value

CORES = 2
PROCESSES = {"learner": 1, "generator": 2}
STEP_SECONDS = 300.0  # longest step of either that is waited for
START_SECONDS = 180.0
WINDOW = 5  # steps whose mean reward counts as the accuracy
TARGET = 4.0


@dataclass(frozen=True)
class Job:
    """What both sides train, with the values of `tailrace demo`, and how TRL computes it."""

    steps: int
    device_batch: int  # TRL: sequences in one forward and backward pass
    bf16: bool  # TRL: autocast
    seed: int = 1
    environment: str = "quick-facts"
    model: str = "smollm2"
    groups_per_step: int = 8
    group_size: int = 8
    max_tokens: int = 8
    stop: str = "\n"  # completions end with a token that contains it
    temperature: float = 1.0
    learning_rate: float = 2e-5  # constant
    beta1: float = 0.9
    beta2: float = 0.99
    max_grad_norm: float = 1.0
    eps_clip: float = 0.2

    @property
    def batch(self) -> int:
        """Rollouts of a step."""
        return self.groups_per_step * self.group_size

    def settings(self) -> dict[str, Value]:
        """The same for our side, by dotted names."""
        return {
            "run.environment": self.environment,
            "learner.model": self.model,
            "learner.steps": self.steps,
            "learner.groups_per_step": self.groups_per_step,
            "learner.group_size": self.group_size,
            "learner.max_staleness": 4,
            "learner.threads": 1,
            "learner.device": "cpu",
            "learner.sampling.max_tokens": self.max_tokens,
            "learner.sampling.temperature": self.temperature,
            "learner.sampling.stop": [self.stop],
            "learner.objective.eps_clip": self.eps_clip,
            "learner.objective.eps_clip_high": self.eps_clip,
            "learner.objective.aggregation": "sequence_mean",
            "learner.optimizer.learning_rate": self.learning_rate,
            "learner.optimizer.warmup_steps": 0,
            "learner.optimizer.beta1": self.beta1,
            "learner.optimizer.beta2": self.beta2,
            "learner.optimizer.max_grad_norm": self.max_grad_norm,
            "generator.threads": 1,
            "generator.device": "cpu",
        }


@dataclass(frozen=True)
class Step:
    """One step of either side."""

    at: float  # seconds of training until its end
    reward: float  # mean over its batch


def seconds_to(level: float, curve: Sequence[Step]) -> float | None:
    """Seconds until the mean reward of the last `WINDOW` steps is `level`; None where that is never reached."""
    for end in range(WINDOW, len(curve) + 1):
        if fmean(step.reward for step in curve[end - WINDOW : end]) >= level:
            return curve[end - 1].at
    return None


class Opponent:
    """TRL's process."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    @asynccontextmanager
    async def started(cls, job: Job, log: Path) -> AsyncIterator[Opponent]:
        """Start it; it loads the model and waits."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "generator.benchmarks.trl_process", json.dumps(asdict(job))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": str(CORES)},
            )
        try:
            yield cls(process, log)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def train(self, steps: int) -> list[tuple[float, float]]:
        """Seconds and mean reward of the next steps. Raises `UserError` when TRL fails or is too slow."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n".encode())
        await self._process.stdin.drain()
        found = []
        for _ in range(steps):
            try:
                async with asyncio.timeout(START_SECONDS + STEP_SECONDS):
                    line = await self._process.stdout.readline()
            except TimeoutError:
                raise UserError(
                    f"TRL: no step within {START_SECONDS + STEP_SECONDS:g} s; is the machine busy?"
                ) from None
            if not line:
                end = self._log.read_text(errors="replace").strip().splitlines()[-1:]
                raise UserError(f"TRL ended: {' '.join(end)}; all it said is in {self._log}")
            answer = json.loads(line)
            found.append((answer["seconds"], answer["reward"]))
            progress(f"TRL: a step in {answer['seconds']:.1f} s, reward {answer['reward']:.2f}")
        return found


async def ours(machine: Cluster, job: Job, number: int) -> list[Step]:
    """One run from its beginning; the clock starts when the first rollout does."""
    from contracts import subjects
    from contracts.messages import Purpose, Rollout
    from infra.cli.feed import observe

    name = f"trl-{number}"
    async with machine.run(name, {**job.settings(), "run.seed": number}, processes=PROCESSES) as run:
        await run.until_step(1, limit=START_SECONDS + STEP_SECONDS)
        await run.until_step(job.steps, limit=job.steps * STEP_SECONDS)
        reports = await run.steps()
    rollouts = observe(machine.bus, subjects.ROLLOUT, {"run": name, "purpose": Purpose.TRAIN}, follow=False)
    async with aclosing(rollouts):
        begun = min([r.message.started_ns async for r in rollouts if isinstance(r.message, Rollout)])
    curve = [Step((report.at_ns - begun) / 1e9, fmean(report.rewards)) for report in reports]
    progress(f"Tailrace: {len(curve)} steps in {curve[-1].at:.1f} s, reward {reward_at_end(curve):.2f} at the end")
    return curve


def reward_at_end(curve: Sequence[Step]) -> float:
    """Mean of the last `WINDOW` steps."""
    return fmean(step.reward for step in curve[-WINDOW:])


def figures(trl: Sequence[Step], runs: Sequence[Sequence[Step]], *, batch: int, level: float) -> dict[str, Any]:
    """The ratios and what they are made of; seconds to the level are the mean of our runs, null where one misses it."""
    own_rate = fmean(len(run) * batch / run[-1].at for run in runs)
    trl_rate = len(trl) * batch / trl[-1].at
    trl_seconds = seconds_to(level, trl)
    own = [seconds_to(level, run) for run in runs]
    reached = [seconds for seconds in own if seconds is not None]
    own_seconds = fmean(reached) if len(reached) == len(runs) else None
    return {
        "rollouts_ratio": own_rate / trl_rate,
        "time_to_accuracy_ratio": trl_seconds / own_seconds if trl_seconds and own_seconds else None,
        "rollouts_per_second": own_rate,
        "trl_rollouts_per_second": trl_rate,
        "step_seconds": fmean(run[-1].at / len(run) for run in runs),
        "trl_step_seconds": trl[-1].at / len(trl),
        "level": level,
        "seconds_to_level": own_seconds,
        "trl_seconds_to_level": trl_seconds,
        "rewards": [[step.reward for step in run] for run in runs],
        "trl_rewards": [step.reward for step in trl],
    }


async def measure(job: Job, repeats: int, level: float) -> dict[str, Any]:
    """All figures of the benchmark by name."""
    from infra.benchmarks.cluster import cluster

    each = job.steps // repeats
    timed: list[tuple[float, float]] = []
    runs = []
    async with cluster() as machine, Opponent.started(job, machine.directory / "trl.log") as trl:
        for number in range(1, repeats + 1):
            progress(f"round {number} of {repeats}: {each} steps of TRL, then a run of {job.steps} steps of ours")
            timed += await trl.train(each)
            runs.append(await ours(machine, job, number))
    ends = accumulate(seconds for seconds, _ in timed)
    curve = [Step(end, reward) for end, (_, reward) in zip(ends, timed, strict=True)]
    return figures(curve, runs, batch=job.batch, level=level)


def trl_benchmark(
    steps: Annotated[int, typer.Option(min=1, help="Steps of TRL in each round; a run of ours has them all.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds: TRL and Tailrace take turns.")] = 2,
    level: Annotated[
        float, typer.Option(min=0.0, max=1.0, help=f"Reward, mean of {WINDOW} steps, that both are timed to.")
    ] = 0.45,
    device_batch: Annotated[int, typer.Option(min=1, help="TRL: sequences per forward and backward pass.")] = 8,
    bf16: Annotated[bool, typer.Option(help="TRL: autocast; ours has it on.")] = True,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Rollouts trained per second and time to the same accuracy, against TRL's GRPOTrainer.

    Both on two cores, with the model, tasks and batch of the demo. TRL's data are fresh, ours up to four versions old.
    The defaults for TRL are the fastest that were tried.
    """
    if find_spec("trl") is None:
        raise UserError("the benchmark needs TRL; run `pip install -e '.[bench]'`")
    job = Job(steps * repeats, device_batch, bf16)
    if job.batch % device_batch:
        raise UserError(f"--device-batch {device_batch} does not divide the batch of {job.batch} rollouts")
    if hasattr(os, "sched_setaffinity"):  # what is started from here inherits it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    publish(report_of(run_to_end(measure(job, repeats, level))), json_file=json_file, plot_file=plot_file)


def report_of(found: dict[str, Any]) -> Report:
    """The table and the learning curves."""
    ratio, sooner, level = found["rollouts_ratio"], found["time_to_accuracy_ratio"], found["level"]
    sides = {"Tailrace": "", "TRL": "trl_"}
    late = " and ".join(side for side, prefix in sides.items() if found[f"{prefix}seconds_to_level"] is None)
    if late:
        accuracy = f"{late} did not come to a reward of {level:g}, mean of {WINDOW} steps, within so few steps."
    else:
        accuracy = f"To a reward of {level:g}, mean of {WINDOW} steps, TRL takes {sooner:.1f} times as long."
    met = "met" if ratio >= TARGET else "missed"

    def row(side: str, prefix: str) -> list[str]:
        rate, step, reached = (
            found[prefix + name] for name in ("rollouts_per_second", "step_seconds", "seconds_to_level")
        )
        return [side, f"{rate:.2f}", f"{step:.1f}", "-" if reached is None else f"{reached:.0f}"]

    return Report(
        figures=found,
        columns=["GRPO on two cores", "rollouts/s", "s/step", f"s to reward {level:g}"],
        rows=[row(side, prefix) for side, prefix in sides.items()],
        notes=[
            f"Rollouts trained per second: {ratio:.1f} times TRL's. Target {TARGET:g}: {met}. Those of groups of equal "
            "rewards count on both sides; only TRL computes their update, which is none.",
            accuracy,
        ],
        chart=Chart(
            title="Training reward by step: same tasks, same objective",
            x_label="step",
            y_label="reward",
            x=list(range(1, len(found["trl_rewards"]) + 1)),
            series={
                "TRL": found["trl_rewards"],
                "Tailrace": [fmean(rewards) for rewards in zip(*found["rewards"], strict=True)],
            },
        ),
    )
