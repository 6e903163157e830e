"""Logs, spans and metrics of a process, as files show them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import logging, structlog
from infra import settings, telemetry
from learner import instruments

instruments.staleness(1)  # before the set-up nothing happens, and nothing breaks
for _ in range(2):
    telemetry.setup("generator", "generator-1", settings.load())
log = structlog.get_logger()
headers = {}
with telemetry.producer_span("a.{run}"):
    telemetry.inject(headers)
    log.info("sent", answer=42)
with telemetry.consumer_span("a.{run}", headers):
    logging.getLogger("library").warning("from %s", "outside")
try:
    with telemetry.consumer_span("a.{run}", {}, links=[headers, {}]):
        raise ValueError("broken")
except ValueError:
    log.exception("failed")
log.debug("not shown")
instruments.staleness(3)
instruments.discarded(2, "stale")
telemetry.shutdown()
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Log lines, spans and the last value of each metric of one process."""
    folder = tmp_path_factory.mktemp("telemetry")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TAILRACE_", "OTEL_"))}
    environment |= {"TAILRACE_TELEMETRY__DIRECTORY": str(folder), "TAILRACE_RUN__NAME": "test"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    points = json.loads((folder / "generator-1.metrics.jsonl").read_text().splitlines()[-1])
    return {
        "logs": [json.loads(line) for line in done.stderr.splitlines()],
        "spans": [json.loads(line) for line in (folder / "generator-1.spans.jsonl").read_text().splitlines()],
        "metrics": points["resource_metrics"][0]["scope_metrics"][0]["metrics"],
    }


def test_log_lines_are_json_and_say_who_and_in_which_span(written: dict[str, list[dict[str, Any]]]) -> None:
    sent, library, failed = written["logs"]
    assert (sent["event"], sent["answer"], sent["level"]) == ("sent", 42, "info")
    assert library["event"] == "from outside"
    assert library["level"] == "warning"
    assert sent["trace_id"] == library["trace_id"]
    assert sent["span_id"] != library["span_id"]
    assert "ValueError: broken" in failed["exception"]
    assert "trace_id" not in failed
    for line in written["logs"]:
        assert (line["service"], line["instance"], line["run"]) == ("generator", "generator-1", "test")


def test_spans_follow_the_conventions_and_travel_in_headers(written: dict[str, list[dict[str, Any]]]) -> None:
    send, process, batch = written["spans"]
    assert (send["name"], send["kind"]) == ("send a.{run}", "SpanKind.PRODUCER")
    assert (process["name"], process["kind"]) == ("process a.{run}", "SpanKind.CONSUMER")
    assert process["parent_id"] == send["context"]["span_id"]
    assert process["context"]["trace_id"] == send["context"]["trace_id"]
    assert send["attributes"] == {
        "messaging.system": "nats",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.template": "a.{run}",
    }
    assert batch["kind"] == "SpanKind.CONSUMER"
    assert [link["context"]["span_id"] for link in batch["links"]] == [send["context"]["span_id"]]
    assert batch["attributes"]["messaging.batch.message_count"] == 2
    assert batch["attributes"]["error.type"] == "ValueError"
    assert batch["status"]["status_code"] == "ERROR"
    assert send["resource"]["attributes"]["service.name"] == "tailrace-generator"


def test_metrics(written: dict[str, list[dict[str, Any]]]) -> None:
    metrics = {metric["name"]: metric for metric in written["metrics"]}
    assert set(metrics) == {
        "messaging.client.operation.duration",
        "messaging.client.sent.messages",
        "messaging.process.duration",
        "tailrace.policy.staleness",
        "tailrace.discarded",
    }
    (staleness,) = metrics["tailrace.policy.staleness"]["data"]["data_points"]
    assert (staleness["count"], staleness["sum"]) == (1, 3)
    (discarded,) = metrics["tailrace.discarded"]["data"]["data_points"]
    assert (discarded["value"], discarded["attributes"]) == (2, {"tailrace.reason": "stale"})
    durations = metrics["messaging.process.duration"]["data"]["data_points"]
    assert {point["attributes"].get("error.type") for point in durations} == {None, "ValueError"}


def test_where_nobody_collects_spans_have_ids_and_cost_no_more() -> None:
    """Log lines bear the trace, whoever is called is sent it, and the caller's word on recording is passed on."""
    script = """
import structlog
from opentelemetry import trace
from infra import settings, telemetry

telemetry.setup("generator", "generator-1", settings.load())
headers = {}
with telemetry.producer_span("a.{run}"):
    telemetry.inject(headers)
    structlog.get_logger().info("sent", recording=trace.get_current_span().is_recording(), told=headers["traceparent"])
with telemetry.consumer_span("a.{run}", {"traceparent": f"00-{7:032x}-{8:016x}-01"}):
    telemetry.inject(headers)
    structlog.get_logger().info("sent", recording=trace.get_current_span().is_recording(), told=headers["traceparent"])
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TAILRACE_", "OTEL_"))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    ours, theirs = map(json.loads, done.stderr.splitlines())
    assert not ours["recording"] and ours["trace_id"] in ours["told"] and int(ours["told"][-2:], 16) % 2 == 0
    assert theirs["recording"] and theirs["trace_id"] == f"{7:032x}" and int(theirs["told"][-2:], 16) % 2 == 1


def test_an_unreachable_collector_does_not_hold_up_the_exit() -> None:
    script = "from infra import settings, telemetry\ntelemetry.setup('g', 'g-1', settings.load())\n"
    script += "with telemetry.producer_span('a'): pass\ntelemetry.shutdown()"
    environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=30)
