"""Creating the catalogue on a real server, and refusing what differs from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from contracts.subjects import KV_BUCKET, KV_LEASES, STREAMS, TASK_WORKERS
from infra import server as server_module
from infra.bootstrap import bootstrap, bucket_config, consumer_config, stream_config
from infra.bus import Bus
from infra.errors import UserError
from infra.server import EmbeddedServer

BY_NAME = {stream.name: stream for stream in STREAMS}


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncIterator[Bus]:
    """A connection to a server without any stream."""
    server = EmbeddedServer(tmp_path)
    server.start()
    bus = await Bus.connect(server.settings, "test")
    yield bus
    await bus.close()
    server.stop()


async def names(bus: Bus) -> set[str]:
    return {str(info.config.name) for info in await bus.connection.client.jetstream().streams_info()}


async def test_it_creates_everything_once_and_finds_it_again(empty: Bus) -> None:
    await asyncio.gather(*(bootstrap(empty, "demo", ["default", "gpu"], create=True) for _ in range(3)))
    assert await names(empty) == {*BY_NAME, f"KV_{KV_BUCKET}", f"KV_{KV_LEASES}"}
    consumers = {info.name for info in await empty.connection.client.jetstream().consumers_info("TASKS")}
    purposes = ("train", "eval", "serve")
    assert consumers == {f"demo-{purpose}-{pool}" for purpose in purposes for pool in ("default", "gpu")}
    await bootstrap(empty, "demo", ["default", "gpu"], create=False)


async def test_without_the_right_to_create_it_names_what_is_missing(empty: Bus) -> None:
    with pytest.raises(UserError, match="stream TASKS does not exist"):
        await bootstrap(empty, "demo", ["default"], create=False)
    await bootstrap(empty, "demo", ["default"], create=True)
    with pytest.raises(UserError, match="consumer other-train-default of stream TASKS does not exist"):
        await bootstrap(empty, "other", ["default"], create=False)


@pytest.mark.parametrize(
    ("stream", "changes", "sentence"),
    [
        ("TASKS", {"discard": "old"}, "discard: found old, expected new"),
        ("TASKS", {"retention": "limits"}, "retention: found limits, expected workqueue"),
        ("TASKS", {"max_bytes": -1}, "max_bytes: found no limit"),
        ("ROLLOUTS", {"storage": "memory"}, "storage: found memory, expected file"),
        ("EVENTS", {"subjects": ["tailrace.v1.*.step"]}, "subjects: found"),
        ("EVENTS", {"max_age": 60.0, "duplicate_window": 60.0}, "max_age: found 60 s, expected 86400 s"),
        ("POLICY", {"duplicate_window": 60.0}, "duplicate_window: found 60 s, expected 600 s"),
        ("WEIGHTS", {"allow_direct": False}, "allow_direct: found False, expected True"),
    ],
)
async def test_a_differing_stream_is_refused(empty: Bus, stream: str, changes: dict[str, Any], sentence: str) -> None:
    await empty.connection.client.jetstream().add_stream(stream_config(BY_NAME[stream]), **changes)
    for create in (True, False):
        with pytest.raises(UserError) as error:
            for _ in range(1 if create else 0):
                await bootstrap(empty, "demo", ["default"], create=True)
            await bootstrap(empty, "demo", ["default"], create=False)
        assert f"stream {stream} differs" in str(error.value) and sentence in str(error.value)


async def test_more_than_the_catalogue_asks_for_is_fine(empty: Bus) -> None:
    jetstream = empty.connection.client.jetstream()
    await jetstream.add_stream(stream_config(BY_NAME["EVENTS"]), max_age=0.0, duplicate_window=900.0)
    await jetstream.add_stream(stream_config(BY_NAME["TASKS"]), max_bytes=1024 * 1024)
    await jetstream.add_stream(stream_config(BY_NAME["ROLLOUTS"]), max_bytes=-1)
    await bootstrap(empty, "demo", ["default"], create=True)


async def test_a_lease_bucket_with_another_lifetime_is_refused(empty: Bus) -> None:
    await empty.connection.client.jetstream().add_stream(bucket_config(KV_LEASES, ttl=60.0))
    with pytest.raises(UserError, match="KV_tailrace-leases differs from the catalogue: max_age: found 60 s"):
        await bootstrap(empty, "demo", [], create=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ack_wait": 5.0}, "ack_wait: found 5.0, expected 30.0"),
        ({"max_deliver": 3}, "max_deliver: found 3, expected -1"),
        ({"max_ack_pending": 1}, "max_ack_pending: found 1, expected 1024"),
        ({"filter_subject": "tailrace.v1.demo.task.train.other"}, "filter_subject: found"),
    ],
)
async def test_a_differing_consumer_is_refused(empty: Bus, changes: dict[str, Any], sentence: str) -> None:
    jetstream = empty.connection.client.jetstream()
    await jetstream.add_stream(stream_config(BY_NAME["TASKS"]))
    tokens = {"run": "demo", "purpose": "train", "pool": "default"}
    await jetstream.add_consumer("TASKS", consumer_config(TASK_WORKERS, **tokens), **changes)
    with pytest.raises(UserError, match="consumer demo-train-default of stream TASKS differs") as error:
        await bootstrap(empty, "demo", ["default"], create=True)
    assert sentence in str(error.value)


async def test_another_consumer_on_the_same_tasks_is_refused(empty: Bus) -> None:
    jetstream = empty.connection.client.jetstream()
    await jetstream.add_stream(stream_config(BY_NAME["TASKS"]))
    config = consumer_config(TASK_WORKERS, run="demo", purpose="train", pool="default")
    await jetstream.add_consumer("TASKS", config, name="rival", durable_name="rival")
    with pytest.raises(UserError, match="consumer demo-train-default of stream TASKS cannot be created"):
        await bootstrap(empty, "demo", ["default"], create=True)


async def test_storage_that_is_too_small_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_FILE_STORE", 1 << 30)
    server = EmbeddedServer(tmp_path)
    server.start()
    bus = await Bus.connect(server.settings, "test")
    try:
        with pytest.raises(UserError, match=r"stream ROLLOUTS cannot reserve its 4096 MiB .*max_file_store"):
            await bootstrap(bus, "demo", ["default"], create=True)
    finally:
        await bus.close()
        server.stop()


class WithoutJetStream(EmbeddedServer):
    """A server where somebody forgot to enable it."""

    def _write_config(self) -> Path:
        path = super()._write_config()
        path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("jetstream")))
        return path


async def test_a_server_without_jetstream_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.bootstrap.PATIENCE", 1.0)
    server = WithoutJetStream(tmp_path)
    server.start()
    bus = await Bus.connect(server.settings, "test")
    try:
        with pytest.raises(UserError, match="JetStream"):
            await bootstrap(bus, "demo", ["default"], create=True)
    finally:
        await bus.close()
        server.stop()
