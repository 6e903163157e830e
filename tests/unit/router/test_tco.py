"""The monthly comparison: the reference comes out of its assumptions, and measured figures take their place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from contracts.examples import EXAMPLES
from contracts.messages import RouteOutcome
from infra.cli.main import make_app
from infra.errors import UserError
from router.ledger import tco
from router.ledger.store import Ledger
from router.ledger.tco import Fleet, Serving, compare, idle_of

R = tco.REFERENCE
EXAMPLE: RouteOutcome = EXAMPLES["route_outcome"]  # type: ignore[assignment]


def test_the_reference_scenario_comes_out_of_its_assumptions() -> None:
    reference = compare(R)
    assert reference.generic.total == pytest.approx(tco.REFERENCE_GENERIC, rel=1e-12)
    assert reference.stack.total == pytest.approx(tco.REFERENCE_STACK, rel=0.001)
    assert 0.30 <= R.generic.idle <= 0.45 and R.stack.idle < 0.08
    assert 48 <= R.generic.teacher_gb <= 80 and R.stack.teacher_gb == 0
    assert R.hours == 500
    assert reference.stack.accelerators == pytest.approx(12 / 0.94)


def test_the_same_fleet_costs_the_same() -> None:
    both = compare(replace(R, stack=R.generic))
    assert both.stack == both.generic and both.saved == pytest.approx(0.0)


def test_both_sides_do_the_same_work() -> None:
    both = compare(replace(R, stack=Fleet(idle=0.2, teacher_gb=16.0)))
    for side in (both.generic, both.stack):
        worked = side.accelerator_hours - side.teacher_hours - side.idle_hours
        assert worked == pytest.approx(12 * R.hours)


def test_a_stack_that_waits_more_costs_more() -> None:
    totals = [compare(replace(R, stack=Fleet(idle, 0.0))).stack.total for idle in (0.0, 0.06, 0.5, 0.9)]
    assert totals == sorted(totals)
    assert compare(replace(R, stack=Fleet(0.9, 0.0))).saved < 0


def test_served_tokens_are_paid_at_the_price_of_who_serves_them() -> None:
    serving = Serving(millions=100.0, strong_price=10.0, compact_share=0.6, compact_price=0.2, other_price=9.0)
    both = compare(replace(R, serving=serving))
    assert both.generic.serving == pytest.approx(1000.0)
    assert both.stack.serving == pytest.approx(100 * (0.6 * 0.2 + 0.4 * 9.0))


WRONG = {
    "idle all the time": replace(R, stack=Fleet(1.0, 0.0)),
    "a negative share": replace(R, generic=Fleet(-0.1, 0.0)),
    "a teacher that fills the fleet": replace(R, generic=Fleet(0.3, 1600.0)),
    "no accelerators": replace(R, accelerators=0.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        compare(WRONG[name])


def test_idle_time_of_a_run_is_that_of_both_sides_by_their_accelerators() -> None:
    summary = {"generator_idle_ratio": 0.02, "learner_idle_ratio": 0.14}
    assert idle_of(summary, 0.75) == pytest.approx(0.05)
    assert idle_of(summary, 0.0) == 0.14
    with pytest.raises(ValueError, match="learner_idle_ratio is None"):
        idle_of(summary | {"learner_idle_ratio": None}, 0.5)


# --- the command ------------------------------------------------------------------------------------------------------


def figures(directory: Path, *arguments: str, columns: int = 200) -> dict:
    file = directory / "tco.json"
    result = CliRunner().invoke(make_app(), ["tco", "--json", str(file), *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.exception
    return {**json.loads(file.read_text()), "shown": result.stdout}


def summary(directory: Path, name: str, generator: float | None, learner: float | None) -> str:
    file = directory / name
    file.write_text(json.dumps({"generator_idle_ratio": generator, "learner_idle_ratio": learner}))
    return str(file)


def test_without_measurements_the_reference_stands_alone(tmp_path: Path) -> None:
    found = figures(tmp_path)
    assert found["yours"]["generic"] == found["reference"]["generic"]
    assert set(found["yours"]["sources"].values()) == {"supposed"}
    assert "$28,500" in found["shown"] and "$18,191" in found["shown"] and "48–80 GB" in found["shown"]
    assert "yours" not in found["shown"] and "--summary" in found["shown"]
    given = figures(tmp_path, "--price", "3")["shown"]
    assert "yours: this stack saves" in given and "--summary" not in given


def test_a_stack_that_is_dearer_costs_more_rather_than_saving_less_than_nothing(tmp_path: Path) -> None:
    shown = figures(tmp_path, "--idle", "0.8")["shown"]
    assert "yours: this stack costs $57,000 more a month, 200.0%" in shown.splitlines()


def test_the_table_is_whole_at_80_columns(tmp_path: Path) -> None:
    serving = ["--tokens", "12345", "--strong-price", "5", "--compact-share", "0.6", "--compact-price", "0.2"]
    arguments = ["--idle", "0.1", "--accelerators", "600", *serving]
    lines = figures(tmp_path, *arguments, columns=80)["shown"].splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    rows = [line.split() for line in lines]
    wide = [line.split() for line in figures(tmp_path, *arguments)["shown"].splitlines()]
    table = next(number for number, row in enumerate(wide) if row[0] == "total") + 1
    assert rows[:table] == wide[:table]


def test_measured_figures_of_runs_and_of_the_ledger_take_the_place_of_supposed_ones(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number in range(10):
        ledger.record(msgspec.structs.replace(EXAMPLE, request_id=f"r{number}"))
    ledger.close()
    found = figures(
        tmp_path,
        "--summary", summary(tmp_path, "ours.json", 0.026, 0.141),
        "--generic-summary", summary(tmp_path, "sync.json", 0.8, 0.7),
        "--generating-share", "0.5",
        "--ledger", str(tmp_path),
        "--price", "3",
    )["yours"]  # fmt: skip
    assumptions, sources = found["assumptions"], found["sources"]
    assert assumptions["stack"] == {"idle": pytest.approx(0.0835), "teacher_gb": 0.0}
    assert assumptions["generic"]["idle"] == pytest.approx(0.75)
    assert assumptions["price"] == 3.0
    served = assumptions["serving"]
    compact, strong = 464, 540  # tokens of the example's two calls
    assert served["millions"] == pytest.approx(10 * (compact + strong) / 1e6)
    assert served["compact_share"] == pytest.approx(compact / (compact + strong))
    assert served["strong_price"] == pytest.approx(EXAMPLE.counterfactual / 1e6 / (compact + strong))
    assert found["stack"]["serving"] == pytest.approx(10 * EXAMPLE.cost / 1e12)
    assert found["generic"]["serving"] == pytest.approx(10 * EXAMPLE.counterfactual / 1e12)
    assert (sources["stack.idle"], sources["price"], sources["hours"]) == ("measured", "option", "supposed")
    assert sources["stack.teacher_gb"] == sources["generic.teacher_gb"] == "supposed"  # no run's figures say it


def test_an_option_is_stronger_than_what_was_measured(tmp_path: Path) -> None:
    found = figures(tmp_path, "--summary", summary(tmp_path, "s.json", 0.5, 0.5), "--idle", "0.01", "--teacher", "8")
    assert found["yours"]["assumptions"]["stack"] == {"idle": 0.01, "teacher_gb": 8.0}


def test_what_one_pays_without_a_router_is_paid_for_what_no_compact_pool_takes(tmp_path: Path) -> None:
    options = ["--tokens", "10", "--strong-price", "5", "--compact-share", "0.6", "--compact-price", "0.2"]
    found = figures(tmp_path, *options)["yours"]
    assert found["generic"]["serving"] == pytest.approx(50.0)
    assert found["stack"]["serving"] == pytest.approx(10 * (0.6 * 0.2 + 0.4 * 5))


USER_ERRORS = {
    "no such summary": ["--summary", "nowhere.json"],
    "a share above one": ["--idle", "1.5"],
    "no share": ["--generic-idle", "nan"],
    "no such ledger": ["--ledger", "nowhere"],
    "a share of the fleet above one": ["--generating-share", "2"],
}


@pytest.mark.parametrize("name", USER_ERRORS)
def test_a_wrong_option_is_said_in_one_sentence(name: str) -> None:
    result = CliRunner().invoke(make_app(), ["tco", *USER_ERRORS[name]])
    message = str(result.exception)
    assert isinstance(result.exception, UserError) and "\n" not in message
    option, value = USER_ERRORS[name]
    assert (option in message or option == "--summary") and value in message and "--directory" not in message
    assert ("from 0 to 1" in message) == (option not in ("--summary", "--ledger"))


def test_a_run_that_lacks_one_side_is_named(tmp_path: Path) -> None:
    file = summary(tmp_path, "half.json", 0.1, None)
    result = CliRunner().invoke(make_app(), ["tco", "--summary", file])
    assert isinstance(result.exception, UserError) and "learner_idle_ratio" in str(result.exception)
