"""The generated documents are complete, consistent, and say what the source says."""

import json
import re

import pytest
from typer.testing import CliRunner

from contracts import codec, documents
from contracts.examples import EXAMPLES
from contracts.messages import MESSAGES
from contracts.subjects import CHANNELS, STREAMS, TASK_WORKERS
from infra.cli.contracts import app

ASYNCAPI = documents.asyncapi()
SCHEMAS = documents.json_schemas()


def references(node):
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def resolve(document, reference):
    node = document
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node


@pytest.mark.parametrize("document", [ASYNCAPI, *SCHEMAS.values()], ids=["asyncapi", *SCHEMAS])
def test_every_reference_resolves_and_the_document_is_plain_json(document):
    for reference in references(document):
        assert resolve(document, reference)
    assert json.loads(json.dumps(document, allow_nan=False)) == document


@pytest.mark.parametrize("tag", SCHEMAS)
def test_every_wire_field_is_described(tag):
    for schema in [SCHEMAS[tag], *SCHEMAS[tag]["$defs"].values()]:
        assert schema["description"]
        for name, field in schema["properties"].items():
            assert field.get("description"), f"{schema['title']}.{name} has no comment beside it"


def test_descriptions_are_the_comments_of_the_source():
    rollout = SCHEMAS["rollout"]
    assert rollout["properties"]["reward"]["description"] == "None = the verifier gave no score, never a stand-in for 0"
    assert rollout["$defs"]["PolicyRef"]["properties"]["digest"]["description"].startswith("sha256 of the weight bytes")
    assert rollout["properties"]["v"]["description"] == "major version; equals the version in the subject"


def test_vocabularies_are_examples_and_not_closed():
    outcome = SCHEMAS["rollout"]["properties"]["outcome"]
    assert "verifier_timeout" in outcome["examples"] and "enum" not in outcome
    attempt = SCHEMAS["route_outcome"]["$defs"]["Attempt"]["properties"]
    assert "escalation" in attempt["role"]["examples"] and "failed" in attempt["verdict"]["examples"]


def test_schemas_name_type_version_ranges_and_binary_fields():
    schema = SCHEMAS["rollout"]
    assert schema["properties"]["type"]["const"] == "rollout" and schema["properties"]["v"]["const"] == 1
    assert {"type", "v", "id"} <= set(schema["required"]) and "sanitised" not in schema["required"]
    assert schema["properties"]["group_size"]["minimum"] == 1
    assert schema["$defs"]["Tensor"]["properties"]["data"]["format"] == "binary"
    assert schema["properties"]["sanitised"]["default"] is False


@pytest.mark.parametrize("name", EXAMPLES)
def test_schemas_name_every_field_that_is_written(name):
    body = codec.unpack(codec.encode(EXAMPLES[name]))
    assert body.keys() == SCHEMAS[body["type"]]["properties"].keys()


def test_the_document_is_asyncapi_3_and_carries_msgpack():
    assert ASYNCAPI["asyncapi"] == "3.0.0" and ASYNCAPI["defaultContentType"] == "application/msgpack"
    assert {"title", "version", "description", "license"} <= ASYNCAPI["info"].keys()


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
def test_a_channel_is_documented_with_its_subject_parameters_stream_and_messages(channel):
    documented = ASYNCAPI["channels"][channel.name]
    assert documented["address"] == channel.template
    assert list(documented["parameters"]) == re.findall(r"{(\w+)}", channel.template)
    stream = documented["x-jetstream"]["stream"] if channel.stored else ""
    assert stream == channel.stream and documented.get("x-core", False) is not channel.stored
    assert codec.tag_of(channel.message) in documented["messages"]


def test_operations_are_the_parties_of_the_channels():
    expected = {f"{party}.send.{channel.name}" for channel in CHANNELS for party in channel.publishers}
    expected |= {f"{party}.receive.{channel.name}" for channel in CHANNELS for party in channel.consumers}
    assert ASYNCAPI["operations"].keys() == expected
    for operation in ASYNCAPI["operations"].values():
        channel = operation["channel"]["$ref"]
        assert operation["messages"]  # each one of the channel's own, as AsyncAPI 3 demands
        assert all(message["$ref"].startswith(f"{channel}/messages/") for message in operation["messages"])


def test_streams_and_durable_consumers_are_extensions():
    assert ASYNCAPI["x-streams"].keys() == {stream.name for stream in STREAMS}
    durable = ASYNCAPI["operations"]["generator.receive.task"]["x-durable"]
    assert durable["ack_wait_seconds"] == TASK_WORKERS.ack_wait and durable["ack_policy"] == "explicit"
    assert "x-durable" not in ASYNCAPI["operations"]["learner.receive.rollout"]
    assert ASYNCAPI["operations"]["router.receive.route.request"]["x-durable"]["name"] == "{run}-route"


def test_messages_have_headers_payload_and_examples():
    for kind in MESSAGES:
        message = ASYNCAPI["components"]["messages"][codec.tag_of(kind)]
        assert message["contentType"] == "application/msgpack"
        assert {"Nats-Msg-Id", "Tailrace-Schema", "traceparent"} <= message["headers"]["properties"].keys()
        assert message["payload"] == {"$ref": f"#/components/schemas/{kind.__name__}"}
        assert message["examples"]


def test_export_writes_all_of_it(tmp_path):
    result = CliRunner().invoke(app, ["export", str(tmp_path / "new" / "folder")])
    assert result.exit_code == 0
    folder = tmp_path / "new" / "folder"
    assert json.loads((folder / "asyncapi.json").read_text()) == ASYNCAPI
    assert {path.stem for path in (folder / "schemas").iterdir()} == SCHEMAS.keys()


def test_export_to_a_file_names_the_place(tmp_path):
    (tmp_path / "taken").write_text("")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "taken")])
    assert "taken" in str(result.exception) and type(result.exception).__name__ == "UserError"
