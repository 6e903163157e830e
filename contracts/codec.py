"""msgpack bytes <-> messages, with size limits, the version check and clear errors.

Any msgpack client reads these messages: they are plain maps with string keys. Old readers ignore fields they do not
know; an unknown major version is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import msgpack
import msgspec
import numpy as np

from contracts.errors import InvalidMessage, MalformedMessage, UnknownVersion
from contracts.messages import Message

MAX_BYTES = 64 * 1024 * 1024  # one decoded message, after the claim check has been resolved
MAX_ITEMS = 1 << 17  # of one array or map: a header may claim 2^32, and memory is taken by what it claims
MAX_CONTAINERS = 1 << 17  # arrays and maps of one message: empty ones take 1 byte on the wire and 70 in memory

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
    """Pack a message. Raises `InvalidMessage` for whatever `decode` would refuse: nothing bad is ever published.

    Numpy scalars are written as the Python numbers they stand for.
    """
    tag = tag_of(type(message))
    try:
        body = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_plain)
    except TypeError as error:
        raise InvalidMessage(f"{tag}: {error}") from error
    _convert(body, type(message))
    try:
        data: bytes = msgpack.packb(body)
    except (UnicodeEncodeError, OverflowError, ValueError) as error:
        raise InvalidMessage(f"{tag}: cannot be packed: {error}") from error
    if len(data) > MAX_BYTES:
        raise InvalidMessage(f"{tag}: {len(data)} bytes are above the limit of {MAX_BYTES}")
    return data


def unpack(data: bytes | memoryview) -> dict[str, Any]:
    """The plain map behind a message, for tools that have no type for it. Raises `MalformedMessage`."""
    if len(data) > MAX_BYTES:
        raise MalformedMessage(f"{len(data)} bytes are above the limit of {MAX_BYTES}")
    counted = _counter()
    try:
        body = msgpack.unpackb(
            data,
            object_hook=counted,
            list_hook=counted,
            ext_hook=_refuse_extension,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
        )
    except Exception as error:  # msgpack raises half a dozen unrelated types on hostile bytes
        raise MalformedMessage(f"cannot be unpacked: {type(error).__name__}: {error}") from error
    if not isinstance(body, dict):
        raise MalformedMessage(f"expected a map, got {type(body).__name__}")
    return body


def decode(data: bytes | memoryview, kind: type[M]) -> M:
    """Unpack and validate one message of type `kind`. Raises a `ContractError`; unknown fields are ignored."""
    body = unpack(data)
    tag, major = tag_of(kind), body.get("v")
    if major != kind.MAJOR:
        found = f"major version {major}" if isinstance(major, int) else "no major version"
        raise UnknownVersion(f"{tag}: the message has {found}, this reader understands version {kind.MAJOR}")
    name = body.get("type")
    if name != tag:
        said = f"type {name!r}" if isinstance(name, str) else "no type"
        raise InvalidMessage(f"{tag}: the message has {said}, this reader expects {tag!r}")
    return _convert(body, kind)


def _convert(body: dict[str, Any], kind: type[M]) -> M:
    try:
        message = msgspec.convert(body, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise InvalidMessage(f"{tag_of(kind)}: {error}") from error
    message.check()
    return message


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be packed")


def _counter() -> Callable[[Any], Any]:
    number = count(1)

    def counted(container: Any) -> Any:
        if next(number) > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} arrays and maps")
        return container

    return counted


def _refuse_extension(code: int, _: bytes) -> object:
    raise ValueError(f"extension type {code} is not used here")
