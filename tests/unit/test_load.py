"""The load controller: its rules, and what they come to in simulated runs."""

import pytest

from learner.load import WINDOW, Load
from tests.unit.simulation import Result, lognormal, simulate

GROUPS, BOUND = 8, 4
LIMIT = (BOUND + 1) * GROUPS


def quiet(load: Load, spare: int) -> int:
    """A window of steps that found `spare` groups beside their batch."""
    for _ in range(WINDOW):
        load.stepped(waited=0.0, computed=1.0, spare=spare)
    return load.target


def settled(spare: int = 2 * GROUPS) -> Load:
    load = Load(GROUPS, LIMIT)
    load.stepped(waited=9.0, computed=1.0, spare=0)
    quiet(load, spare)
    return load


def test_half_of_what_lay_unneeded_at_every_step_is_given_back():
    assert settled().target == LIMIT - GROUPS
    load = settled()
    for spare in (*[GROUPS] * (WINDOW - 1), 0):
        load.stepped(waited=0.0, computed=1.0, spare=spare)
    assert load.target == LIMIT - GROUPS, "one step needed it all"


def test_two_batches_are_left_in_any_case():
    load = settled()
    for _ in range(20):
        quiet(load, 100)
    assert load.target == 2 * GROUPS


def test_a_wait_brings_a_batch_back_at_once():
    load = settled(spare=40)
    before = load.target
    assert load.stepped(waited=0.009, computed=1.0, spare=0) == before, "less than a hundredth is no want"
    assert load.stepped(waited=0.02, computed=1.0, spare=0) == before + GROUPS
    for _ in range(9):
        load.stepped(waited=1.0, computed=1.0, spare=0)
    assert load.target == LIMIT


def test_after_a_wait_surplus_must_last_longer_to_count():
    load = settled()
    before = load.stepped(waited=1.0, computed=1.0, spare=0)
    assert quiet(load, GROUPS) == before
    assert quiet(load, GROUPS) == before - GROUPS // 2


def test_synchronous_stays_synchronous():
    load = Load(GROUPS, GROUPS)
    assert {load.stepped(waited=1.0, computed=1.0, spare=0) for _ in range(9)} == {GROUPS}
    assert quiet(load, 5) == GROUPS


def both(mean: float, sigma: float, slots: int, steps: int) -> tuple[Result, Result]:
    """The same run with the fixed and with the adaptive gate; a step takes a second, a batch is 8 groups."""
    fixed, adaptive = (
        simulate(lognormal(mean, sigma), lambda _: slots, adaptive=adaptive, steps=steps) for adaptive in (False, True)
    )
    assert max(fixed.staleness + adaptive.staleness) <= BOUND
    return fixed, adaptive


@pytest.mark.parametrize(
    ("mean", "sigma", "slots", "staleness"),
    [(0.3, 0.5, 40, 2.0), (0.3, 1.0, 40, 2.5), (1.0, 0.5, 40, 3.0), (1.0, 0.5, 10, 3.2), (0.5, 1.0, 10, 3.0)],
)
def test_a_learner_that_is_the_bottleneck_does_not_wait_and_trains_younger_rollouts(mean, sigma, slots, staleness):
    fixed, adaptive = both(mean, sigma, slots, steps=150)
    assert adaptive.learner_idle < 0.03
    assert adaptive.mean < staleness
    assert fixed.mean > 3.8, "without it, what is under way waits until it is as old as it may be"


@pytest.mark.parametrize(("mean", "sigma", "slots"), [(1.0, 0.5, 8), (0.75, 0.5, 6), (0.5, 1.0, 4)])
def test_balanced_neither_side_waits(mean, sigma, slots):
    fixed, adaptive = both(mean, sigma, slots, steps=300)
    assert min(adaptive.learner_idle, adaptive.generator_idle) < (0.03 if sigma < 1 else 0.05)
    assert max(adaptive.learner_idle, adaptive.generator_idle) < 0.08
    assert max(adaptive.learner_idle, adaptive.generator_idle) < max(fixed.learner_idle, fixed.generator_idle) + 0.02
    assert adaptive.mean < 3.2


@pytest.mark.parametrize(("mean", "sigma", "slots"), [(0.5, 0.5, 3), (0.5, 1.0, 2)])
def test_generators_that_are_the_bottleneck_are_never_idle_and_a_queue_does_not_age(mean, sigma, slots):
    fixed, adaptive = both(mean, sigma, slots, steps=100)
    assert adaptive.generator_idle < 0.03
    assert adaptive.learner_idle == pytest.approx(fixed.learner_idle, abs=0.01)
    assert adaptive.mean < 2.0, "tasks that wait in the queue are sampled by newer versions"
    assert adaptive.targets[-1] == LIMIT


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_generators_that_join_and_leave_are_followed(sigma):
    """40 seconds with many, 40 with few, and many again: the target goes up when there are few, and down again."""
    few = simulate(lognormal(0.6, sigma), lambda now: 3 if 40 < now < 80 else 30, steps=150)
    assert max(few.staleness) <= BOUND
    by_step = few.targets
    many, scarce, again = min(by_step[:38]), max(by_step[45:70]), min(by_step[-50:])
    assert many < LIMIT and again < LIMIT and scarce == LIMIT


def test_nobody_there_for_a_while_only_costs_the_while():
    away = simulate(lognormal(0.6, 0.5), lambda now: 0 if 30 < now < 60 else 10, steps=60)
    assert len(away.trained) == 60 * GROUPS
    assert away.stale == []


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("slots", [12, 40])
def test_slow_prompts_have_their_share_of_what_is_trained(adaptive, slots):
    """Each fourth prompt takes ten times as long as the others, longer than `bound` steps."""

    def service(index, random):
        return (5.0 if index % 4 == 0 else 0.5) * random.lognormvariate(0.0, 0.2)

    def share(patience):
        result = simulate(service, lambda _: slots, steps=60, adaptive=adaptive, patience=patience)
        assert max(result.staleness) <= BOUND
        return sum(index % 4 == 0 for index in result.trained) / len(result.trained), result

    fair, waited = share(30.0)
    assert fair == 0.25 and sorted(waited.trained) == list(range(60 * GROUPS)) and waited.stale == []
    biased, hasty = share(0.0)
    assert biased < 0.21 and hasty.stale
    assert waited.straggling > 0.0
    assert waited.learner_idle > hasty.learner_idle, "that is what it costs"
