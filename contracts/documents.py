"""The contracts as documents for other languages: JSON Schemas and one AsyncAPI 3.0 document.

Both are generated from the message types, the catalogue of subjects and the comments beside the fields, so that there
is one source of truth. Binary fields have the JSON Schema type `string` with `format: binary`: msgpack `bin`, not text.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from enum import StrEnum
from typing import Any

import msgspec

from contracts import messages, routing, subjects
from contracts.codec import tag_of
from contracts.examples import EXAMPLES
from contracts.messages import MESSAGES, Claim, Message
from contracts.subjects import CHANNELS, STREAMS, Channel

VERSION = f"{Message.MAJOR}.0.0"
CONTENT_TYPE = "application/msgpack"

OVERVIEW = """\
Generators, learners and everyone else share nothing but these subjects. The major version is part of every subject.

**Messages.** Every body is one msgpack map with string keys: `type` names the message, `v` its major version. Arrays
are maps of `dtype`, `shape` and raw little-endian `data`. Readers ignore fields they do not know and refuse a `v` they
do not know. Within a major version no field is removed, renamed or retyped, and every new field has a default.
Vocabularies are open: a value not listed here is not an error. No number is NaN or infinite.

**Identity.** `Nats-Msg-Id` is the same whenever the same content is published again; consumers are idempotent by it.

**Large bodies.** A body above the server's `max_payload` is replaced by a `claim` with its digest; the body follows
from the `blob` subject of that digest: raw chunks, then a `blob_manifest`. The header `Tailrace-Offset` says where a
chunk belongs, so order and repetition do not matter. Check the size and the sha256.

**Delivery.** A channel with `x-core` is plain NATS: nothing is stored, whoever listens now gets it, at most once, and
no claim stands there. Everywhere else every message is published with a JetStream acknowledgement: `x-jetstream` names
the stream of a channel, `x-streams` describes all of them. A receive operation with `x-durable` pulls from that
existing durable consumer, shared by all workers, acknowledges explicitly, and extends `ack_wait` with in-progress
signals; a core NATS queue subscription is not a substitute, so no NATS binding names one. All other receive operations
on streams use a consumer of their own. What cannot be used goes to `dlq` with the reason.

**Reading.** Any msgpack client will do, in Python: `msgpack.unpackb(data)["reward"]`, and for an array
`numpy.frombuffer(field["data"], "<i4").reshape(field["shape"])`.
"""

PARAMETERS: dict[str, dict[str, Any]] = {
    "run": {"description": "Run id: lower-case letters, digits and hyphens.", "examples": ["demo"]},
    "purpose": {"description": "Why the task is sampled.", "examples": [item.value for item in messages.Purpose]},
    "pool": {"description": "Group of generators that shares this work.", "examples": ["default"]},
    "digest": {"description": "sha256 of the whole blob, lower-case hex.", "examples": ["0" * 64]},
    "reply": {"description": "Chosen by whoever published the task.", "examples": ["9f1c04d2a7b35e68"]},
    "stream": {"description": "Stream the unusable message lay in, lower case.", "examples": ["rollouts"]},
}

HEADERS: dict[str, Any] = {
    "type": "object",
    "required": ["Nats-Msg-Id", "Content-Type", "Tailrace-Schema"],
    "properties": {
        "Nats-Msg-Id": {
            "type": "string",
            "description": "Deterministic; JetStream drops repetitions.",
        },
        "Content-Type": {"const": CONTENT_TYPE},
        "Tailrace-Schema": {"type": "string", "description": "Tag and major version of the body, e.g. rollout/1."},
        "traceparent": {"type": "string", "description": "W3C trace context of the publisher's span."},
        "tracestate": {"type": "string", "description": "W3C trace state."},
    },
}

CHUNK: dict[str, Any] = {
    "name": "chunk",
    "title": "Raw bytes of a blob; every chunk but the last has the manifest's chunk_bytes.",
    "contentType": "application/octet-stream",
    "headers": {
        "type": "object",
        "required": ["Tailrace-Offset"],
        "properties": {
            "Tailrace-Offset": {
                "type": "string",
                "pattern": "^[0-9]+$",
                "description": "Where the chunk's first byte lies in the blob.",
            }
        },
    },
    "payload": {"type": "string", "format": "binary"},
}


def json_schema(kind: type[Message]) -> dict[str, Any]:
    """The JSON Schema (2020-12) of one message, self-contained: nested types are in `$defs`."""
    components = _components(kind, "#/$defs/{name}")
    body = components.pop(kind.__name__)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "$defs": components}


def json_schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema of every message by its tag."""
    return {tag_of(kind): json_schema(kind) for kind in MESSAGES}


def asyncapi() -> dict[str, Any]:
    """The AsyncAPI 3.0 document of all channels, operations and messages."""
    schemas: dict[str, Any] = {}
    for kind in MESSAGES:
        schemas |= _components(kind, "#/components/schemas/{name}")
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Tailrace",
            "version": VERSION,
            "description": OVERVIEW,
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "servers": {
            "local": {"host": "127.0.0.1:4222", "protocol": "nats", "description": "Any NATS server with JetStream."}
        },
        "channels": {channel.name: _channel(channel) for channel in CHANNELS},
        "operations": {name: operation for channel in CHANNELS for name, operation in _operations(channel).items()},
        "components": {
            "messages": {tag_of(kind): _message(kind) for kind in MESSAGES} | {"chunk": CHUNK},
            "schemas": schemas,
        },
        "x-streams": {
            stream.name: {
                "description": stream.description,
                "subjects": list(stream.subjects),
                "retention": stream.retention,
                "discard": stream.discard,
                "max_bytes": stream.max_bytes,
                "max_age_seconds": stream.max_age,
                "max_msgs_per_subject": stream.max_per_subject,
                "duplicate_window_seconds": stream.duplicate_window,
            }
            for stream in STREAMS
        },
        "x-key-value": {
            subjects.KV_BUCKET: {"description": "Run configuration and heads: facts that stay."},
            subjects.KV_LEASES: {"description": "Leases.", "ttl_seconds": subjects.LEASE_TTL},
        },
    }


def comments_of(cls: type) -> dict[str, str]:
    """The comment beside each field (or enum member) of a class, inherited fields included, from the source itself."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not owner.__module__.startswith("contracts."):
            continue
        source = inspect.cleandoc("\n" + inspect.getsource(owner))
        comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.lineno in comments:
                found[node.target.id] = comments[node.lineno]
    return found


def _components(kind: type[Message], template: str) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([kind], ref_template=template)
    for info in _structs(msgspec.inspect.type_info(kind)):
        schema = components[info.cls.__name__]
        comments = comments_of(info.cls)
        for name, field in schema["properties"].items():
            schema["properties"][name] = _described(field, comments.get(name))
        if issubclass(info.cls, Message):
            schema["properties"]["type"] = {"const": tag_of(info.cls), "description": "wire name of the message"}
            schema["properties"]["v"] = {"const": info.cls.MAJOR, "description": comments["v"]}
            schema["required"] = ["type", "v", *(name for name in schema["required"] if name != "type")]
    return components


def _structs(info: msgspec.inspect.Type) -> list[msgspec.inspect.StructType]:
    match info:
        case msgspec.inspect.StructType(fields=fields):
            return [info, *(found for field in fields for found in _structs(field.type))]
        case msgspec.inspect.UnionType(types=types):
            return [found for item in types for found in _structs(item)]
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.DictType(value_type=item):
            return _structs(item)
    return []


def _described(field: dict[str, Any], comment: str | None) -> dict[str, Any]:
    if field.get("contentEncoding") == "base64":
        field = {"type": "string", "format": "binary"}
    if "$ref" in field:  # tools that follow older drafts ignore what stands beside a $ref
        field = {"allOf": [{"$ref": field["$ref"]}], **{key: value for key, value in field.items() if key != "$ref"}}
    vocabulary = next((found for home in (messages, routing) if (found := getattr(home, comment or "", None))), None)
    if isinstance(vocabulary, type) and issubclass(vocabulary, StrEnum):
        field = {**field, "examples": [member.value for member in vocabulary]}
        comment = inspect.getdoc(vocabulary)
    return {**field, "description": comment} if comment else field


def _channel(channel: Channel) -> dict[str, Any]:
    return {
        "address": channel.template,
        "description": channel.description,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in _bodies(channel)},
        "parameters": {name: PARAMETERS[name] for name in channel.parameters},
        **_storage(channel),
    }


def _storage(channel: Channel) -> dict[str, Any]:
    if not channel.stored:
        return {"x-core": True}
    stream = next(stream for stream in STREAMS if stream.name == channel.stream)
    return {"x-jetstream": {"stream": stream.name, "retention": stream.retention, "discard": stream.discard}}


def _bodies(channel: Channel) -> list[str]:
    """Names of what may stand on a channel: its message, and what carries large bodies."""
    if channel.message is messages.BlobManifest:
        return [tag_of(channel.message), "chunk"]
    if channel.message is messages.DeadLetter or not channel.stored:
        return [tag_of(channel.message)]
    return [tag_of(channel.message), tag_of(Claim)]


def _operations(channel: Channel) -> dict[str, Any]:
    operations: dict[str, Any] = {}
    durable = next((durable for durable in subjects.DURABLES if durable.channel is channel), None)
    for action, services in (("send", channel.publishers), ("receive", channel.consumers)):
        for service in services:
            operation: dict[str, Any] = {
                "action": action,
                "channel": {"$ref": f"#/channels/{channel.name}"},
                "summary": f"{service}: {action} {channel.name}",
                "description": channel.description,
                "messages": [{"$ref": f"#/channels/{channel.name}/messages/{name}"} for name in _bodies(channel)],
            }
            if durable is not None and action == "receive":
                operation["x-durable"] = {
                    "name": durable.template,
                    "filter": channel.template,
                    "ack_policy": "explicit",
                    "ack_wait_seconds": durable.ack_wait,
                    "max_deliver": durable.max_deliver,
                    "max_ack_pending": durable.max_ack_pending,
                }
            operations[f"{service}.{action}.{channel.name}"] = operation
    return operations


def _message(kind: type[Message]) -> dict[str, Any]:
    tag = tag_of(kind)
    return {
        "name": tag,
        "title": kind.__name__,
        "summary": (inspect.getdoc(kind) or "").partition("\n")[0],
        "contentType": CONTENT_TYPE,
        "headers": HEADERS,
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
        "examples": [
            {"name": name, "summary": "Binary fields are shown in base64.", "payload": msgspec.to_builtins(example)}
            for name, example in EXAMPLES.items()
            if type(example) is kind
        ],
    }
