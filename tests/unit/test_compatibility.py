"""Breaking changes are found and additions pass, by message, nested struct, channel and stream."""

import copy
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta
from typer.testing import CliRunner

from contracts import codec, compatibility
from contracts.compatibility import check_golden, compare, describe
from contracts.examples import EXAMPLES
from contracts.messages import MESSAGES, Cancel, Message
from contracts.subjects import CHANNELS, STREAMS, TASK
from infra.cli import contracts as cli

INNER = {"a": int, "b": (str, "x")}
FIELDS = {
    "id": str,
    "count": Annotated[int, Meta(ge=0)],
    "score": float,
    "label": (str, "none"),
    "kind": Literal["red", "green"],
    "inner": None,  # the nested struct
    "many": list[int],
    "parts": dict[str, float],
    "raw": bytes,
    "maybe": (int | None, None),
}
NOTHING = object()


def message(changes: dict[str, Any] = {}, *, inner: dict[str, Any] = {}, tag: str = "probe", **config):  # noqa: B006
    """A message type like FIELDS with some fields changed or, by NOTHING, left out; likewise its nested struct."""
    nested = msgspec.defstruct("Inner", spec({**INNER, **inner}), frozen=True, kw_only=True)
    fields = {**FIELDS, "inner": nested, **changes}
    return msgspec.defstruct("Probe", spec(fields), bases=(Message,), tag=tag, frozen=True, kw_only=True, **config)


def spec(fields: dict[str, Any]) -> list:
    kept = {name: value for name, value in fields.items() if value is not NOTHING}
    return [(name, *value) if isinstance(value, tuple) else (name, value) for name, value in kept.items()]


OLD = describe([message()])


@dataclass
class Change:
    new: type[Message]
    breaking: list[str] = field(default_factory=list)  # a part of each sentence, in order
    additions: list[str] = field(default_factory=list)


CHANGES = {
    "nothing": Change(message()),
    "an optional field": Change(message({"hint": (str, "")}), additions=["probe.hint: added, str = ''"]),
    "an optional field that may be null": Change(message({"hint": (str | None, None)}), additions=["hint: added"]),
    "an optional list": Change(message({"tags": (list[str], msgspec.field(default_factory=list))}), additions=["= []"]),
    "an optional nested field": Change(message(inner={"c": (float, 0.0)}), additions=["Inner.c: added, float = 0.0"]),
    "a required field": Change(message({"hint": str}), breaking=["probe.hint: new field without a default"]),
    "a required nested field": Change(message(inner={"c": float}), breaking=["Inner.c: new field without a default"]),
    "a field removed": Change(message({"count": NOTHING}), breaking=["probe.count: removed"]),
    "an optional field removed": Change(message({"label": NOTHING}), breaking=["probe.label: removed"]),
    "a nested field removed": Change(message(inner={"b": NOTHING}), breaking=["Inner.b: removed"]),
    "a field renamed": Change(
        message({"count": NOTHING, "number": int}), breaking=["probe.count: removed", "probe.number: new field without"]
    ),
    "a field renamed, with a default": Change(
        message({"label": NOTHING, "name": (str, "none")}), breaking=["label: removed"], additions=["name: added"]
    ),
    "a field renamed on the wire only": Change(
        message(rename={"id": "key"}), breaking=["probe.id: removed", "probe.key: new field without"]
    ),
    "a field retyped": Change(message({"id": int}), breaking=["probe.id: retyped from str to int"]),
    "text to bytes": Change(message({"id": bytes}), breaking=["retyped from str to bytes"]),
    "float narrowed to int": Change(message({"score": int}), breaking=["retyped from float to int"]),
    "int widened to float": Change(message({"many": list[float]}), breaking=["retyped from list[int] to list[float]"]),
    "a range narrowed": Change(message({"count": Annotated[int, Meta(ge=1)]}), breaking=["count: retyped"]),
    "a range given up": Change(message({"count": int}), breaking=["count: retyped"]),
    "a pattern added": Change(message({"id": Annotated[str, Meta(pattern="^a")]}), breaking=["id: retyped"]),
    "a literal narrowed": Change(message({"kind": Literal["red"]}), breaking=["kind: retyped"]),
    "a literal widened": Change(message({"kind": Literal["red", "green", "blue"]}), breaking=["kind: retyped"]),
    "null allowed": Change(message({"score": float | None}), breaking=["retyped from float to float | null"]),
    "null no longer allowed": Change(message({"maybe": (int, 0)}), breaking=["retyped", "default changed"]),
    "values of a map retyped": Change(message({"parts": dict[str, str]}), breaking=["parts: retyped"]),
    "a nested field retyped": Change(message(inner={"a": float}), breaking=["Inner.a: retyped"]),
    "a default removed": Change(message({"label": str}), breaking=["label: its default was removed"]),
    "a nested default removed": Change(message(inner={"b": str}), breaking=["Inner.b: its default was removed"]),
    "a default changed": Change(message({"label": (str, "all")}), breaking=["default changed from 'none' to 'all'"]),
    "a field made optional": Change(message({"id": (str, "")}), breaking=["no longer required"]),
    "another tag": Change(
        message(tag="sonde"), breaking=["message probe: removed"], additions=["message sonde: added"]
    ),
    "arrays instead of maps": Change(message(array_like=True), breaking=["layout changed"]),
    "unknown fields refused": Change(message(forbid_unknown_fields=True), breaking=["unknown_fields changed"]),
}


def assert_found(found: list[str], expected: list[str]) -> None:
    assert len(found) == len(expected), found
    for sentence, part in zip(found, expected, strict=True):
        assert part in sentence


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_message(name):
    change = CHANGES[name]
    result = compare(OLD, describe([change.new]))
    assert_found(result.breaking, change.breaking)
    assert_found(result.additions, change.additions)


def test_a_message_may_come_and_not_go():
    fewer = describe([kind for kind in MESSAGES if kind is not Cancel])
    assert compare(describe(), fewer).breaking == ["message cancel: removed"]
    assert "message cancel: added" in compare(fewer, describe()).additions
    assert not compare(fewer, describe()).breaking


TASKS = next(stream for stream in STREAMS if stream.name == "TASKS")

CATALOGUE = {
    "a subject renamed": (
        replace(TASK, template="tailrace.v1.{run}.job.{purpose}.{pool}"),
        TASKS,
        ["channel task: subject changed"],
        [],
    ),
    "a token added to a subject": (replace(TASK, template=TASK.template + ".{shard}"), TASKS, ["subject changed"], []),
    "another stream": (replace(TASK, stream="ROLLOUTS"), TASKS, ["channel task: stream changed"], []),
    "another message": (replace(TASK, message=MESSAGES[1]), TASKS, ["channel task: message changed"], []),
    "another retention": (TASK, replace(TASKS, retention="limits"), ["stream TASKS: retention changed"], []),
    "discarding the old": (TASK, replace(TASKS, discard="old"), ["stream TASKS: discard changed"], []),
    "a subject given up": (
        TASK,
        replace(TASKS, subjects=()),
        ["stream TASKS: subject tailrace.v1.*.task.>: removed"],
        [],
    ),
    "one more subject": (
        TASK,
        replace(TASKS, subjects=(*TASKS.subjects, "tailrace.v1.*.job.>")),
        [],
        ["stream TASKS: subject tailrace.v1.*.job.>: added"],
    ),
    "a larger stream": (TASK, replace(TASKS, max_bytes=1, max_age=60.0), [], []),
    "another description": (replace(TASK, description="", consumers=("all",)), TASKS, [], []),
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_change_of_the_catalogue(name):
    channel, stream, breaking, additions = CATALOGUE[name]
    result = compare(describe(MESSAGES, [TASK], [TASKS]), describe(MESSAGES, [channel], [stream]))
    assert_found(result.breaking, breaking)
    assert_found(result.additions, additions)


def test_channels_and_streams_may_come_and_not_go():
    fewer = describe(MESSAGES, CHANNELS[1:], STREAMS[1:])
    assert compare(describe(), fewer).breaking == ["channel task: removed", "stream TASKS: removed"]
    assert compare(fewer, describe()).additions == ["channel task: added", "stream TASKS: added"]


@pytest.mark.parametrize("kind", [Any, complex, tuple[int, str], set[int]])
def test_types_that_clients_cannot_rely_on_are_no_contract(kind):
    with pytest.raises(TypeError, match="no place on the wire"):
        describe([message({"id": kind})])


# --- what is promised, as committed -----------------------------------------------------------------------------------


def test_the_contracts_keep_what_was_promised():
    files, digests = cli.read_golden(cli.GOLDEN)
    assert compare(cli.read_lock(cli.GOLDEN), describe()).breaking == []
    assert check_golden(files, digests) == []


def test_a_damaged_missing_or_unreadable_golden_message_is_found():
    files, digests = cli.read_golden(cli.GOLDEN)
    claim = files["claim"]
    assert "bytes are not the promised" in check_golden({**files, "claim": claim + b"\0"}, digests)[0]
    assert "can no longer be read" in check_golden({**files, "claim": claim + b"\0"}, digests)[1]
    assert "gone" in check_golden({k: v for k, v in files.items() if k != "claim"}, digests)[0]
    assert "not the promised" in check_golden({**files, "claim-new": claim}, digests)[0]
    assert "no such message" in check_golden({**files, "sonde": claim}, digests)[1]


def run(*arguments: str):
    return CliRunner().invoke(cli.app, arguments)


def test_the_check_passes_on_an_addition_and_fails_on_a_breaking_change(monkeypatch):
    assert run("check").exit_code == 0
    promised = describe()
    added, broken = copy.deepcopy(promised), copy.deepcopy(promised)
    added["messages"]["task"]["fields"]["hint"] = {"type": "str", "default": ""}
    del broken["messages"]["task"]["fields"]["seed"]

    monkeypatch.setattr(compatibility, "describe", lambda: added)
    result = run("check")
    assert result.exit_code == 0 and "task.hint: added" in result.output

    monkeypatch.setattr(compatibility, "describe", lambda: broken)
    result = run("check")
    assert result.exit_code == 1 and "breaking: task.seed: removed" in result.output


def test_locking_writes_new_golden_messages_and_never_old_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "GOLDEN", tmp_path / "v1")
    assert run("lock").exit_code == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "v1").iterdir()}
    assert len(first) == len(EXAMPLES) + 2

    task = msgspec.structs.replace(EXAMPLES["task"], seed=1)
    monkeypatch.setattr(cli, "EXAMPLES", {**EXAMPLES, "task": task, "task-other": task})
    assert run("lock").exit_code == 0
    second = {path.name: path.read_bytes() for path in (tmp_path / "v1").iterdir()}
    assert second.pop("task-other.msgpack") == codec.encode(task)
    assert second.pop("SHA256SUMS") != first.pop("SHA256SUMS")
    assert second == first
    assert run("check").exit_code == 0


def test_locking_refuses_a_breaking_change(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "GOLDEN", tmp_path / "v1")
    run("lock")
    broken = describe()
    del broken["messages"]["task"]["fields"]["seed"]
    monkeypatch.setattr(compatibility, "describe", lambda: broken)
    result = run("lock")
    assert "task.seed: removed" in str(result.exception)
    assert "seed" in (tmp_path / "v1" / cli.LOCK).read_text()
