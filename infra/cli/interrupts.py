"""Ctrl-C and SIGTERM for commands that have something to clean up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; the first Ctrl-C or SIGTERM cancels it and lets it clean up, a second one exits at once.

    What the code behind a command logs is shown only if it is an error: commands speak for themselves.

    Raises `typer.Exit` with 128 + the signal's number (130 for Ctrl-C) when it was cancelled that way.
    """
    from infra import telemetry  # heavy, and not needed for help

    telemetry.setup_logging("error", {})
    received: list[int] = []

    async def interruptible() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def stop(signum: int) -> None:
            if received:
                os._exit(128 + signum)
            received.append(signum)
            task.cancel()

        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop, signum)
        return await task

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        if not received:
            raise
        raise typer.Exit(128 + received[0]) from None
