"""What the weights benchmark makes of its measurements."""

from __future__ import annotations

import pytest

from learner.benchmarks.weights import RATES, report_of, with_keyframes


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        (0.0, 0.01),  # a keyframe every 100 versions and nothing else
        (0.005, (1 + 99 * 0.005) / 100),
        (0.25, (1 + 3 * 0.25) / 4),  # four patches would weigh as much as a keyframe
        (0.5, (1 + 0.5) / 2),
        (0.6, 1.0),  # no patch is worth it
    ],
)
def test_keyframes_count_in_the_bytes_of_a_version(patch: float, expected: float) -> None:
    assert with_keyframes(patch) == pytest.approx(expected)


def test_targets_are_judged_by_what_was_measured() -> None:
    shares = {RATES[0]: [0.004, 0.006], RATES[1]: [0.01], RATES[2]: [0.04]}
    service = {"pack": 0.1, "publish": 0.2, "apply": 0.3, "loaded": 0.5, "first_token": 0.75}
    times = {
        "patch": [service, service],
        "keyframe": [{**service, "publish": 1.0, "apply": 0.5, "first_token": 2.5}],
        "file": [{"publish": 0.5, "apply": 0.1}],
        "objects": [{"publish": 2.0, "apply": 4.0}],
    }
    costs = {"pack": 0.125, "digest": 0.25}
    report = report_of(shares, times, costs, size=100_000_000)
    assert report.figures["patch_share"] == {"1e-06": 0.005, "5e-06": 0.01, "2e-05": 0.04}
    assert report.figures["publish_to_file"] == pytest.approx(0.4)
    assert report.figures["keyframe_publish_mb_s"] == pytest.approx(100)
    assert report.rows[0] == ["patch", "0.5 %", "0.20", "0.30", "0.50", "0.75"]
    assert report.rows[2] == ["file copy", "100.0 %", "0.50", "0.10", "–", "–"]
    assert "0.5 % (1.5 %) at 1e-06" in report.notes[0] and "at most 2.0 %, met" in report.notes[0]
    assert "0.75 s with a patch; target: below 2 s, met" in report.notes[1]
    slow = {**times, "patch": [{**service, "first_token": 2.5}]}
    assert "not met" in report_of({**shares, RATES[0]: [0.03]}, slow, costs, size=1).notes[0]
    assert "not met" in report_of(shares, slow, costs, size=1).notes[1]
    assert "pack 0.12, digest 0.25;" in report.notes[2]
