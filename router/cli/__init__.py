"""Commands of the router: `tailrace route …`, `tailrace costs`, `tailrace tco`."""

from __future__ import annotations

import typer

from router.cli import evaluate, policy, train

app = typer.Typer(help="The routing policy: its versions, its training, its evaluation.", no_args_is_help=True)
app.add_typer(policy.app, name="policy")
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
