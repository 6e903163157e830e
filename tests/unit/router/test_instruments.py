"""Spans and metrics of requests, as files show them: by the conventions, and connected on both sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from contracts.examples import EXAMPLES
from router.instruments import DURATION_BUCKETS, TOKEN_BUCKETS, called

SCRIPT = """
import msgspec
from contracts.examples import EXAMPLES
from infra import settings, telemetry
from router import instruments as i

outcome, decision = EXAMPLES["route_outcome"], EXAMPLES["route_decision"]
i.ended(outcome)  # before the set-up nothing happens, and nothing breaks
telemetry.setup("router", "router-1", settings.load())
upstream = {}
parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
span = i.request("auto", parent)
for attempt in outcome.attempts:
    with i.within(span):
        call = i.call(attempt.pool, attempt.role, attempt.subtask)
    with i.within(call):
        telemetry.inject(upstream)
    i.called(call, attempt)
i.answered(span, outcome)
broken = msgspec.structs.replace(outcome.attempts[0], status="partial", error="closed early", cost=7)
failed = msgspec.structs.replace(outcome, status="error", pool="", attempts=[broken], cost=7, counterfactual=0)
lost = i.request("x" * 5000, {"traceparent": "nonsense"})
i.answered(lost, failed)
i.decided(decision)
for each in (outcome, failed):
    i.ended(each)
print(upstream["traceparent"])
telemetry.shutdown()
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("telemetry")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TAILRACE_", "OTEL_"))}
    environment |= {"TAILRACE_TELEMETRY__DIRECTORY": str(folder), "TAILRACE_RUN__NAME": "test"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    points = json.loads((folder / "router-1.metrics.jsonl").read_text().splitlines()[-1])
    metrics = points["resource_metrics"][0]["scope_metrics"][0]["metrics"]
    return {
        "upstream": done.stdout.strip(),
        "spans": [json.loads(line) for line in (folder / "router-1.spans.jsonl").read_text().splitlines()],
        "metrics": {metric["name"]: metric for metric in metrics},
    }


def points(written: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return written["metrics"][name]["data"]["data_points"]


def test_a_request_and_its_calls_are_one_trace_with_the_application_and_the_upstream(written: dict[str, Any]) -> None:
    small, large, request, _ = written["spans"]
    assert [span["name"] for span in (request, small, large)] == ["chat auto", "chat small", "chat large"]
    assert [span["kind"] for span in (request, small)] == ["SpanKind.SERVER", "SpanKind.CLIENT"]
    assert request["context"]["trace_id"] == "0x0af7651916cd43dd8448eb211c80319c"
    assert request["parent_id"] == "0xb7ad6b7169203331"
    assert small["parent_id"] == large["parent_id"] == request["context"]["span_id"]
    assert written["upstream"] == f"00-0af7651916cd43dd8448eb211c80319c-{large['context']['span_id'][2:]}-01"


def test_attributes_follow_the_conventions(written: dict[str, Any]) -> None:
    small, large, request, lost = written["spans"]
    assert small["attributes"]["gen_ai.operation.name"] == "chat"
    assert small["attributes"]["gen_ai.response.model"] == "small-7b"
    assert [span["attributes"]["gen_ai.provider.name"] for span in (small, large)] == ["tailrace", "openai"]
    assert (small["attributes"]["gen_ai.usage.input_tokens"], small["attributes"]["gen_ai.usage.output_tokens"]) == (
        400,
        64,
    )
    assert request["attributes"]["gen_ai.request.model"] == "auto"
    assert request["attributes"]["gen_ai.response.model"] == "large-700b"
    assert request["attributes"]["tailrace.cost"] == pytest.approx(0.00240656)
    assert (request["attributes"]["tailrace.key"], request["attributes"]["tailrace.request"]) == (
        "build-bots",
        "req-5f0c",
    )
    assert request["status"]["status_code"] == "UNSET"
    assert lost["status"]["status_code"] == "ERROR" and lost["attributes"]["error.type"] == "error"
    assert lost["parent_id"] is None and len(lost["name"]) < 100


def test_metrics(written: dict[str, Any]) -> None:
    assert written["metrics"].keys() == {
        "gen_ai.client.token.usage",
        "gen_ai.client.operation.duration",
        "gen_ai.server.time_to_first_token",
        *(
            f"tailrace.route.{name}"
            for name in (
                "requests", "cost", "saved", "decisions", "attempts", "escalations", "verdicts", "overhead",
            )
        ),
    }  # fmt: skip
    by_kind = {}
    for point in points(written, "gen_ai.client.token.usage"):
        kind = point["attributes"]["gen_ai.token.type"]
        by_kind[kind] = by_kind.get(kind, 0) + point["sum"]
    assert by_kind == {"input": 400 + 480 + 400, "output": 64 + 60 + 64}
    assert sum(point["value"] for point in points(written, "tailrace.route.cost")) == pytest.approx(0.002406560000007)
    (saved,) = points(written, "tailrace.route.saved")
    assert saved["value"] == pytest.approx(0.0021 - 0.00240656, abs=1e-9)  # a loss is one
    statuses = {p["attributes"]["tailrace.status"]: p["value"] for p in points(written, "tailrace.route.requests")}
    assert statuses == {"ok": 1, "error": 1}
    assert {p["attributes"]["tailrace.verdict"] for p in points(written, "tailrace.route.verdicts")} == {
        "failed",
        "passed",
    }
    durations = points(written, "gen_ai.client.operation.duration")
    assert {point["attributes"].get("error.type") for point in durations} == {None, "partial"}
    assert sum(point["count"] for point in points(written, "tailrace.route.overhead")) == 2


def test_buckets_are_those_of_the_conventions() -> None:
    assert TOKEN_BUCKETS[:4] == (1, 4, 16, 64) and TOKEN_BUCKETS[-1] == 67108864
    assert DURATION_BUCKETS[0] == 0.01 and DURATION_BUCKETS[-1] == pytest.approx(81.92)


def test_what_an_upstream_calls_itself_can_be_sent_to_a_collector() -> None:
    """Half a surrogate pair cannot be encoded, and would take along all spans that are sent with it."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    attempt = msgspec.structs.replace(EXAMPLES["route_outcome"].attempts[0], model="\ud83d" + "x" * 5000)
    called(provider.get_tracer("test").start_span("chat small"), attempt)
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.response.model"].startswith("?xxx")
    assert len(encode_spans([span]).SerializeToString()) < 1000
