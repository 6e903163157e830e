"""Undisturbed runs of whole processes: what the figures say, and one trace from task to trained step."""

from __future__ import annotations

import json
import signal
from pathlib import Path


def spans(directory: Path, instance: str) -> list[dict]:
    return [json.loads(line) for line in (directory / f"{instance}.spans.jsonl").read_text().splitlines()]


async def test_a_run_from_first_evaluation_to_last(cluster, tmp_path):
    traces = tmp_path / "telemetry"
    async with cluster(LEARNER__EVALUATION__PROMPTS=12, TELEMETRY__DIRECTORY=traces) as c:
        c.start("learner")
        c.start("generator-1")
        c.start("generator-2")
        assert await c.finish() == 0
        summary = await c.summary()
        assert summary["steps"] == 6
        assert summary["eval_items"] == 12
        assert 0.0 <= summary["eval_before"] <= 1.0 and 0.0 <= summary["eval_after"] <= 1.0
        assert summary["rollouts_trained"] == 6 * 4 * 4
        assert summary["duplicates_trained"] == 0
        assert summary["policy_versions"] == 7
        assert summary["staleness_max"] <= summary["staleness_bound"] == 2
        assert summary["dead_letters"] == {}
        assert summary["mismatches"] == [], "the services' own figures agree with the records"
        for name in ("generator-1", "generator-2"):
            c.kill(name, signal.SIGTERM)  # flushes what it has traced
            assert await c.finish(name) == 0

    sent = {
        span["context"]["trace_id"]
        for span in spans(traces, "learner")
        if span["name"].startswith("send tailrace.v1.{run}.task")
    }
    handled = [
        span
        for name in ("generator-1", "generator-2")
        for span in spans(traces, name)
        if span["name"].startswith("process tailrace.v1.{run}.task")
    ]
    assert handled and all(span["context"]["trace_id"] in sent for span in handled)
    steps = [span for span in spans(traces, "learner") if span["links"]]
    assert len(steps) == 6
    linked = {link["context"]["trace_id"] for step in steps for link in step["links"]}
    assert len(linked) == 6 * 4, "one trace per prompt"
    assert linked <= {span["context"]["trace_id"] for span in handled}
