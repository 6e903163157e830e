"""Programs that read standard input and write standard output, against examples."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.verification.registry import Example
from router.verification.result import Result, failed, passed, undecided

MAX_OUTPUT_BYTES = 4_000_000


def run_examples(source: str, examples: Sequence[Example]) -> Result:
    """Each example in a namespace of its own; spaces at the ends of lines and empty lines at the end do not count."""
    program = compile(source, "<program>", "exec", dont_inherit=True)
    clean = dict(vars(builtins))
    for number, example in enumerate(examples, 1):
        namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": dict(clean)}
        error = _run(program, namespace, example.input)
        if isinstance(error, ModuleNotFoundError):
            return undecided(f"The program needs the module {error.name}, which is not there.")
        if isinstance(error, MemoryError | PermissionError | BlockingIOError):
            return undecided(f"The program needs more than the sandbox allows ({type(error).__name__}).")
        if error is not None:
            return failed(f"On example {number} the program ends with {type(error).__name__}: {str(error)[:150]}.")
        written = Path("output").read_bytes()[:MAX_OUTPUT_BYTES].decode("utf-8", "replace")
        if _lines(written) != _lines(example.output):
            found, expected = (repr(text.strip()[:120]) for text in (written, example.output))
            return failed(f"On example {number} the program writes {found} where {expected} is expected.")
    return passed(f"{len(examples)} examples passed.")


def _run(program: Any, namespace: dict[str, Any], given: str) -> BaseException | None:
    Path("input").write_text(given, encoding="utf-8", errors="replace")
    kept = [os.dup(descriptor) for descriptor in (0, 1)]
    files = [os.open("input", os.O_RDONLY), os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)]
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    try:
        exec(program, namespace)
    except SystemExit as error:
        return error if error.code else None
    except BaseException as error:
        return error
    finally:
        try:
            sys.stdout.flush()
        finally:
            for descriptor, file in enumerate(kept):
                os.dup2(file, descriptor)
                os.close(file)
    return None  # the streams are left to the process, which ends with this check


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
