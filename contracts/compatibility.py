"""Which changes of the contracts break someone: a description of everything promised, and the comparison of two.

A change is compatible if new readers read every old message (streams are replayed) and old readers read every new one
(services are upgraded one by one). So within a major version a type or a constraint changes in neither direction, and
what may come is: optional fields, messages, channels, streams, subjects of a stream. The description of what has been
promised is committed as the lock, `golden/v{major}/schema.json`, beside golden messages whose bytes never change; a
breaking change needs a new major version and a directory of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import inspect

from contracts.codec import decode, tag_of
from contracts.errors import ContractError
from contracts.messages import MESSAGES, Message
from contracts.subjects import CHANNELS, STREAMS, Channel, Stream

_SCALARS: dict[type[inspect.Type], str] = {
    inspect.NoneType: "null",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BytesType: "bytes",
}


@dataclass
class Comparison:
    """What changed between two descriptions, one sentence each."""

    breaking: list[str] = field(default_factory=list)
    additions: list[str] = field(default_factory=list)


def describe(
    messages: Iterable[type[Message]] = MESSAGES,
    channels: Iterable[Channel] = CHANNELS,
    streams: Iterable[Stream] = STREAMS,
) -> dict[str, Any]:
    """Everything promised, as plain data: messages and nested structs by field, channels, streams.

    A field without `default` is required. Raises `TypeError` on a field whose type msgpack clients cannot rely on.
    """
    structs: dict[str, Any] = {}
    return {
        "messages": {
            tag_of(kind): {"major": kind.MAJOR, **_describe_struct(inspect.type_info(kind), structs)}
            for kind in messages
        },
        "structs": structs,
        "channels": {
            channel.name: {
                "subject": channel.template,
                "stream": channel.stream,
                "message": tag_of(channel.message),
            }
            for channel in channels
        },
        "streams": {
            stream.name: {
                "retention": stream.retention,
                "discard": stream.discard,
                "subjects": list(stream.subjects),
            }
            for stream in streams
        },
    }


def compare(old: dict[str, Any], new: dict[str, Any]) -> Comparison:
    """Compare two descriptions of one major version."""
    result = Comparison()
    for section in ("messages", "structs", "channels", "streams"):
        kind = section.removesuffix("s")
        for name in _kept(old[section], new[section], f"{kind} ", result):
            before, after, where = old[section][name], new[section][name], f"{kind} {name}"
            _compare_fields(name, before.get("fields", {}), after.get("fields", {}), result)
            _kept(before.get("subjects", []), after.get("subjects", []), f"{where}: subject ", result)
            for key in sorted((before.keys() | after.keys()) - {"fields", "subjects"}):
                if before.get(key) != after.get(key):
                    result.breaking.append(f"{where}: {key} changed from {before.get(key)!r} to {after.get(key)!r}")
    return result


def check_golden(files: dict[str, bytes], digests: dict[str, str]) -> list[str]:
    """What is wrong with the golden messages (file name without suffix -> bytes), given their promised digests."""
    kinds = {tag_of(kind): kind for kind in MESSAGES}
    problems = [f"golden {name}: the file is gone" for name in sorted(digests.keys() - files.keys())]
    for name, data in sorted(files.items()):
        if digests.get(name) != sha256(data).hexdigest():
            problems.append(f"golden {name}: its bytes are not the promised ones; golden messages never change")
        kind = kinds.get(name.split("-")[0])
        if kind is None:
            problems.append(f"golden {name}: there is no such message any more")
            continue
        try:
            decode(data, kind)
        except ContractError as error:
            problems.append(f"golden {name}: can no longer be read: {error}")
    return problems


def _kept(old: Collection[str], new: Collection[str], where: str, result: Comparison) -> list[str]:
    result.breaking.extend(f"{where}{name}: removed" for name in old if name not in new)
    result.additions.extend(f"{where}{name}: added" for name in new if name not in old)
    return [name for name in old if name in new]


def _compare_fields(owner: str, old: dict[str, Any], new: dict[str, Any], result: Comparison) -> None:
    result.breaking.extend(f"{owner}.{name}: removed" for name in old if name not in new)
    for name, after in new.items():
        where = f"{owner}.{name}"
        before = old.get(name)
        if before is None:
            if "default" in after:
                result.additions.append(f"{where}: added, {after['type']} = {after['default']!r}")
            else:
                result.breaking.append(f"{where}: new field without a default")
            continue
        if before["type"] != after["type"]:
            result.breaking.append(f"{where}: retyped from {before['type']} to {after['type']}")
        if "default" in before and "default" not in after:
            result.breaking.append(f"{where}: its default was removed")
        elif "default" in before and before["default"] != after["default"]:
            result.breaking.append(f"{where}: default changed from {before['default']!r} to {after['default']!r}")
        elif "default" in after and "default" not in before:
            result.breaking.append(f"{where}: no longer required, old readers need it")


def _describe_struct(info: inspect.Type, structs: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(info, inspect.StructType)
    described: dict[str, Any] = {"fields": {}}
    for item in info.fields:
        entry: dict[str, Any] = {"type": _render(item.type, structs)}
        if item.default is not msgspec.NODEFAULT:
            entry["default"] = msgspec.to_builtins(item.default)
        elif item.default_factory is not msgspec.NODEFAULT:
            entry["default"] = msgspec.to_builtins(item.default_factory())
        described["fields"][item.encode_name] = entry
    if info.array_like:
        described["layout"] = "array"
    if info.forbid_unknown_fields:
        described["unknown_fields"] = "refused"
    return described


def _render(info: inspect.Type, structs: dict[str, Any]) -> str:
    """A type as text, e.g. `list[PolicySegment]` or `int(ge=0)`; nested structs are added to `structs`."""
    match info:
        case inspect.StructType(cls=cls):
            if cls.__name__ not in structs:
                structs[cls.__name__] = {}  # a struct may contain itself
                structs[cls.__name__] = _describe_struct(info, structs)
            return cls.__name__
        case inspect.UnionType(types=types):
            return " | ".join(sorted(_render(item, structs) for item in types))
        case inspect.ListType(item_type=item):
            return f"list[{_render(item, structs)}]{_constraints(info)}"
        case inspect.DictType(key_type=key, value_type=value):
            return f"dict[{_render(key, structs)}, {_render(value, structs)}]{_constraints(info)}"
        case inspect.LiteralType(values=values):
            return f"literal[{', '.join(sorted(map(repr, values)))}]"
        case inspect.EnumType(cls=cls):
            return f"literal[{', '.join(sorted(repr(member.value) for member in cls))}]"
    if type(info) not in _SCALARS:
        raise TypeError(f"{type(info).__name__} has no place on the wire")
    return _SCALARS[type(info)] + _constraints(info)


def _constraints(info: inspect.Type) -> str:
    names = ("ge", "gt", "le", "lt", "multiple_of", "pattern", "min_length", "max_length")
    given = [f"{name}={getattr(info, name)!r}" for name in names if getattr(info, name, None) is not None]
    return f"({', '.join(given)})" if given else ""
