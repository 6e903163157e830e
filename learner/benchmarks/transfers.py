"""How long a version is on its way: to a real generator's first token, and beside other ways to move the same bytes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from contracts import subjects
from contracts.messages import PolicyVersion, Purpose, Rollout, Sampling, Task
from infra import models, patches
from infra import weights as layout
from infra.benchmarks.cluster import POOL, Cluster, cluster
from infra.benchmarks.report import progress
from infra.bus import Bus
from infra.cli.interrupts import run_to_end
from infra.policies import PolicyStore
from learner.benchmarks.updates import Weights

RUN = "weights"
START_SECONDS = 120.0  # until the generator has loaded the first version
TOKEN_SECONDS = 60.0
SLOW_REPEATS = 2  # of the object store
NS = 1e9

Times = dict[str, float]  # seconds by what they were spent on


def measure(folder: Path, versions: list[Weights], repeats: int) -> dict[str, list[Times]]:
    """Times of `repeats` transfers each: as a patch, as a keyframe, as a file, through nats-py's object store."""
    return run_to_end(_measure(folder, versions, repeats))


def cpu_seconds(versions: list[Weights]) -> Times:
    """What a patch costs one thread, whatever else the machine does: the least of three tries."""
    (old, specs), (new, _) = versions[-2:]
    masters = {name: tensor.float() for name, tensor in layout.unpack(new, specs).items()}
    patch, held = patches.diff(old, new, specs), bytearray(old)

    def least(work: Callable[[], object]) -> float:
        def once() -> float:
            started = time.thread_time()
            work()
            return time.thread_time() - started

        return min(once() for _ in range(3))

    return {
        "pack": least(lambda: layout.pack(masters, torch.bfloat16)),
        "digest": least(lambda: hashlib.sha256(new).hexdigest()),
        "diff": least(lambda: patches.diff(old, new, specs)),
        "apply": least(lambda: patches.apply(held, patch, specs)),
    }


async def _measure(folder: Path, versions: list[Weights], repeats: int) -> dict[str, list[Times]]:
    found: dict[str, list[Times]] = {"patch": [], "keyframe": [], "file": [], "objects": []}
    async with cluster() as machine:
        settings: dict[str, Any] = {"run.environment": "quick-facts", "generator.threads": 1}
        async with machine.run(RUN, settings, processes={"generator": 1}):
            # Whole, patch, whole, patch, …. Three weights take turns: what is in the store already is not sent again.
            store = PolicyStore(machine.bus, RUN, keyframe_every=2)
            reader = PolicyStore(machine.bus, RUN).mirror()
            bundle = await store.put_bundle(models.bundle(folder))
            progress("the generator starts with version 0")
            await _version(machine.bus, store, bundle, versions[0], 0, START_SECONDS)
            await _version(machine.bus, store, bundle, versions[1], 1, TOKEN_SECONDS)
            for number in range(2, 2 + 2 * repeats):
                times, version = await _version(
                    machine.bus, store, bundle, versions[number % len(versions)], number, TOKEN_SECONDS
                )
                _, times["apply"] = await _timed(partial(reader.bring_to, version))
                found["patch" if version.patches else "keyframe"].append(times)
                await store.collect(2)
        progress("the same bytes as a file and through the object store")
        data = versions[0][0]
        found["file"] = [await asyncio.to_thread(_file, machine.directory, data) for _ in range(repeats)]
        found["objects"] = [await _objects(machine, data) for _ in range(min(repeats, SLOW_REPEATS))]
    return found


async def _version(
    bus: Bus, store: PolicyStore, bundle: str, weights: Weights, number: int, limit: float
) -> tuple[Times, PolicyVersion]:
    """Publish one version as a learner does after its step; a task already waits for it at the generator.

    `first_token` ends when the generator has sampled, and scored, one token with the new version.
    """
    task = Task(
        id=f"first-{number}", run=RUN, purpose=Purpose.EVAL, environment="quick-facts", seed=number, group_size=1,
        sampling=Sampling(max_tokens=1, temperature=0.0), generation=1, min_version=number,
    )  # fmt: skip
    await bus.publish(subjects.TASK, task, id=task.id, run=RUN, purpose=Purpose.EVAL, pool=POOL)
    await asyncio.sleep(0.5)  # it has been taken
    masters = {name: tensor.float() for name, tensor in layout.unpack(*weights).items()}  # as a trainer has them
    started = time.time_ns()
    packed = await asyncio.to_thread(layout.pack, masters, torch.bfloat16)
    packed_ns = time.time_ns()
    version = await store.publish(
        generation=1, version=number, data=packed[0], tensors=packed[1], bundle=bundle, parent=None
    )
    published_ns = time.time_ns()
    async with asyncio.timeout(limit):
        rollout = await _rollout(bus, task.id)
    return {
        "pack": (packed_ns - started) / NS,
        "publish": (published_ns - packed_ns) / NS,
        "loaded": (rollout.started_ns - started) / NS,
        "first_token": (rollout.finished_ns - started) / NS,
    }, version


async def _rollout(bus: Bus, task: str) -> Rollout:
    read = bus.read(subjects.ROLLOUT, kind=Rollout, consumer="bench", run=RUN, purpose=Purpose.EVAL)
    async with aclosing(read):
        async for received in read:
            if received.message.task_id == task:
                return received.message
    raise AssertionError("a subject is followed without end")


def _file(directory: Path, data: memoryview) -> Times:
    """Write and sync a file, read it back."""
    path = directory / "copy"
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter()
    read = len(path.read_bytes())
    done = time.perf_counter()
    path.unlink()
    assert read == len(data)
    return {"publish": written - started, "apply": done - written}


async def _objects(machine: Cluster, data: memoryview) -> Times:
    """Put an object and get it into a stream of blocks: its plain `get` slows down with the square of the size."""
    jetstream = machine.bus.connection.client.jetstream(timeout=60)
    store = await jetstream.create_object_store(bucket=RUN)
    _, put = await _timed(lambda: store.put("policy", bytes(data)))
    _, get = await _timed(lambda: store.get("policy", writeinto=BytesIO()))
    await jetstream.delete_object_store(RUN)
    return {"publish": put, "apply": get}


async def _timed(work: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = await work()
    return result, time.perf_counter() - started
