"""`tailrace bench decision`: what a routing decision costs, by the length of the prompt."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from contracts.routing import Demand
from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, progress, publish
from router.decomposition.plan import Kind
from router.policy.calibration import Calibration
from router.policy.decide import Policy, decide
from router.policy.decision import Question
from router.policy.model import RoutingModel, cold_start
from router.pools.base import PoolState
from router.settings import PoolSettings

LENGTHS = (200, 2_000, 20_000, 200_000)  # characters
CALLS = 2_000
WARM_UP = 50
TARGET_P50_MS, TARGET_P99_MS = 1.0, 5.0
POOLS = (("small", "compact", 0.1), ("medium", "compact", 0.2), ("large", "strong", 3.0))


def prompts(length: int, count: int) -> list[str]:
    """Texts of words, numbers and punctuation, no two alike: nothing is to be had from a cache."""
    generator = np.random.default_rng(length)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    vocabulary = ["".join(generator.choice(letters, size)) for size in generator.integers(1, 11, 4000)]
    vocabulary += ["12", "3.5", "x = y", "Why?", "not.", "a,", "\n", "if"] * 50
    words = generator.choice(vocabulary, (count, min(length, 4_000) // 3))
    return [(" ".join(row) * (length // 2_000 + 1))[:length].ljust(length, ".") for row in words]


def milliseconds(call: Callable[[str], object], texts: list[str]) -> dict[str, float]:
    """p50 and p99 of one call, by the clock and in CPU time, which is what it takes while others work here too."""
    for text in texts[:WARM_UP]:
        call(text)
    times = []
    for place in range(CALLS):
        text = texts[place % len(texts)]
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        call(text)
        times.append((time.perf_counter_ns() - wall, time.thread_time_ns() - cpu))
    (p50, cpu_p50), (p99, cpu_p99) = np.percentile(times, [50, 99], axis=0) / 1e6
    figures = {"p50_ms": p50, "p99_ms": p99, "cpu_p50_ms": cpu_p50, "cpu_p99_ms": cpu_p99}
    return {name: round(float(value), 4) for name, value in figures.items()}


def measure(model: RoutingModel) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by what is measured and by length: features and model alone, and the whole decision over three pools."""
    pools = [
        PoolState(name, PoolSettings(tier=tier, price_in=price, price_out=4 * price, window=1_000_000))
        for name, tier, price in POOLS
    ]
    policy = Policy("benchmark", model, Calibration())

    def whole(text: str) -> object:
        question = Question(text, Kind.QUESTION, Demand.MECHANICAL, prompt_tokens=len(text) // 4 + 1, tolerance=0.1)
        return decide(question, pools, policy, draw=0.5)

    found: dict[str, dict[str, dict[str, float]]] = {"model": {}, "decide": {}}
    for length in LENGTHS:
        progress(f"prompts of {length} characters")
        texts = prompts(length, 200 if length <= 20_000 else 20)
        found["model"][str(length)] = milliseconds(model.logits, texts)
        found["decide"][str(length)] = milliseconds(whole, texts)
    return found


def decision_benchmark(json_file: JsonFile = None, plot_file: PlotFile = None) -> None:
    """Time from a prompt to the pool that gets it, with the shipped model: p50 and p99 in ms.

    Only the first and last thousand characters of a prompt are looked at, so beyond that the time stays the same.
    """
    model = cold_start()
    figures = measure(model)
    at = figures["decide"]["2000"]
    met = at["p50_ms"] < TARGET_P50_MS and at["p99_ms"] < TARGET_P99_MS
    labels = {"model": "features and model", "decide": "whole decision"}
    report = Report(
        figures={"version": model.version, "calls": CALLS, **figures},
        columns=["ms", "characters", "p50", "p99", "CPU p50", "CPU p99"],
        rows=[
            [labels[what], length, *(f"{value:.3f}" for value in values.values())]
            for what, by_length in figures.items()
            for length, values in by_length.items()
        ],
        notes=[
            f"The target at 2000 characters is p50 < {TARGET_P50_MS:g} ms and p99 < {TARGET_P99_MS:g} ms:"
            f" {'met' if met else 'not met'}.",
            f"200000 characters take {figures['decide']['200000']['p50_ms'] / at['p50_ms']:.2f} times as long as 2000.",
        ],
        chart=Chart(
            title="Time of a routing decision",
            x_label="",
            y_label="ms",
            x=[f"{length} characters" for length in LENGTHS],
            series={
                f"{labels[what]}, {quantile}": [values[f"{quantile}_ms"] for values in figures[what].values()]
                for what in labels
                for quantile in ("p50", "p99")
            },
        ),
    )
    publish(report, json_file=json_file, plot_file=plot_file)
