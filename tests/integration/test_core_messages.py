"""Messages that nobody stores: to whoever listens now, decoded, bounded, and again after the server was away."""

from __future__ import annotations

import time

import pytest

from contracts import codec
from contracts.examples import EXAMPLES
from contracts.messages import Cancel, Tokens
from contracts.subjects import CANCEL, TASK, TOKENS
from infra.bus import Bus, Unavailable
from infra.server import EmbeddedServer
from tests.integration.helpers import retained, until


def cancel(run: str, number: int) -> Cancel:
    return Cancel(run=run, task_id=f"task-{number}")


async def test_who_listens_gets_each_message_in_order_and_nothing_is_stored(bus: Bus, run: str) -> None:
    heard: list[Cancel] = []
    await bus.tell(CANCEL, cancel(run, -1), run=run)  # nobody listens yet
    listening = await bus.listen(CANCEL, heard.append, kind=Cancel, run=run)
    other = await bus.listen(CANCEL, heard.append, kind=Cancel, run=f"{run}-other")
    for number in range(100):
        await bus.tell(CANCEL, cancel(run, number), run=run)
    assert await until(lambda: len(heard) >= 100)
    assert heard == [cancel(run, number) for number in range(100)]
    await bus.connection.unsubscribe(listening)
    await bus.connection.unsubscribe(other)
    await bus.tell(CANCEL, cancel(run, 100), run=run)
    await bus.connection.client.flush()
    assert len(heard) == 100


@pytest.mark.parametrize("payload", [b"", b"\xff", b"\x80", b"\xa3abc"], ids=["empty", "no msgpack", "no map", "text"])
async def test_what_cannot_be_used_is_dropped_and_the_next_is_heard(bus: Bus, run: str, payload: bytes) -> None:
    heard: list[Tokens] = []
    listening = await bus.listen(TOKENS, heard.append, kind=Tokens, run=run, reply="here")
    subject, good = TOKENS.subject(run=run, reply="here"), EXAMPLES["tokens"]
    await bus.connection.client.publish(subject, payload)
    await bus.tell(TOKENS, good, run=run, reply="here")
    assert await until(lambda: heard)
    assert heard == [good]
    await bus.connection.unsubscribe(listening)


async def test_what_comes_faster_than_it_is_taken_is_dropped_and_the_listener_goes_on(
    bus: Bus, server: EmbeddedServer, run: str
) -> None:
    heard: list[Cancel] = []
    await bus.listen(CANCEL, heard.append, kind=Cancel, limit=10, run=run)
    await bus.connection.client.flush()
    other = await Bus.connect(server.settings, "other")
    for number in range(2000):  # into one buffer
        await other.connection.client.publish(CANCEL.subject(run=run), codec.encode(cancel(run, number)))
    await other.connection.client.flush()
    await bus.connection.client.flush()
    assert 0 < len(heard) < 2000
    await other.tell(CANCEL, cancel(run, -1), run=run)
    assert await until(lambda: heard[-1] == cancel(run, -1))
    await other.close()


@pytest.mark.parametrize("how", ["reconnected", "opened anew"])
async def test_a_listener_hears_again_after_the_connection_was_lost(
    bus: Bus, server: EmbeddedServer, run: str, how: str
) -> None:
    heard: list[Cancel] = []
    await bus.listen(CANCEL, heard.append, kind=Cancel, run=run)
    before = bus.connection.client
    if how == "reconnected":
        server.kill()
        assert await until(lambda: bus.connected, expected=False) is False
        started = time.monotonic()
        with pytest.raises(Unavailable):
            await bus.tell(CANCEL, cancel(run, 0), patience=0.5, run=run)
        assert time.monotonic() - started < 5
        server.start()
    else:
        await before._send_command(b"NONSENSE\r\n")  # the server answers with an error, and nats-py closes for good
        await before._flush_pending()
        assert await until(lambda: before.is_closed)
    assert await until(lambda: bus.connected)
    await bus.tell(CANCEL, cancel(run, 1), patience=20, run=run)
    assert await until(lambda: cancel(run, 1) in heard)
    await bus.tell(CANCEL, cancel(run, 2), run=run)
    assert await until(lambda: cancel(run, 2) in heard)
    assert heard.count(cancel(run, 2)) == 1, "one subscription, not two"
    assert (bus.connection.client is before) is (how == "reconnected")


async def test_a_task_can_be_withdrawn_and_twice(bus: Bus, run: str) -> None:
    task = EXAMPLES["task-traffic"]
    sequence = await bus.publish(TASK, task, id=f"{run}.1", run=run, purpose="serve", pool="default")
    assert await retained(bus, TASK, run=run) == 1
    for _ in range(2):
        await bus.withdraw(TASK, sequence)
    assert await retained(bus, TASK, run=run) == 0
