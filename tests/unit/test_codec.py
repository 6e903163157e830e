"""The codec refuses everything that is not a message, with the right error, and carries every message unchanged."""

import math
import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import codec
from contracts import messages as m
from contracts.errors import MAX_SENTENCE, ContractError, InvalidMessage, MalformedMessage, UnknownVersion
from contracts.examples import EXAMPLES

CLAIM = EXAMPLES["claim"]
BODY = codec.unpack(codec.encode(CLAIM))
ROLLOUT = codec.unpack(codec.encode(EXAMPLES["rollout"]))


def packed(body: dict, **changes) -> bytes:
    return msgpack.packb({**body, **changes})


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_message_survives_the_wire(name):
    message = EXAMPLES[name]
    assert codec.decode(codec.encode(message), type(message)) == message


@pytest.mark.parametrize("view", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(view):
    assert codec.decode(view(codec.encode(CLAIM)), m.Claim) == CLAIM


def test_every_message_names_type_and_version():
    for message in EXAMPLES.values():
        body = codec.unpack(codec.encode(message))
        assert (body["type"], body["v"]) == (codec.tag_of(type(message)), 1)


def test_headers_describe_the_body():
    assert codec.headers_of(CLAIM) == {"Content-Type": "application/msgpack", "Tailrace-Schema": "claim/1"}


def test_unknown_fields_are_ignored_at_every_level():
    body = packed(BODY, hint={"nested": [1, None, b"\0"]})
    assert codec.decode(body, m.Claim) == CLAIM
    body = packed(ROLLOUT, sampling={**ROLLOUT["sampling"], "min_p": 0.1}, later=[[]])
    assert codec.decode(body, m.Rollout) == EXAMPLES["rollout"]


def test_missing_optional_fields_take_their_defaults():
    body = dict(ROLLOUT)
    del body["sanitised"], body["teacher_tokens"]
    assert codec.decode(msgpack.packb(body), m.Rollout) == EXAMPLES["rollout"]


def test_an_unknown_major_version_names_both():
    with pytest.raises(UnknownVersion, match="major version 2, this reader understands version 1"):
        codec.decode(packed(BODY, v=2), m.Claim)


NESTED = b"\x81\xa1v" + b"\x91" * 1020 + b"\x01"  # repr() of this exceeds the recursion limit

HOSTILE = {
    "no bytes": (b"", MalformedMessage),
    "truncated": (packed(BODY)[:-1], MalformedMessage),
    "more after the map": (packed(BODY) + b"\x01", MalformedMessage),
    "a reserved byte": (b"\xc1", MalformedMessage),
    "a number": (b"\x01", MalformedMessage),
    "an array": (msgpack.packb([BODY]), MalformedMessage),
    "text that is not UTF-8": (packed(BODY, schema=b"-").replace(b"\xc4\x01-", b"\xa1\xff"), MalformedMessage),
    "a lone surrogate": (packed(BODY, schema=b"---").replace(b"\xc4\x03---", b"\xa3\xed\xb2\xb2"), MalformedMessage),
    "integer keys": (msgpack.packb({**BODY, 1: 2}), MalformedMessage),
    "nested too deep to parse": (b"\x91" * 100_000, MalformedMessage),
    "maps nested too deep to parse": (b"\x81\xa1a" * 100_000, MalformedMessage),
    "an array that claims 2^32 items": (b"\x81\xa1a\xdd\xff\xff\xff\xff", MalformedMessage),
    "arrays that all claim a million": (b"\x81\xa1a" + b"\xdd\x00\x0f\x42\x40" * 900 + bytes(10**6), MalformedMessage),
    "a map that claims 2^32 entries": (b"\xdf\xff\xff\xff\xff", MalformedMessage),
    "a string that claims 2^32 bytes": (b"\x81\xa1a\xdb\xff\xff\xff\xff", MalformedMessage),
    "binary that claims 2^32 bytes": (b"\x81\xa1a\xc6\xff\xff\xff\xff", MalformedMessage),
    "a million empty maps": (
        b"\x81\xa1a\xdc\x00\x10" + (b"\xdd\x00\x01\x00\x00" + b"\x80" * 65_536) * 16,
        MalformedMessage,
    ),
    "above the size limit": (bytes(codec.MAX_BYTES + 1), MalformedMessage),
    "an extension type": (packed(BODY, size=msgpack.ExtType(5, b"x")), MalformedMessage),
    "a timestamp": (packed(BODY, size=msgpack.Timestamp(1)), InvalidMessage),
    "an impossible timestamp": (b"\x81\xa1a\xc7\x0c\xff" + b"\xff" * 12, MalformedMessage),
    "no version": (msgpack.packb({k: v for k, v in BODY.items() if k != "v"}), UnknownVersion),
    "version 0": (packed(BODY, v=0), UnknownVersion),
    "a version that is text": (packed(BODY, v="1"), UnknownVersion),
    "a version that is deeply nested": (NESTED, UnknownVersion),
    "a version that is true": (packed(BODY, v=True), InvalidMessage),
    "a version that is 1.0": (packed(BODY, v=1.0), InvalidMessage),
    "another message's type": (packed(BODY, type="task"), InvalidMessage),
    "no type": (msgpack.packb({k: v for k, v in BODY.items() if k != "type"}), InvalidMessage),
    "a type that is a map": (packed(BODY, type={}), InvalidMessage),
    "a missing field": (msgpack.packb({k: v for k, v in BODY.items() if k != "digest"}), InvalidMessage),
    "text for a number": (packed(BODY, size="1"), InvalidMessage),
    "a float for an integer": (packed(BODY, size=1.0), InvalidMessage),
    "null for a number": (packed(BODY, size=None), InvalidMessage),
    "bytes for text": (packed(BODY, schema=b"rollout/1"), InvalidMessage),
    "a negative size": (packed(BODY, size=-1), InvalidMessage),
    "a size above 2^63": (packed(BODY, size=2**64 - 1), InvalidMessage),
    "a digest in upper case": (packed(BODY, digest="A" * 64), InvalidMessage),
    "a digest with a path in it": (packed(BODY, digest="../" + "a" * 61), InvalidMessage),
    "a digest with a newline after it": (packed(BODY, digest="a" * 64 + "\n"), InvalidMessage),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_with_one_sentence(name):
    data, error = HOSTILE[name]
    with pytest.raises(ContractError) as caught:
        codec.decode(data, m.Claim)
    assert type(caught.value) is error
    assert 10 < len(str(caught.value)) <= MAX_SENTENCE and "\n" not in str(caught.value)


def test_what_an_error_quotes_from_a_message_is_bounded():
    with pytest.raises(InvalidMessage) as caught:
        codec.decode(packed(BODY, type="x" * 10**6), m.Claim)
    assert len(str(caught.value)) == MAX_SENTENCE


def test_base64_text_does_not_pass_for_binary():
    tokens = {**ROLLOUT["tokens"], "data": "AAAA"}
    with pytest.raises(InvalidMessage, match="bytes"):
        codec.decode(packed(ROLLOUT, tokens=tokens), m.Rollout)


UNPUBLISHABLE = {
    "a lone surrogate": (m.Claim(schema="\udcb2", digest="a" * 64, size=1), "surrogates"),
    "an integer above 2^63": (m.Claim(schema="a", digest="a" * 64, size=2**63), "size"),
    "a value of the wrong type": (m.Claim(schema="a", digest="a" * 64, size="1"), "size"),  # type: ignore[arg-type]
    "a float for an integer": (m.Claim(schema="a", digest="a" * 64, size=1.5), "size"),  # type: ignore[arg-type]
    "an object msgpack cannot carry": (m.Claim(schema=object(), digest="a" * 64, size=1), "object"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", UNPUBLISHABLE)
def test_what_no_reader_would_take_is_never_published(name):
    message, word = UNPUBLISHABLE[name]
    with pytest.raises(InvalidMessage, match=word):
        codec.encode(message)


def test_numpy_scalars_are_written_as_plain_numbers():
    message = m.Claim(schema="a", digest="a" * 64, size=np.int64(7))  # type: ignore[arg-type]
    assert codec.decode(codec.encode(message), m.Claim).size == 7


def test_a_message_above_the_size_limit_is_not_published(monkeypatch):
    monkeypatch.setattr(codec, "MAX_BYTES", 50)
    with pytest.raises(InvalidMessage, match="above the limit"):
        codec.encode(CLAIM)


def floats(value, path=()):
    """Paths of every float in a plain body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, float):
        yield path
    for key, inner in items:
        yield from floats(inner, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_number_on_the_wire_is_nan_or_infinite(name, number):
    kind, body = type(EXAMPLES[name]), codec.unpack(codec.encode(EXAMPLES[name]))
    for path in floats(body):
        with pytest.raises(InvalidMessage):
            codec.decode(msgpack.packb(replaced(body, path, number)), kind)


KINDS = st.sampled_from(m.MESSAGES)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=8)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def decodes_or_refuses(data: bytes, kind: type[m.Message]) -> None:
    try:
        message = codec.decode(data, kind)
    except ContractError as error:
        assert len(str(error)) <= MAX_SENTENCE
    else:
        assert codec.decode(codec.encode(message), kind) == message


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=200), KINDS)
def test_random_bytes_never_raise_anything_else(data, kind):
    decodes_or_refuses(data, kind)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_damaged_messages_never_raise_anything_else(name, data):
    body = bytearray(codec.encode(EXAMPLES[name]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        match data.draw(st.sampled_from(["flip", "insert", "cut"])):
            case "flip":
                body[at] = data.draw(st.integers(0, 255))
            case "insert":
                body[at:at] = data.draw(st.binary(min_size=1, max_size=5))
            case "cut" if len(body) > 2:
                del body[at : at + data.draw(st.integers(1, 8))]
        if not body:
            break
    decodes_or_refuses(bytes(body), type(EXAMPLES[name]))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(EXAMPLES)), st.data(), VALUES)
def test_messages_with_any_value_in_any_field_never_raise_anything_else(name, data, value):
    body = codec.unpack(codec.encode(EXAMPLES[name]))
    field = data.draw(st.sampled_from(sorted(body)))
    if isinstance(body[field], dict) and body[field] and data.draw(st.booleans()):
        inner = data.draw(st.sampled_from(sorted(body[field])))
        body[field] = {**body[field], inner: value}
    else:
        body[field] = value
    decodes_or_refuses(msgpack.packb(body), type(EXAMPLES[name]))


def test_a_shape_cannot_cost_more_than_its_bytes():
    body = packed(ROLLOUT, tokens={**ROLLOUT["tokens"], "shape": [2**62] * 100_000})
    with pytest.raises(InvalidMessage, match="dimensions"):
        codec.decode(body, m.Rollout)


def test_the_bytes_of_an_array_are_little_endian():
    field = ROLLOUT["tokens"]
    assert struct.unpack("<8i", field["data"]) == (65, 42, 216, 39, 100000, 216, 39, 198)
