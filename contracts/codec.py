"""msgpack bytes <-> messages, with size limits, the version check and clear errors.

Any msgpack client reads these messages: they are plain maps with string keys. Old readers ignore fields they do not
know; an unknown major version is refused by name.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgpack
import msgspec

from contracts.errors import InvalidMessage, MalformedMessage, UnknownVersion
from contracts.messages import Message

MAX_BYTES = 64 * 1024 * 1024  # one decoded message, after the claim check has been resolved

M = TypeVar("M", bound=Message)


def schema_of(kind: type[Message]) -> str:
    """The schema id of a message type, e.g. `rollout/1`: its tag and its major version."""
    return f"{tag_of(kind)}/{kind.MAJOR}"


def tag_of(kind: type[Message]) -> str:
    """The wire name of a message type, the value of its field `type`."""
    return str(kind.__struct_config__.tag)


def headers_of(message: Message) -> dict[str, str]:
    """NATS headers that describe the body: content type and schema id."""
    return {"Content-Type": "application/msgpack", "Tailrace-Schema": schema_of(type(message))}


def encode(message: Message) -> bytes:
    """Pack a message. Raises `InvalidMessage` if it breaks its own contract or holds what msgpack cannot carry."""
    message.check()
    try:
        return msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    except (UnicodeEncodeError, OverflowError, ValueError) as error:
        raise InvalidMessage(f"{tag_of(type(message))}: cannot be packed: {error}") from error


def unpack(data: bytes | memoryview) -> dict[str, Any]:
    """The plain map behind a message, for tools that have no type for it. Raises `MalformedMessage`."""
    if len(data) > MAX_BYTES:
        raise MalformedMessage(f"message of {len(data)} bytes is above the limit of {MAX_BYTES}")
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises half a dozen unrelated types on hostile bytes
        raise MalformedMessage(f"not msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(body, dict):
        raise MalformedMessage(f"expected a map, got {type(body).__name__}")
    return body


def decode(data: bytes | memoryview, kind: type[M]) -> M:
    """Unpack and validate one message of type `kind`. Raises a `ContractError`; unknown fields are ignored."""
    body = unpack(data)
    major = body.get("v")
    if major != kind.MAJOR:
        raise UnknownVersion(
            f"{tag_of(kind)}: the message has major version {major!r}, this reader understands {kind.MAJOR}"
        )
    try:
        message = msgspec.convert(body, kind)
    except (msgspec.ValidationError, UnicodeError, OverflowError) as error:
        raise InvalidMessage(f"{tag_of(kind)}: {error}") from error
    message.check()
    return message
