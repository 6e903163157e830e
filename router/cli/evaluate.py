"""`tailrace route eval`: the routing method on public tables, beside simple rules and published figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, progress, publish
from infra.errors import UserError

# Ong et al. 2024, RouteLLM: its best rows on these two tables (augmented training data).
PUBLISHED = {
    "mmlu": {"apgr": 0.603, "cpt50": 0.354},
    "gsm8k": {"apgr": 0.622, "cpt50": 0.336, "cpt80": 0.633},
}
TARGETS = {"mmlu_1500": 0.65, "mmlu_7000": 0.69, "gsm8k": 0.66}
NAMES = {
    "router": "this router",
    "without_groups": "  trained without groups",
    "subject_mean": "mean of the subject, told it",
    "published": "RouteLLM, published",
    "prompt_length": "prompt length",
    "random": "random",
}


def evaluate(
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", help="Folder with routellm/, llmrouter/ and uncommonroute/.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="How many splits, each with a training of its own.")] = 5,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Train on one part of public tables and route the other, never given a prompt's subject.

    No prompt nor near-duplicate is on both sides of a split. APGR is the mean of the performance gap recovered over
    the share of strong calls (random: 0.5), CPT50 and CPT80 the least share that recovers 50 and 80 % of it.
    """
    from router.policy import tables
    from router.policy.evaluate import FIRST_SEED, Pair, cascades, gsm8k, mmlu, multi_model, tiers

    splits = range(FIRST_SEED, FIRST_SEED + seeds)
    figures: dict[str, Any] = {"seeds": list(splits), "cascade": {}, "published": PUBLISHED, "targets": TARGETS}
    pairs = {"mmlu": data / "routellm" / "mmlu", "gsm8k": data / "routellm" / "gsm8k_responses.csv"}
    models, demand = data / "llmrouter" / "train.json.gz", data / "uncommonroute"
    if not any(path.exists() for path in (*pairs.values(), models, demand)):
        raise UserError(f"{data} holds none of routellm/, llmrouter/ and uncommonroute/; name the folder above them")
    for name, path in pairs.items():
        if path.exists():
            pair = Pair.of(tables.read([path])[0])
            figures |= mmlu(pair, splits, progress) if name == "mmlu" else {name: gsm8k(pair, splits, progress)}
            figures["cascade"][name] = cascades(pair)
        else:
            progress(f"{path} is not there: left out")
    if models.exists():
        figures["multi_model"] = multi_model(tables.read([models])[0], splits, progress)
    if demand.exists():
        progress("tiers of demand")
        figures["tiers"] = tiers(*(tables.read([demand / f"{part}.jsonl"])[0] for part in ("train", "dev")))
    publish(report_of(figures), json_file=json_file, plot_file=plot_file)


def report_of(figures: dict[str, Any]) -> Report:
    """A table of the rankings; what else was measured stands in the notes."""
    keys = [key for key in TARGETS if key in figures]
    rows = []
    series: dict[str, list[float | None]] = {name: [] for name in NAMES.values()}
    for key in keys:
        own = {"router": figures[key], "published": PUBLISHED[key.split("_")[0]], **figures[key]}
        for name, label in NAMES.items():
            values = own.get(name)
            series[label].append(values["apgr"] if values else None)
            if values:
                low, high = values.get("apgr_interval", (None, None))
                interval = f"{low:.3f} – {high:.3f}" if low is not None and high is not None else ""
                shares = [f"{values[cpt]:.1%}" if cpt in values else "" for cpt in ("cpt50", "cpt80")]
                rows.append([f"{key}: {label}", f"{values['apgr']:.3f}", interval, *shares])
    notes = [
        f"{key}: APGR {figures[key]['apgr']:.3f}, target {target:.2f}"
        f" {'met' if figures[key]['apgr'] >= target else 'not met'}."
        for key, target in TARGETS.items()
        if key in figures
    ]
    for key in keys:
        told = ", ".join(
            f"{share} {figures[key][f'accuracy_at_{share}']:.1%} ({figures[key]['random'][f'accuracy_at_{share}']:.1%})"
            for share in ("0.2", "0.4", "0.6")
        )
        notes.append(f"{key}: accuracy at a share of strong calls, and of a random choice of as many: {told}.")
    for name, found in figures["cascade"].items():
        for label, values in found.items():
            notes.append(
                f"{name}, {label.replace('_', ' ')}: accuracy {values['accuracy']:.1%},"
                f" strong calls {values['strong_share']:.1%}, ${values['cost']:.2f} per million tokens."
            )
    for label, values in figures.get("multi_model", {}).items():
        notes.append(f"many models, {label.replace('_', ' ')}: {values['accuracy']:.1%} at ${values['cost']:.2f}.")
    if "tiers" in figures:
        told = figures["tiers"]
        notes.append(
            f"tiers of demand: {told['accuracy']:.1%} right (majority {told['majority']:.1%}); thought or not:"
            f" {told['deep_accuracy']:.1%} (majority {told['deep_majority']:.1%})."
        )
    chart = Chart(
        title="Performance gap recovered, mean over the share of strong calls",
        x_label="",
        y_label="APGR",
        x=keys or ["none"],
        series={name: values or [None] for name, values in series.items()},
    )
    return Report(figures, ["APGR", "mean", "95 % interval", "CPT50", "CPT80"], rows, notes, chart)
