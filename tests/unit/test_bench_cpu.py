"""Whose CPU seconds a sample stands for, and the shares that come of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from infra.benchmarks.bus import bus_benchmark, demo_settings, figures, wall_figures
from infra.benchmarks.cpu import Usage, count, divide, home
from infra.cli.run import Preset
from infra.errors import UserError

LOOP = [
    "run (asyncio/runners.py)",
    "BaseEventLoop._run_once (asyncio/base_events.py)",
    "Handle._run (asyncio/events.py)",
]
READ = [*LOOP, "Learner._receive (learner/service.py)", "Bus.read (infra/bus.py)"]
POOL = ["Thread.run (threading.py)", "_worker (concurrent/futures/thread.py)"]


@pytest.mark.parametrize(
    ("stack", "name"),
    [
        ([*READ, "Bus.open (infra/bus.py)", "decode (contracts/codec.py)"], "codec"),
        ([*READ, "unpackb (msgpack/__init__.py)"], "NATS client"),  # whoever calls a library pays for it
        ([*LOOP, "Client._read_loop (nats/aio/client.py)", "write (asyncio/selector_events.py)"], "NATS client"),
        (LOOP, "NATS client"),
        ([*LOOP, "Learner._receive (learner/service.py)", "Intake.offer (learner/intake.py)"], "other Python"),
        ([*LOOP, "Generator.load (generator/service.py)", "PolicyStore.fetch (infra/policies.py)"], "weights"),
        ([*POOL, "Trainer.weights (learner/trainer.py)", "pack (infra/weights.py)", "f (torch/_ops.py)"], "weights"),
        ([*POOL, "Trainer.step (learner/trainer.py)", "Tensor.backward (torch/_tensor.py)"], "model"),
        ([*POOL, "dumps (json/__init__.py)"], "other Python"),
        ([*LOOP, "EpollSelector.select (selectors.py)"], None),
        (POOL, None),
    ],
)
def test_a_sample_belongs_to_the_innermost_known_home(stack: list[str], name: str | None) -> None:
    place = home(stack)
    assert (place and place[0]) == name
    assert place is None or place[1] in stack


def test_seconds_of_a_thread_go_where_its_samples_are() -> None:
    lines = [
        f"thread (7): MainThread;{';'.join(READ)} 3",
        f"thread (7): MainThread;{';'.join([*READ, 'decode (contracts/codec.py)'])} 1",
        f"thread (7): MainThread;{';'.join([*LOOP, 'EpollSelector.select (selectors.py)'])} 500",
        f"thread (8): torch;{';'.join([*POOL, 'Tensor.backward (torch/_tensor.py)'])} 400",
        f"thread (9): idle;{';'.join(POOL)} 2",
        "not a sample",
    ]
    samples = count(lines)
    assert {thread: counted.total() for thread, counted in samples.items()} == {7: 4, 8: 400}
    seconds = divide(Usage(own=30.0, threads={7: 4.0, 8: 20.0, 10: 5.0}, below=0.0), samples)
    assert seconds == {
        ("NATS client", "Bus.read (infra/bus.py)"): 3.0,
        ("codec", "decode (contracts/codec.py)"): 1.0,
        ("model", "Tensor.backward (torch/_tensor.py)"): 20.0,
        ("model", "native threads"): 5.0,
        ("other Python", "ended threads"): 1.0,
    }


def test_usage_counts_own_threads_and_ended_children() -> None:
    before = Usage.of(os.getpid())
    burner = threading.Thread(target=burn, args=(0.1,))
    burner.start()
    burner.join()
    burn(0.2)
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    used = Usage.of(os.getpid()).since(before)
    assert used.own >= 0.25 and used.below >= 0.25  # the kernel counts in ticks of 10 ms
    assert 0.15 <= used.threads[threading.get_native_id()] <= used.own


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_shares_of_cpu_and_of_wall_time() -> None:
    def step(number: int, wall: float, **seconds: float) -> Any:
        return SimpleNamespace(step=number, wall_seconds=wall, seconds=seconds)

    def generator(wall: float, load: float) -> Any:
        return SimpleNamespace(generator="generator-1", wall_seconds=wall, seconds={"load": load})

    steps = [step(2, 20.0, pack=9.0), step(3, 30.0, pack=0.5, train=8.0), step(4, 40.0, publish=0.5, pack=1.0)]
    wall = wall_figures(steps, [generator(20.0, 1.0)], [generator(60.0, 2.0)])
    found = figures({("codec", "a"): 1.0, ("nats-server", "b"): 3.0, ("model", "c"): 16.0}, wall)
    assert found["overhead_fraction"] == pytest.approx(4 / 20)
    assert found["learner_wall_fraction"] == pytest.approx(2 / 20)
    assert found["generator_wall_fraction"] == pytest.approx(1 / 40)
    assert found["overhead_wall_fraction"] == pytest.approx(3 / 60)
    assert found["hottest"] == {"nats-server: b": 0.75, "codec: a": 0.25}


def test_the_demo_is_the_preset() -> None:
    settings, processes = demo_settings("smollm2")
    assert settings["learner.sampling.stop"] == ["\n"] and settings["run.environment"] == "quick-facts"
    assert processes == {"learner": 1, "generator": 2}


def test_a_demo_whose_model_computes_in_other_processes_is_refused() -> None:
    with pytest.raises(UserError, match="smollm2-vllm"):
        bus_benchmark(preset=Preset.SMOLLM2_VLLM)


def test_counters_keep_threads_apart() -> None:
    lines = [f"thread ({thread}): t;Bus.read (infra/bus.py) {thread}" for thread in (1, 2)]
    place = ("NATS client", "Bus.read (infra/bus.py)")
    assert count(lines) == {1: Counter({place: 1}), 2: Counter({place: 2})}
