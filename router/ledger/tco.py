"""What a month costs: a generic fleet of accelerators against this stack, from stated assumptions. Pure.

A fleet has to do some work: so many accelerators' worth of it, without a pause. What it must be paid for besides is the
time in which it waits, and the memory in which a teacher lies that is asked for log-probs:

    work  = (accelerators − teacher memory / memory of one) · (1 − idle share)            what the generic fleet does
    needed = work / (1 − idle share of the stack) + its teacher memory / memory of one    for the same work here
    month = accelerators · price · hours  +  tokens served · their price

Idle is the share of wall time since the first task that was not spent computing, the same definition everywhere. A run
says it of both sides; they are weighted by the share of the accelerators that each has.

**The reference scenario** is given by its results and its ranges: 500 h a month, idle 30–45 % against less than 8 %,
48–80 GB of teacher memory against none, $28,500 against $18,200. What it does not say is supposed here, so that both
results come out: 20 accelerators of 80 GB at $2.85 an hour (the first result needs a product of $57 an hour), the
middle of both ranges (37.5 %, 64 GB), and 6 % idle here. Then the generic fleet does (20 − 0.8) · 0.625 = 12
accelerators' worth of work, for which this stack needs 12 / 0.94 = 12.77 of them: $18,191. Nothing is served in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fleet:
    """How well accelerators are used by one of the two."""

    idle: float  # share of wall time not spent computing, 0 ≤ idle < 1
    teacher_gb: float  # memory that a teacher takes


@dataclass(frozen=True)
class Serving:
    """Tokens that are served in a month, and their prices in dollars per million, prompt and answer together."""

    millions: float = 0.0  # million tokens a month
    strong_price: float = 0.0  # of the strongest pool
    compact_share: float = 0.0  # of the tokens that compact pools take here, 0..1
    compact_price: float = 0.0  # of a compact token here
    other_price: float = 0.0  # of a token here that compact pools do not take


@dataclass(frozen=True)
class Scenario:
    """Everything that a comparison rests on."""

    name: str
    hours: float  # per month
    accelerators: float  # of the generic fleet
    price: float  # dollars per accelerator and hour
    memory_gb: float  # of one accelerator
    generic: Fleet
    stack: Fleet
    serving: Serving = Serving()


@dataclass(frozen=True)
class Month:
    """One side of a comparison."""

    accelerators: float
    accelerator_hours: float
    idle_hours: float  # of these, paid for and not computed in
    teacher_hours: float  # of these, for memory that a teacher takes
    training: float  # dollars
    serving: float  # dollars

    @property
    def total(self) -> float:
        """Dollars a month."""
        return self.training + self.serving


@dataclass(frozen=True)
class Comparison:
    """Both sides of a scenario."""

    scenario: Scenario
    generic: Month
    stack: Month

    @property
    def saved(self) -> float:
        """Dollars a month; negative where the generic fleet is cheaper."""
        return self.generic.total - self.stack.total

    @property
    def saved_share(self) -> float:
        """Of what the generic fleet costs."""
        return self.saved / self.generic.total if self.generic.total else 0.0


REFERENCE = Scenario(
    name="reference",
    hours=500.0,
    accelerators=20.0,
    price=2.85,
    memory_gb=80.0,
    generic=Fleet(idle=0.375, teacher_gb=64.0),
    stack=Fleet(idle=0.06, teacher_gb=0.0),
)
REFERENCE_GENERIC, REFERENCE_STACK = 28_500.0, 18_200.0  # dollars a month, as given
REFERENCE_GIVEN = "500 h/month; idle 30–45 % against < 8 %; teacher memory 48–80 GB against 0; $28,500 against $18,200"


def compare(scenario: Scenario) -> Comparison:
    """Both sides for the same work. Raises `ValueError` where a share is no share, or the teacher fills the fleet."""
    for side in (scenario.generic, scenario.stack):
        if not 0 <= side.idle < 1:
            raise ValueError(f"an idle share of {side.idle:g} is not from 0 up to, but not including, 1")
    teacher = scenario.generic.teacher_gb / scenario.memory_gb
    if not teacher < scenario.accelerators:
        raise ValueError(
            f"{scenario.generic.teacher_gb:g} GB of teacher memory leave nothing of {scenario.accelerators:g} "
            f"accelerators of {scenario.memory_gb:g} GB"
        )
    work = (scenario.accelerators - teacher) * (1 - scenario.generic.idle)
    needed = work / (1 - scenario.stack.idle) + scenario.stack.teacher_gb / scenario.memory_gb
    serving = scenario.serving
    mixed = serving.compact_share * serving.compact_price + (1 - serving.compact_share) * serving.other_price
    return Comparison(
        scenario,
        _month(scenario, scenario.accelerators, scenario.generic, serving.millions * serving.strong_price),
        _month(scenario, needed, scenario.stack, serving.millions * mixed),
    )


def _month(scenario: Scenario, accelerators: float, fleet: Fleet, serving: float) -> Month:
    hours = accelerators * scenario.hours
    teacher = fleet.teacher_gb / scenario.memory_gb * scenario.hours
    return Month(
        accelerators=accelerators,
        accelerator_hours=hours,
        idle_hours=(hours - teacher) * fleet.idle,
        teacher_hours=teacher,
        training=hours * scenario.price,
        serving=serving,
    )


def idle_of(summary: Mapping[str, Any], generating_share: float) -> float:
    """Idle share of a run's accelerators from its figures, `generating_share` of them generating.

    Raises `ValueError` where the run's figures lack one side.
    """
    values = {side: summary.get(f"{side}_idle_ratio") for side in ("generator", "learner")}
    for side, value in values.items():
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{side}_idle_ratio is {value!r}")
    return generating_share * values["generator"] + (1 - generating_share) * values["learner"]  # type: ignore[operator]
