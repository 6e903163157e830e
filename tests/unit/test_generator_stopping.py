"""How a generator that waits is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import cast

import pytest

from generator.loading import unless_stopped
from infra.service import Service


async def _nothing() -> AsyncGenerator[int]:
    await asyncio.Event().wait()
    yield 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_what_was_waited_for_is_let_go_of(cancelled: bool) -> None:
    service, versions = cast(Service, SimpleNamespace(stopping=asyncio.Event())), _nothing()
    waiting = asyncio.create_task(unless_stopped(service, anext(versions)))
    await asyncio.sleep(0.01)
    assert versions.ag_running
    if cancelled:
        waiting.cancel()
    else:
        service.stopping.set()
    (result,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError) if cancelled else result is None
    await versions.aclose()  # refused while somebody reads
