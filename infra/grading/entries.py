"""reasoning_gym's dataset entries as JSON and back: tuples and keys that are no strings survive."""

from __future__ import annotations

from typing import Any

_TUPLE, _ITEMS = "$tuple", "$items"


def pack(value: Any) -> Any:
    """A JSON-able form of `value`. Raises `TypeError` on what is no number, text, list, tuple or dictionary."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [pack(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): pack(item) for key, item in value.items()}
        return {_ITEMS: [[pack(key), pack(item)] for key, item in value.items()]}
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return pack(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def unpack(value: Any) -> Any:
    """The value that `pack` was given."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(unpack(item) for item in value[_TUPLE])
        if value.keys() == {_ITEMS}:
            return {unpack(key): unpack(item) for key, item in value[_ITEMS]}
        return {key: unpack(item) for key, item in value.items()}
    return value
