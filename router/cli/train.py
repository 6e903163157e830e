"""`tailrace route train`: a cold-start model of the routing policy from tables of outcomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from infra.benchmarks.report import progress, table
from infra.errors import UserError

MODEL, CARD = "model.safetensors", "card.json"


def train(
    data: Annotated[
        list[Path], typer.Option("--data", metavar="PATH", help="A table or a folder of tables; can be repeated.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help=f"Folder for {MODEL} and {CARD}.")],
    price: Annotated[
        list[str] | None,
        typer.Option("--price", metavar="MODEL=USD", help="Dollars per million tokens, where the tables don't say."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the folds and the landmarks.")] = 0,
) -> None:
    """Learn from outcomes which prompts a compact model answers well: CSV, JSON lines or JSON, also gzipped.

    A row holds a prompt (prompt, question or text) and outcomes from 0 to 1 or true and false: one column per model
    (and MODEL_price), a map in `scores` or `outcomes`, or `model`, `outcome` and `price` in a row per call. A row with
    `tier` (SIMPLE, MEDIUM, COMPLEX, REASONING) and without outcomes teaches demand. `candidates.json` beside a table
    holds prices, LICENSE its licence; both, and how well the model does out of fold, are written to its card.
    """
    from router.policy import tables
    from router.policy.train import train as fit_to

    found = tables.read(data)
    for each in found:
        left = ", ".join(f"{count} with {reason}" for reason, count in each.bad.items())
        progress(f"{each.name}: {len(each.prompts)} prompts, {len(each.models)} models; left out: {left or 'none'}")
    model = fit_to(found, dict(map(_price, price or [])), seed=seed, progress=progress).model
    try:
        out.mkdir(parents=True, exist_ok=True)
        model.save(out / MODEL)
        (out / CARD).write_text(json.dumps({"version": model.version, **model.card}, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; give another folder with --out") from None
    rows = [
        [name, *(f"{values[key]:.3f}" if key != "prompts" else str(values[key]) for key in values)]
        for name, values in model.card["outcomes"].items()
    ]
    columns = ["out of fold", "prompts", "mean", "Brier", "of the mean", "calibration error"]
    print("\n" + "\n".join(table(columns, rows)) + "\n")
    for each in model.card["training_data"]:
        if each["apgr"] is not None:
            print(f"{each['table']}: APGR {each['apgr']:.3f} out of fold (random 0.5)")
    print(f"{out / MODEL}: version {model.version}, {(out / MODEL).stat().st_size / 1e6:.1f} MB; card in {out / CARD}")


def _price(told: str) -> tuple[str, float]:
    model, _, dollars = told.rpartition("=")
    try:
        price = float(dollars)
    except ValueError:
        price = -1.0
    if not model or not 0 < price < float("inf"):
        raise UserError(f"--price {told}: give MODEL=USD, dollars per million tokens above 0")
    return model, price
