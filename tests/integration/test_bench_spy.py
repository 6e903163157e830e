"""The sampler on a real process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from infra.benchmarks.cpu import Spy, Usage, count, divide
from infra.errors import UserError

ENCODES = """
from contracts import codec
from contracts.examples import EXAMPLES
print("ready", flush=True)
while True:
    codec.encode(EXAMPLES["rollout"])
"""


async def test_what_a_process_does_all_the_time_is_what_is_seen(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ENCODES, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 30) == b"ready\n"
        before = Usage.of(process.pid)
        spy = await Spy.on(process.pid, tmp_path / "samples.raw")
        await asyncio.sleep(1.0)
        used = Usage.of(process.pid).since(before)
        seconds = divide(used, count(await spy.stop()))
    finally:
        process.kill()
        await process.wait()
    assert used.own > 0
    assert sum(spent for (name, _), spent in seconds.items() if name == "codec") > 0.9 * used.own


async def test_a_process_that_is_not_there_is_said(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    with pytest.raises(UserError, match=f"process {process.pid}"):
        await Spy.on(process.pid, tmp_path / "samples.raw")
