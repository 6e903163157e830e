"""Messages and keys over a real server, and what becomes of them when server, consumer or content fail."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from contracts import codec
from contracts.errors import InvalidMessage
from contracts.messages import Heartbeat, Rollout
from contracts.subjects import BLOB, HEARTBEAT, ROLLOUT, TASK
from contracts.tensors import Tensor
from infra.blobs import BlobStore
from infra.bootstrap import bootstrap
from infra.bus import Bus, PublishFailed, QueueFull, Unavailable
from infra.connection import SMALLEST_PAYLOAD
from infra.errors import UserError
from infra.server import EmbeddedServer
from infra.settings import NatsSettings
from tests.integration.helpers import dead_letters, first, publish_raw, retained, until
from tests.unit.builders import rollout


def beat(run: str, number: int, text: str = "") -> Heartbeat:
    return Heartbeat(run=run, service="test", instance="test", state="ready", detail=text, started_ns=0, at_ns=number)


async def publish_beats(bus: Bus, run: str, numbers: range) -> list[int]:
    return [await bus.publish(HEARTBEAT, beat(run, number), id=f"{run}.{number}", run=run) for number in numbers]


async def beats(bus: Bus, run: str, **how: Any) -> list[int]:
    return [got.message.at_ns async for got in bus.read(HEARTBEAT, kind=Heartbeat, consumer="test", run=run, **how)]


# --- publish and read -------------------------------------------------------------------------------------------------


async def test_a_message_arrives_with_its_place_and_headers(bus: Bus, run: str) -> None:
    before = time.time_ns()
    sequence = await bus.publish(HEARTBEAT, beat(run, 7), id=f"{run}.7", run=run)
    (got,) = await first(bus.read(HEARTBEAT, consumer="test", run=run), 1)
    assert got.message == beat(run, 7)
    assert got.sequence == sequence
    assert got.subject == f"tailrace.v1.{run}.heartbeat"
    assert got.headers["Tailrace-Schema"] == "heartbeat/1" and got.headers["Nats-Msg-Id"] == f"{got.subject}/{run}.7"
    assert before - 10**9 < got.time_ns < time.time_ns() + 10**9


async def test_the_same_id_is_stored_once(bus: Bus, run: str) -> None:
    sequences = {await bus.publish(HEARTBEAT, beat(run, 1), id=f"{run}.1", run=run) for _ in range(3)}
    assert len(sequences) == 1
    assert await retained(bus, HEARTBEAT, run=run) == 1


async def test_messages_published_together_are_stored_each_once_and_in_order(bus: Bus, run: str) -> None:
    messages = {f"{run}.{number}": beat(run, number) for number in range(40)}
    (first_id,) = await bus.publish_all(HEARTBEAT, {f"{run}.7": messages[f"{run}.7"]}, run=run)
    sequences = await bus.publish_all(HEARTBEAT, messages, run=run)
    assert sequences[7] == first_id, "it was there already"
    assert await bus.publish_all(HEARTBEAT, messages, run=run) == sequences
    read = {got.sequence: got.message.at_ns async for got in bus.read(HEARTBEAT, consumer="t", follow=False, run=run)}
    assert [read[sequence] for sequence in sequences] == list(range(40)) and len(read) == 40
    assert await bus.publish_all(HEARTBEAT, {}, run=run) == []


async def test_the_same_id_in_another_run_is_another_message(bus: Bus, run: str) -> None:
    assert len({await bus.publish(HEARTBEAT, beat(run, 1), id="1", run=name) for name in (run, f"{run}-b")}) == 2


async def test_where_reading_starts(bus: Bus, run: str) -> None:
    sequences = await publish_beats(bus, run, range(5))
    assert await beats(bus, run, follow=False) == [0, 1, 2, 3, 4]
    assert await beats(bus, run, follow=False, start=sequences[2]) == [2, 3, 4]
    assert await beats(bus, run, follow=False, start=1) == [0, 1, 2, 3, 4]
    assert await beats(bus, run, follow=False, last=True) == [4]
    assert await beats(bus, run, follow=False, start=sequences[4] + 1) == []
    # What came before the first retained message is gone; reading goes on at that one.
    await bus.connection.client.jetstream().purge_stream("EVENTS", subject=HEARTBEAT.subject(run=run), keep=2)
    assert await beats(bus, run, follow=False, start=sequences[0]) == [3, 4]


async def test_a_position_beyond_the_end_of_the_stream_does_not_hide_new_messages(bus: Bus, run: str) -> None:
    # A checkpoint of a server whose store was replaced.
    reading = asyncio.create_task(first(bus.read(HEARTBEAT, consumer="test", start=10**9, run=run), 1))
    await asyncio.sleep(0.2)
    await publish_beats(bus, run, range(1))
    assert [got.message.at_ns for got in await reading] == [0]


async def test_new_messages_reach_a_waiting_reader(bus: Bus, run: str) -> None:
    await publish_beats(bus, run, range(2))
    reading = asyncio.create_task(first(bus.read(HEARTBEAT, consumer="test", last=True, run=run), 3))
    await asyncio.sleep(0.2)
    await publish_beats(bus, run, range(2, 4))
    assert [got.message.at_ns for got in await reading] == [1, 2, 3]


async def test_a_busy_reader_does_not_keep_the_event_loop(bus: Bus, run: str) -> None:
    await bus.publish_all(HEARTBEAT, {f"{run}.{number}": beat(run, number) for number in range(200)}, run=run)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with aclosing(bus.read(HEARTBEAT, consumer="test", follow=False, run=run)) as messages:
        await anext(messages)
        await asyncio.sleep(0.5)  # the rest has arrived: the reader never waits
        beside = asyncio.create_task(others())
        for _ in range(198):
            await anext(messages)
            time.sleep(0.002)  # noqa: ASYNC251
    assert turns >= 15
    beside.cancel()


async def test_a_reader_that_stops_early_leaves_no_consumer_behind(bus: Bus, run: str) -> None:
    await publish_beats(bus, run, range(3))
    before = (await bus.stream_info("EVENTS")).state.consumer_count
    await first(bus.read(HEARTBEAT, consumer="test", run=run), 1)
    cancelled = asyncio.create_task(first(bus.read(HEARTBEAT, consumer="test", run=run), 9))
    await asyncio.sleep(0.3)
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    async with asyncio.timeout(5):
        while (await bus.stream_info("EVENTS")).state.consumer_count > before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


# --- content ----------------------------------------------------------------------------------------------------------


def long_rollout(run: str) -> Rollout:
    """100,000 tokens: 1.3 MB, above the server's default payload limit."""
    length, prompt = 100_000, 1_000
    logprobs = np.zeros(length, np.float32)
    logprobs[prompt:] = -np.random.default_rng(1).random(length - prompt, dtype=np.float32)
    return rollout(run=run, length=length, prompt_length=prompt, logprobs=Tensor.of(logprobs))


async def test_a_message_above_the_payload_limit_takes_the_claim_check(bus: Bus, run: str) -> None:
    message = long_rollout(run)
    assert len(codec.encode(message)) > bus.connection.max_payload
    await bus.publish(ROLLOUT, message, id=message.id, run=run, purpose="train")
    assert await retained(bus, BLOB, run=run) > 0
    (got,) = await first(bus.read(ROLLOUT, consumer="test", run=run), 1)
    assert got.message == message


async def test_a_lost_body_is_a_dead_letter_and_the_reader_goes_on(bus: Bus, run: str) -> None:
    message, after = long_rollout(run), rollout(run=run)
    await bus.publish(ROLLOUT, message, id=message.id, run=run, purpose="train")
    blobs = BlobStore(bus.connection, BLOB, run)
    for digest in await blobs.list():
        await blobs.delete(digest)
    await bus.publish(ROLLOUT, after, id="after", run=run, purpose="train")
    (got,) = await first(bus.read(ROLLOUT, consumer="test", run=run), 1)
    assert got.message == after
    assert [letter.code for letter in await dead_letters(bus, run)] == ["blob_missing"]


def wire(**changes: Any) -> bytes:
    fields = msgpack.unpackb(codec.encode(rollout()))
    return msgpack.packb(fields | changes)


POISON = {
    "nothing": (b"", "malformed"),
    "not msgpack": (b"\xc1 no", "malformed"),
    "not a map": (msgpack.packb([1, 2]), "malformed"),
    "another major version": (wire(v=2), "unknown_version"),
    "another type": (codec.encode(beat("x", 1)), "invalid"),
    "a mistyped field": (wire(group_size="many"), "invalid"),
    "NaN": (wire(reward=float("nan")), "invalid"),
    "log-probs that are not finite": (
        wire(logprobs={"dtype": "float32", "shape": [5], "data": np.full(5, np.inf, "<f4").tobytes()}),
        "invalid",
    ),
    "shapes that disagree": (wire(tokens={"dtype": "int32", "shape": [9], "data": bytes(36)}), "invalid"),
    "too few bytes": (wire(tokens={"dtype": "int32", "shape": [5], "data": bytes(3)}), "invalid"),
    "invalid UTF-8": (codec.encode(rollout()).replace(b"reverse-text", b"reverse\xff\xfftex"), "invalid"),
}


async def test_what_cannot_be_used_is_a_dead_letter_and_the_reader_goes_on(bus: Bus, run: str) -> None:
    subject = ROLLOUT.subject(run=run, purpose="train")
    sequences = {await publish_raw(bus, subject, payload): name for name, (payload, _) in POISON.items()}
    claim = {"Tailrace-Schema": "claim/1"}
    sequences[await publish_raw(bus, subject, b"junk", **claim)] = "a claim that is none"
    good = rollout(run=run)
    await bus.publish(ROLLOUT, good, id=good.id, run=run, purpose="train")
    (got,) = await first(bus.read(ROLLOUT, consumer="reader", run=run), 1)
    assert got.message == good
    letters = await dead_letters(bus, run)
    found = {sequences[letter.sequence]: letter.code for letter in letters}
    assert found.pop("a claim that is none") == "malformed"
    # Which of the contract's codes a hostile message gets is the codec's business, except for these.
    assert set(found) == set(POISON)
    for name, (payload, code) in POISON.items():
        assert found[name] == code or name == "invalid UTF-8", name
        letter = next(letter for letter in letters if sequences[letter.sequence] == name)
        assert letter.reason and letter.payload == payload and letter.consumer == "reader"
    # Reading again, as after a restart, repeats no letter.
    await first(bus.read(ROLLOUT, consumer="reader", run=run), 1)
    assert len(await dead_letters(bus, run)) == len(letters)


async def test_nobody_publishes_what_breaks_the_contract(bus: Bus, run: str) -> None:
    with pytest.raises(InvalidMessage):
        await bus.publish(ROLLOUT, rollout(run=run, reward=float("nan")), id="x", run=run, purpose="train")
    assert await retained(bus, ROLLOUT, run=run) == 0


async def test_a_full_work_queue_pushes_back_at_once(bus: Bus, run: str) -> None:
    filler = bytes(900 * 1024)
    subject = TASK.subject(run=run, purpose="train", pool="filler")
    try:
        with pytest.raises(QueueFull, match="maximum bytes exceeded"):
            for _ in range(100):
                await publish_raw(bus, subject, filler)
    finally:
        await bus.connection.client.jetstream().purge_stream(TASK.stream, subject=subject)
    await publish_raw(bus, subject, filler)
    await bus.connection.client.jetstream().purge_stream(TASK.stream, subject=subject)


# --- faults -----------------------------------------------------------------------------------------------------------


async def test_a_killed_server_costs_no_message(bus: Bus, server: EmbeddedServer, run: str) -> None:
    count = 300
    reading = asyncio.create_task(
        first(bus.read(HEARTBEAT, consumer="test", kind=Heartbeat, run=run), count, seconds=40)
    )

    async def publish() -> list[int]:
        sequences = []
        for number in range(0, count, 4):  # one alone, then some at once
            sequences += await publish_beats(bus, run, range(number, number + 1))
            group = {f"{run}.{member}": beat(run, member) for member in range(number + 1, number + 4)}
            sequences += await bus.publish_all(HEARTBEAT, group, run=run)
            await asyncio.sleep(0.008)
        return sequences

    publishing = asyncio.create_task(publish())
    for _ in range(2):
        await asyncio.sleep(0.3)
        server.kill()
        assert not await until(lambda: bus.connected, expected=False)
        await asyncio.sleep(0.1)
        server.start()
        assert await until(lambda: bus.connected)
    sequences = await publishing
    assert sequences == sorted(set(sequences))
    got = await reading
    assert [item.message.at_ns for item in got] == list(range(count))
    assert [item.sequence for item in got] == sequences


async def test_a_reader_survives_the_loss_of_its_consumer(bus: Bus, run: str) -> None:
    await publish_beats(bus, run, range(2))
    reading = asyncio.create_task(first(bus.read(HEARTBEAT, consumer=f"lost-{run}", run=run), 4))
    await asyncio.sleep(0.3)
    jetstream = bus.connection.client.jetstream()
    names = [info.name for info in await jetstream.consumers_info("EVENTS") if info.name.startswith(f"lost-{run}")]
    assert len(names) == 1
    await jetstream.delete_consumer("EVENTS", names[0])
    await publish_beats(bus, run, range(2, 4))
    assert [got.message.at_ns for got in await reading] == [0, 1, 2, 3]


async def test_publishing_gives_up_when_its_patience_is_over(bus: Bus, server: EmbeddedServer, run: str) -> None:
    server.kill()
    try:
        with pytest.raises(PublishFailed, match=rf"/{run}\.1: .*0\.3 s"):
            await bus.publish(HEARTBEAT, beat(run, 1), id=f"{run}.1", patience=0.3, run=run)
        assert not bus.connected
    finally:
        server.start()
    assert await until(lambda: bus.connected)


async def test_a_connection_closed_by_an_error_is_opened_again(bus: Bus, run: str) -> None:
    client = bus.connection.client
    await client._send_command(b"NONSENSE\r\n")  # the server answers with an error, and nats-py closes for good
    await client._flush_pending()
    assert await until(lambda: client.is_closed)
    await publish_beats(bus, run, range(1))
    assert bus.connected and await beats(bus, run, follow=False) == [0]


async def test_reconnecting_that_has_stopped_is_started_anew(bus: Bus, server: EmbeddedServer, run: str) -> None:
    server.kill()
    client = bus.connection.client
    assert await until(lambda: client.is_reconnecting)
    assert client._reconnection_task is not None
    client._reconnection_task.cancel()  # as an error that nobody foresaw would end it
    server.start()
    assert await until(lambda: bus.connected)
    await publish_beats(bus, run, range(1))
    assert await beats(bus, run, follow=False) == [0]


async def test_closing_is_bounded_when_the_server_is_away(server: EmbeddedServer) -> None:
    bus = await Bus.connect(server.settings, "closing")
    server.kill()
    try:
        async with asyncio.timeout(6):
            await bus.close()
        assert not bus.connected
    finally:
        server.start()


async def test_a_closed_bus_keeps_nobody_waiting(server: EmbeddedServer, run: str) -> None:
    bus = await Bus.connect(server.settings, "closing")
    await bootstrap(bus, run, [], create=True)
    reading = asyncio.create_task(first(bus.read(HEARTBEAT, consumer="test", run=run), 1))
    await asyncio.sleep(0.2)
    await bus.close()
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match="closed"):
            await reading
        with pytest.raises(PublishFailed, match="closed"):
            await publish_beats(bus, run, range(1))


async def test_an_unreachable_server_is_a_sentence() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{unused.getsockname()[1]}"
        settings = NatsSettings(url=url, user="me", password=SecretStr("hush-hush"), connect_timeout=0.5)
        with pytest.raises(UserError) as error:
            await Bus.connect(settings, "test")
    assert url in str(error.value) and "0.5 s" in str(error.value) and "hush" not in str(error.value)


async def test_a_server_for_tiny_messages_is_refused_in_a_sentence(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, max_payload=SMALLEST_PAYLOAD - 1)
    server.start()
    try:
        with pytest.raises(UserError, match=r"its max_payload is 65535 bytes, .* raise it"):
            await Bus.connect(server.settings, "test")
    finally:
        server.stop()


async def test_refused_credentials_are_a_sentence_at_once(server: EmbeddedServer) -> None:
    wrong = server.settings.model_copy(update={"password": SecretStr("hush-hush")})
    async with asyncio.timeout(5):
        with pytest.raises(UserError, match=r"refused the credentials of user 'tailrace-") as error:
            await Bus.connect(wrong, "test")
    assert "hush" not in str(error.value)


async def test_a_missing_credentials_file_is_a_sentence(server: EmbeddedServer, tmp_path: Path) -> None:
    settings = server.settings.model_copy(update={"credentials": tmp_path / "none.creds"})
    with pytest.raises(UserError, match=r"none\.creds"):
        await Bus.connect(settings, "test")


class RestrictedServer(EmbeddedServer):
    """Its user may not publish heartbeats."""

    def _write_config(self) -> Path:
        path = super()._write_config()
        lines = [line for line in path.read_text().splitlines() if not line.startswith("authorization")]
        password = self._password
        lines.append(
            f'authorization {{ users: [ {{ user: "{self._user}", password: "{password}", permissions: {{ '
            'publish: { deny: ["tailrace.v1.*.heartbeat"] } } } ] }'
        )
        path.write_text("\n".join(lines) + "\n")
        return path


async def test_a_permission_violation_is_an_error_soon_and_a_line_in_the_log(tmp_path: Path) -> None:
    server = RestrictedServer(tmp_path)
    server.start()
    try:
        bus = await Bus.connect(server.settings, "test")
        with capture_logs() as logs, pytest.raises(PublishFailed, match="no permission"):
            async with asyncio.timeout(10):
                await bus.publish(HEARTBEAT, beat("demo", 1), id="1", run="demo")
        assert any("tailrace.v1.demo.heartbeat" in line.get("detail", "") for line in logs)
        await bus.close()
    finally:
        server.kill()


# --- keys -------------------------------------------------------------------------------------------------------------


async def test_keys_are_compared_and_set(bus: Bus, run: str) -> None:
    key = f"{run}.key"
    assert await bus.get(key) is None
    created = await bus.create(key, b"1")
    assert created is not None and await bus.get(key) == (b"1", created)
    assert await bus.create(key, b"2") is None
    updated = await bus.update(key, b"2", created)
    assert updated is not None and await bus.get(key) == (b"2", updated)
    assert await bus.update(key, b"3", created) is None
    assert await bus.delete(key, created) is False
    assert await bus.delete(key, updated) is True
    assert await bus.get(key) is None
    assert await bus.update(key, b"3", updated) is None
    again = await bus.create(key, b"4")
    assert again is not None and await bus.get(key) == (b"4", again)
    assert await bus.put(key, b"5") > again
    assert await bus.keys(f"{run}.>") == {key}


async def test_concurrent_counters_lose_nothing_over_a_killed_server(
    bus: Bus, server: EmbeddedServer, run: str
) -> None:
    key, added, enough = f"{run}.counter", 0, False
    await bus.create(key, b"0")

    async def count() -> None:
        nonlocal added
        while not enough:
            value, revision = await bus.get(key) or (b"0", 0)
            if await bus.update(key, str(int(value) + 1).encode(), revision) is not None:
                added += 1

    counting = asyncio.gather(*(count() for _ in range(4)))
    assert await until(lambda: added >= 10)
    server.kill()
    server.start()
    before = added
    assert await until(lambda: added >= before + 10, seconds=30)
    enough = True
    async with asyncio.timeout(30):
        await counting
    value, _ = await bus.get(key) or (b"", 0)
    assert int(value) == added
