"""What the messaging floor reads from and writes into single messages, without a server."""

from __future__ import annotations

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from contracts import codec
from contracts.messages import DeadLetter
from infra.connection import name_token
from infra.deadletters import HEADERS, PAYLOAD_BYTES, dead_letter
from infra.pull import Raw


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.TASKS.worker.3.17.21.1700000000123456789.5",
        "$JS.ACK.hub.account.TASKS.worker.3.17.21.1700000000123456789.5",
        "$JS.ACK._.account.TASKS.worker.3.17.21.1700000000123456789.5.random",
    ],
    ids=["plain", "with a domain", "with a random token"],
)
def test_the_acknowledgement_subject_tells_the_place(reply: str) -> None:
    raw = Raw.of(Msg(Client(), subject="tailrace.v1.demo.step", reply=reply, data=b"x"))
    assert (raw.deliveries, raw.sequence, raw.consumer_sequence) == (3, 17, 21)
    assert raw.time_ns == 1700000000123456789


def test_a_dead_letter_is_bounded_and_can_be_packed_whatever_the_message_holds() -> None:
    headers = {f"name-{number}": "\udcff" * 100_000 for number in range(1000)}
    raw = Raw("a.subject", bytes(10_000_000), headers, "", 7, 1, 2, 0)
    letter = dead_letter(raw, stream="TASKS", consumer="c", code="invalid", reason="\udcb2" * 10_000, at_ns=1)
    packed = codec.encode(letter)
    assert len(packed) < 200_000
    assert len(letter.headers) == HEADERS and letter.payload == bytes(PAYLOAD_BYTES) and letter.size == 10_000_000
    assert codec.decode(packed, DeadLetter) == letter


@pytest.mark.parametrize(("name", "token"), [("generator-1", "generator-1"), ("Host.local 1", "Host-local-1")])
def test_names_become_subject_tokens(name: str, token: str) -> None:
    assert name_token(name) == token
