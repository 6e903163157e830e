"""`tailrace contracts`: the contracts as documents for other languages, and the guard against breaking them."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

import contracts
from contracts import codec, compatibility, documents
from contracts.examples import EXAMPLES
from contracts.messages import Message
from infra.errors import UserError

app = typer.Typer(help="Export the contracts, or check that they keep what they promised.", no_args_is_help=True)

GOLDEN = Path(contracts.__file__).parent / "golden" / f"v{Message.MAJOR}"
LOCK = "schema.json"
SUMS = "SHA256SUMS"  # the format of sha256sum -c


@app.command()
def export(directory: Annotated[Path, typer.Argument(help="folder to write to; created if missing")]) -> None:
    """Write asyncapi.json and a JSON Schema per message."""
    schemas = directory / "schemas"
    try:
        schemas.mkdir(parents=True, exist_ok=True)
        _write_json(directory / "asyncapi.json", documents.asyncapi())
        for tag, schema in documents.json_schemas().items():
            _write_json(schemas / f"{tag}.json", schema)
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}; give a folder that can be written") from None
    typer.echo(f"{directory / 'asyncapi.json'} and {len(documents.json_schemas())} schemas in {schemas}")


@app.command()
def check() -> None:
    """Compare the contracts with what was promised; exit code 1 if a change would break a reader."""
    files, digests = read_golden(GOLDEN)
    comparison = compatibility.compare(read_lock(GOLDEN), compatibility.describe())
    problems = comparison.breaking + compatibility.check_golden(files, digests)
    for addition in comparison.additions:
        typer.echo(f"compatible, not promised yet: {addition}")
    for problem in problems:
        typer.echo(f"breaking: {problem}", err=True)
    if problems:
        typer.echo(f"A breaking change needs a new major version beside {GOLDEN.name}.", err=True)
        raise typer.Exit(1)
    typer.echo(f"{GOLDEN.name}: compatible, {len(files)} golden messages readable")


@app.command()
def lock() -> None:
    """Promise the additions: renew the lock, write golden messages for new examples. Existing ones stay as they are."""
    described = compatibility.describe()
    files, digests = read_golden(GOLDEN) if GOLDEN.exists() else ({}, {})
    if files:
        breaking = compatibility.compare(read_lock(GOLDEN), described).breaking
        breaking += compatibility.check_golden(files, digests)
        if breaking:
            raise UserError(f"not locked, these changes break readers: {'; '.join(breaking)}")
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in sorted(EXAMPLES.keys() - files.keys()):
        data = codec.encode(EXAMPLES[name])
        (GOLDEN / f"{name}.msgpack").write_bytes(data)
        digests[name] = sha256(data).hexdigest()
        typer.echo(f"new golden message {name}")
    sums = (f"{digest}  {name}.msgpack\n" for name, digest in sorted(digests.items()))
    (GOLDEN / SUMS).write_text("".join(sums))
    _write_json(GOLDEN / LOCK, described)
    typer.echo(f"{GOLDEN.name}: locked")


def read_lock(directory: Path) -> dict[str, Any]:
    """The committed description of what a major version promises."""
    try:
        described: dict[str, Any] = json.loads((directory / LOCK).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"contract lock {directory / LOCK}: {error}; restore it from version control") from None
    return described


def read_golden(directory: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """The golden messages of a major version and their promised sha256, both by name."""
    files = {path.stem: path.read_bytes() for path in sorted(directory.glob("*.msgpack"))}
    try:
        lines = [line.split() for line in (directory / SUMS).read_text().splitlines()]
        digests = {name.removesuffix(".msgpack"): digest for digest, name in lines}
    except (OSError, ValueError) as error:
        raise UserError(f"contract digests {directory / SUMS}: {error}; restore it from version control") from None
    return files, digests


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
