"""Move a policy through the policy store on loopback: MB/s, beside nats-py's object store and a plain file copy.

`python -m tests.benchmarks.policy_store [--megabytes 270] [--repeats 3] [--json FILE]`. The server syncs every write,
digests are verified, and the file copy writes, syncs and reads the same bytes. Figures are the fastest of the repeats;
the ratios are what to compare between machines. The object store's plain `get` slows down with the square of the size,
so it is measured with `SMALL_MEGABYTES` only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path

import numpy as np
from nats.js.object_store import ObjectStore

from contracts.messages import TensorSpec
from infra.bootstrap import bootstrap
from infra.bus import Bus
from infra.policies import PolicyStore
from infra.server import EmbeddedServer

MEGABYTE = 1_000_000
SMALL_MEGABYTES = 16
TARGET = 200.0  # MB/s each way


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def policy_store(bus: Bus, data: bytes, run: str) -> tuple[float, float]:
    """Seconds to publish a policy and to fetch it."""
    store = PolicyStore(bus, run)
    bundle = await store.put_bundle({"config.json": b"{}"})
    tensors = [TensorSpec("weight", "uint8", [len(data)], 0)]

    async def publish() -> None:
        await store.publish(generation=1, version=0, data=memoryview(data), tensors=tensors, bundle=bundle, parent=None)

    put = await seconds(publish)
    head = await store.head()
    assert head is not None
    get = await seconds(lambda: store.fetch(head))
    assert await store.collect(keep=0) == 0  # the head is always kept
    return put, get


async def object_store(bus: Bus, data: bytes, run: str, *, small: bool) -> tuple[float, float]:
    """Seconds to put an object and to get it, into a stream of blocks unless `small`."""
    jetstream = bus.connection.client.jetstream(timeout=60)
    store: ObjectStore = await jetstream.create_object_store(bucket=run)
    put = await seconds(lambda: store.put("policy", data))
    get = await seconds(lambda: store.get("policy") if small else store.get("policy", writeinto=BytesIO()))
    await jetstream.delete_object_store(run)
    return put, get


def file_copy(directory: Path, data: bytes) -> tuple[float, float]:
    """Seconds to write and sync a file, and to read it."""
    path = directory / "copy"
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter()
    assert len(path.read_bytes()) == len(data)
    read = time.perf_counter()
    path.unlink()
    return written - started, read - written


async def measure(megabytes: int, repeats: int) -> dict[str, float]:
    """All figures of the benchmark by name."""
    data = np.random.default_rng(1).bytes(megabytes * MEGABYTE)
    small = data[: SMALL_MEGABYTES * MEGABYTE]
    times: dict[str, list[tuple[float, float]]] = {"store": [], "objects": [], "objects_small": [], "file": []}
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer(Path(directory) / "nats")
        server.start()
        try:
            bus = await Bus.connect(server.settings, "benchmark")
            await bootstrap(bus, "benchmark", [], create=True)
            for repeat in range(repeats):
                run = f"repeat-{repeat}"
                times["store"].append(await policy_store(bus, data, run))
                times["objects"].append(await object_store(bus, data, run, small=False))
                times["objects_small"].append(await object_store(bus, small, run, small=True))
                times["file"].append(file_copy(Path(directory), data))
                await bus.connection.client.jetstream(timeout=60).purge_stream("WEIGHTS")
            await bus.close()
        finally:
            server.stop()
    figures = {}
    for name, pairs in times.items():
        size = SMALL_MEGABYTES if name == "objects_small" else megabytes
        figures[f"{name}_put_mb_s"] = size / min(put for put, _ in pairs)
        figures[f"{name}_get_mb_s"] = size / min(get for _, get in pairs)
    for way in ("put", "get"):
        figures[f"{way}_to_file"] = figures[f"store_{way}_mb_s"] / figures[f"file_{way}_mb_s"]
        figures[f"{way}_to_objects"] = figures[f"store_{way}_mb_s"] / figures[f"objects_{way}_mb_s"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=270, help="size of the policy")
    parser.add_argument("--repeats", type=int, default=3, help="how often everything is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.megabytes, arguments.repeats))
    rows = {
        "policy store": "store",
        "object store": "objects",
        f"object store, {SMALL_MEGABYTES} MB": "objects_small",
        "file": "file",
    }
    print(f"{'MB/s':<24}{'put':>9}{'get':>9}")
    for title, name in rows.items():
        print(f"{title:<24}{figures[f'{name}_put_mb_s']:>9.0f}{figures[f'{name}_get_mb_s']:>9.0f}")
    print(f"{'store / file':<24}{figures['put_to_file']:>9.2f}{figures['get_to_file']:>9.2f}")
    print(f"{'store / object store':<24}{figures['put_to_objects']:>9.2f}{figures['get_to_objects']:>9.2f}")
    print(f"target: at least {TARGET:.0f} MB/s each way")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
