"""Made-up sessions of a coding agent: real requests, consequences, an end."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import pytest

from router.admission.parse import parse
from router.benchmarks.agents import interval
from router.benchmarks.gateway import quantile, report
from router.benchmarks.sessions import LOOKS, Session, Work, well_formed


def played(seed: int, tier: str) -> tuple[Session, Counter[Work]]:
    session, done = Session(seed), Counter[Work]()
    while not session.done:
        done[session.work] += 1
        session.advance(session.answer(tier))
    return session, done


def test_the_same_seed_gives_the_same_session() -> None:
    assert played(3, "strong")[0].messages == played(3, "strong")[0].messages != played(4, "strong")[0].messages


@pytest.mark.parametrize("tier", ["compact", "strong"])
def test_every_request_is_one_that_the_gateway_takes(tier: str) -> None:
    session = Session(7)
    for _ in range(12):
        request = parse(msgspec.json.encode(session.body))
        assert request.tools and request.session == parse(msgspec.json.encode(session.body)).session
        session.advance(session.answer(tier))


def test_sessions_end_and_strong_models_end_them_better() -> None:
    strong, compact = ([played(seed, tier) for seed in range(150)] for tier in ("strong", "compact"))
    assert sum(each.success for each, _ in strong) > sum(each.success for each, _ in compact) + 10
    work = sum((done for _, done in strong), Counter[Work]())
    assert 0.4 < work[Work.LOOK] / work.total() < 0.7 and work[Work.RECOVER] < work[Work.RUN]
    assert work[Work.LOOK] > LOOKS * 150


def test_a_malformed_call_costs_a_turn_and_changes_nothing() -> None:
    session = Session(1)
    malformed = next(
        answer
        for answer in (session.answer("compact") for _ in range(2000))
        if not well_formed(answer.message["tool_calls"][0]["function"])
    )
    session.advance(malformed)
    assert session.work is Work.PLAN and session.planned is None
    assert "Invalid arguments" in session.messages[-1]["content"]
    assert json.loads(malformed.message["tool_calls"][0]["function"]["arguments"])


def test_figures_of_the_gateway_benchmark_compare_the_same_case() -> None:
    cases = [("plain", 1), ("stream", 16)]
    found = {
        "straight": {case: [0.001] * 100 for case in cases},
        "tailrace": {case: [0.003] * 60 for case in cases},
        "litellm": {case: [0.011] * 10 for case in cases},
    }
    figures = report(found, 1.0, {"tailrace": 2**20, "litellm": 2**21}).figures
    assert figures["throughput_ratio"] == 6.0
    assert figures["added_p99_ratio"] == pytest.approx(0.2)
    assert figures["cases"]["plain_1"]["tailrace"]["added_p50_ms"] == pytest.approx(2.0)


def test_quantiles_and_intervals() -> None:
    assert quantile(list(range(100)), 0.99) == 99 and quantile([5.0], 0.5) == 5.0
    low, high = interval([0.0, 1.0] * 200)
    assert low == pytest.approx(0.5 - 1.96 * 0.5 / 20, abs=1e-3) and low + high == pytest.approx(1.0)
