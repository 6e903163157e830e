"""Reports of benchmarks: tables, plots, files refused before anything is measured."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from infra import telemetry
from infra.benchmarks import report
from infra.benchmarks.report import Chart, Report
from infra.cli.bench import bench
from infra.errors import UserError

LINES = Chart("idle", "generators", "share", [1, 2, 4], {"learner": [0.5, None, 0.1], "generators": [0.1, 0.2, 0.3]})
BARS = Chart("codec", "", "µs", ["ours", "lists"], {"both": [35.0, 350.0]})


def test_a_table_is_aligned_markdown() -> None:
    assert report.table(["name", "µs"], [["ours", "35.4"], ["a longer one", "1"]]) == [
        "| name         |   µs |",
        "| ------------ | ---: |",
        "| ours         | 35.4 |",
        "| a longer one |    1 |",
    ]


@pytest.mark.parametrize("chart", [LINES, BARS], ids=["lines", "bars"])
@pytest.mark.parametrize("ending", ["svg", "png"])
def test_publishing_writes_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chart: Chart, ending: str
) -> None:
    found = Report({"ratio": 2.0}, ["what", "x"], [["ours", "2.0"]], ["Target: 1."], chart)
    report.publish(found, json_file=tmp_path / "f.json", plot_file=tmp_path / f"p.{ending}")
    assert json.loads((tmp_path / "f.json").read_text()) == {"ratio": 2.0}
    content = (tmp_path / f"p.{ending}").read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml") and len(content) > 4000
    assert "| ours |" in (printed := capsys.readouterr().out) and "Target: 1." in printed


def test_a_line_skips_what_was_not_measured_and_keeps_its_place() -> None:
    assert report.points(LINES, "learner") == [(1, 0.5), (4, 0.1)]


@pytest.mark.parametrize(
    ("check", "name"),
    [(report._writable, "no/such/folder.json"), (report._writable, "."), (report._drawable, "plot.gif")],
)
def test_a_file_that_cannot_be_written_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, check: object, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"folder that exists|ending"):
        check(Path(name))  # type: ignore[operator]


def test_sigterm_lets_a_benchmark_end_what_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "setup_logging", lambda *_: None)
    former = signal.getsignal(signal.SIGTERM)
    try:
        bench()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert ended.value.code == 128 + signal.SIGTERM
