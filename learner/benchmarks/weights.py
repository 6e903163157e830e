"""`tailrace bench weights`: what a policy version costs, in bytes by learning rate and in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Annotated

import typer

from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, progress, publish
from infra.chains import LARGEST_PATCH
from learner.settings import LearnerSettings

RATES = [1e-6, 5e-6, 2e-5]
TARGET_SHARE, TARGET_SECONDS = 0.02, 2.0
WAYS = {"patch": "patch", "keyframe": "keyframe", "file": "file copy", "objects": "nats-py object store"}
STAGES = {
    "publish": "publish, s",
    "apply": "fetch and apply, s",
    "loaded": "step to loaded, s",
    "first_token": "step to first token, s",
}


def weights_benchmark(
    steps: Annotated[int, typer.Option(min=1, help="Measured steps at each learning rate.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Measured transfers of each kind.")] = 5,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Bytes and seconds of a policy version of SmolLM2: patch, keyframe, plain file copy, object store.

    The patches come from real optimizer steps, the first token from a generator process that runs on this machine with
    all else; it holds a task that waits for the version. Takes some three minutes of two cores.
    """
    import torch

    from infra import models
    from learner.benchmarks import transfers, updates

    torch.set_num_threads(1)
    folder = models.resolve("smollm2", seed=1)
    shares: dict[float, list[float]] = {}
    versions: list[updates.Weights] = []
    progress("sampling completions to train on")
    batches = updates.sampled(folder, steps)
    for rate in reversed(RATES):  # the smallest last: its versions are then moved
        progress(f"{updates.SETTLE} + {steps} steps at learning rate {rate:g}")
        shares[rate], versions = updates.sizes(folder, rate, batches)
    costs = transfers.cpu_seconds(versions)
    times = transfers.measure(folder, versions, repeats)
    report = report_of(shares, times, costs, len(versions[0][0]))
    publish(report, json_file=json_file, plot_file=plot_file)


def report_of(
    shares: Mapping[float, Sequence[float]],
    times: Mapping[str, Sequence[Mapping[str, float]]],
    costs: Mapping[str, float],
    size: int,
) -> Report:
    """A row for each way; the bytes by learning rate, and the CPU seconds of a patch, are notes below."""
    mean = {rate: fmean(shares[rate]) for rate in RATES}
    seconds = {
        way: {stage: median(time[stage] for time in times[way]) for stage in STAGES if stage in times[way][0]}
        for way in WAYS
    }
    token, share = seconds["patch"]["first_token"], with_keyframes(mean[RATES[0]])
    figures = {
        "bytes": size,
        "patch_share": {f"{rate:g}": mean[rate] for rate in RATES},
        "share_with_keyframes": {f"{rate:g}": with_keyframes(mean[rate]) for rate in RATES},
        "seconds": seconds,
        "cpu_seconds": dict(costs),
        "pack_seconds": median(time["pack"] for time in times["patch"]),
        "publish_to_file": seconds["patch"]["publish"] / seconds["file"]["publish"],
        "publish_to_keyframe": seconds["patch"]["publish"] / seconds["keyframe"]["publish"],
        "keyframe_publish_mb_s": size / 1e6 / seconds["keyframe"]["publish"],
        "keyframe_fetch_mb_s": size / 1e6 / seconds["keyframe"]["apply"],
    }
    rows = [
        [title, _share(mean[RATES[0]] if way == "patch" else 1.0)]
        + [f"{seconds[way][stage]:.2f}" if stage in seconds[way] else "–" for stage in STAGES]
        for way, title in WAYS.items()
    ]
    rates = ", ".join(f"{_share(mean[rate])} ({_share(with_keyframes(mean[rate]))}) at {rate:g}" for rate in RATES)
    return Report(
        figures=figures,
        columns=[f"{size / 1e6:.0f} MB of weights", "bytes", *STAGES.values()],
        rows=rows,
        notes=[
            f"Bytes of a patch by learning rate, and of a version with keyframes counted in: {rates}; "
            f"target at {RATES[0]:g}: at most {_share(TARGET_SHARE)}, {_met(share <= TARGET_SHARE)}.",
            f"From the end of a step to the first token of its version: {token:.2f} s with a patch; target: below "
            f"{TARGET_SECONDS:g} s, {_met(token < TARGET_SECONDS)}.",
            "CPU seconds of a patch, which a busy machine leaves as they are: "
            f"{', '.join(f'{name} {cost:.2f}' for name, cost in costs.items())}; digest and diff run side by side, "
            "and the reader takes the digest again.",
            "Medians; publishing includes the digest of all weights and the search for changes; every write is synced.",
        ],
        chart=Chart(
            title="Seconds of a version of SmolLM2",
            x_label="",
            y_label="seconds",
            x=list(WAYS.values()),
            series={title: [seconds[way].get(stage) for way in WAYS] for stage, title in STAGES.items()},
        ),
    )


def with_keyframes(patch: float) -> float:
    """Mean share of a full transfer per version, where patches are `patch` of it, by the learner's default rule."""
    every = LearnerSettings().keyframe_every
    versions = next(
        (count for count in range(1, every) if patch > LARGEST_PATCH or count * patch >= 1), every
    )  # from one keyframe to the next
    return (1 + (versions - 1) * patch) / versions


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _met(reached: bool) -> str:
    return "met" if reached else "not met"
