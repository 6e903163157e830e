"""From rollouts to batches: completeness, staleness, reasons, and resuming without loss or repetition."""

import json
import random

import numpy as np
import pytest

from contracts.messages import PolicySegment, Reason
from contracts.tensors import Tensor
from learner.gate import AdmissionGate, training_id
from learner.intake import Intake
from learner.lineage import Lineage
from tests.unit.builders import policy, rollout


def intake(*, bound: int = 2, groups: int = 1, steps: int = 100, budget: int = 100, version: int = 0) -> Intake:
    gate = AdmissionGate(bound, groups, steps)
    made = Intake(gate, Lineage([(1, 0)]), max_staleness=bound, token_budget=budget, vocabulary=1000)
    made.gate.admit(version)
    return made


def reasons(drops):
    return [(drop.reason, list(drop.rollout_ids)) for drop in drops]


def test_a_group_becomes_a_batch_with_its_last_rollout():
    i = intake()
    assert i.offer(rollout("train-0", 1), 1, 0, 0.0) == []
    assert i.take(0) == (None, [])
    assert i.offer(rollout("train-0", 0), 2, 0, 0.0) == []
    batch, drops = i.take(0)
    assert drops == []
    assert [r.id for r in batch[0].rollouts] == ["train-0.0", "train-0.1"], "in the order of the group"
    assert batch[0].staleness == (0, 0)
    assert "train-0" not in i.gate.outstanding
    assert i.gate.in_training == 1


def test_batches_take_the_oldest_first_and_of_equals_the_one_issued_first():
    i = intake(groups=2)
    begun = {0: 1, 1: 0, 2: 1}
    for sequence, (task, index) in enumerate([(2, 0), (2, 1), (1, 0), (0, 0), (0, 1), (1, 1)], start=1):
        i.offer(rollout(f"train-{task}", index, version=begun[task]), sequence, 1, 0.0)
    batch, _ = i.take(1)
    assert [g.task_id for g in batch] == ["train-1", "train-0"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reward": None, "outcome": "verifier_timeout"}, Reason.UNSCORED),
        ({"length": 101}, Reason.OVER_BUDGET),
        ({"tokens": Tensor.of(np.array([1, 2, 3, 4, 1000], np.int32))}, Reason.FOREIGN_TOKENS),
        ({"generation": 7}, Reason.LOST_POLICY),
        ({"version": 3}, Reason.LOST_POLICY),
    ],
)
def test_what_can_never_be_trained_is_dropped_on_arrival_and_its_group_goes_on(change, reason):
    i = intake()
    assert reasons(i.offer(rollout("train-0", 0, group_size=3, **change), 1, 0, 0.0)) == [(reason, ["train-0.0"])]
    for index in (1, 2):
        assert i.offer(rollout("train-0", index, group_size=3), 1 + index, 0, 0.0) == []
    batch, _ = i.take(0)
    assert [r.index for r in batch[0].rollouts] == [1, 2]


def test_staleness_is_checked_when_the_batch_is_taken():
    i = intake(bound=2)
    for index in (0, 1):
        i.offer(rollout("train-0", index, version=0), 1 + index, 0, 0.0)
    batch, drops = i.take(3)
    assert batch is None
    assert reasons(drops) == [(Reason.STALE, ["train-0.0"]), (Reason.STALE, ["train-0.1"])]
    assert "3 versions old, the bound is 2" in drops[0].detail
    assert "train-0" not in i.gate.outstanding


def test_a_group_that_loses_some_members_to_staleness_goes_on_with_the_rest():
    i = intake(bound=1)
    versions = {0: 0, 1: 4, 2: 5}
    for index, version in versions.items():
        i.offer(rollout("train-0", index, group_size=3, version=version), 1 + index, 5, 0.0)
    batch, drops = i.take(5)
    assert reasons(drops) == [(Reason.STALE, ["train-0.0"])]
    assert batch[0].staleness == (1, 0)


def test_bound_zero_takes_on_policy_rollouts_only():
    i = intake(bound=0)
    for index in (0, 1):
        i.offer(rollout("train-0", index, version=4), 1 + index, 4, 0.0)
    assert i.take(4)[0] is not None
    late = intake(bound=0)
    for index in (0, 1):
        late.offer(rollout("train-0", index, version=4), 1 + index, 4, 0.0)
    assert late.take(5)[0] is None


def test_a_rollout_is_as_old_as_its_oldest_token():
    i = intake(bound=1)
    for index in (0, 1):
        mixed = [PolicySegment(3, policy(2)), PolicySegment(4, policy(4))]
        i.offer(rollout("train-0", index, segments=mixed), 1 + index, 4, 0.0)
    assert [d.reason for d in i.take(4)[1]] == [Reason.STALE, Reason.STALE]


def test_every_token_is_of_a_policy_that_the_weights_descend_from():
    """The learner was killed at version 6 and went on from its checkpoint of version 3."""
    i = intake(bound=4)
    i.lineage = Lineage([(1, 0), (2, 3)])
    mixed = [PolicySegment(3, policy(2)), PolicySegment(4, policy(5))]
    assert reasons(i.offer(rollout("train-0", 0, segments=mixed), 1, 4, 0.0)) == [(Reason.LOST_POLICY, ["train-0.0"])]
    kept = [PolicySegment(3, policy(2)), PolicySegment(4, policy(4, generation=2))]
    assert i.offer(rollout("train-0", 1, segments=kept), 2, 4, 0.0) == []


def test_equal_rewards_count_towards_the_batch_and_are_reported():
    i = intake()
    for index in (0, 1):
        i.offer(rollout("train-0", index, reward=1.0), 1 + index, 0, 0.0)
    batch, drops = i.take(0)
    assert batch[0].zero_advantage
    assert reasons(drops) == [(Reason.ZERO_ADVANTAGE, ["train-0.0", "train-0.1"])]


def test_redelivered_rollouts_change_nothing():
    i = intake()
    i.offer(rollout("train-0", 0), 1, 0, 0.0)
    assert reasons(i.offer(rollout("train-0", 0, reward=1.0), 2, 0, 0.0)) == [(Reason.DUPLICATE, ["train-0.0"])]
    i.offer(rollout("train-0", 1), 3, 0, 0.0)
    assert reasons(i.offer(rollout("train-0", 1), 4, 0, 0.0)) == [(Reason.DUPLICATE, ["train-0.1"])]
    batch, _ = i.take(0)
    assert [r.reward for r in batch[0].rollouts] == [0.0, 1.0]
    assert reasons(i.offer(rollout("train-0", 0), 5, 1, 0.0)) == [(Reason.DUPLICATE, ["train-0.0"])]
    assert i.take(0) == (None, [])


def test_rollouts_of_closed_and_of_unknown_tasks_are_told_apart():
    i = intake()
    i.gate.close("train-0")
    assert reasons(i.offer(rollout("train-0", 0), 1, 0, 0.0)) == [(Reason.LATE, ["train-0.0"])]
    assert reasons(i.offer(rollout("other", 0), 2, 0, 0.0)) == [(Reason.UNKNOWN_TASK, ["other.0"])]
    assert reasons(i.offer(rollout("train-500", 0), 3, 0, 0.0)) == [(Reason.UNKNOWN_TASK, ["train-500.0"])]


def test_a_group_whose_last_rollout_never_comes_is_closed_at_its_deadline():
    i = intake(groups=1)
    for index in range(3):
        i.offer(rollout("train-0", index, group_size=4), 1 + index, 0, 10.0)
    i.offer(rollout("train-1", 0, group_size=4), 5, 0, 10.0)
    assert i.expire(69.0, group_deadline=60, task_deadline=1000) == []
    drops = i.expire(71.0, group_deadline=60, task_deadline=1000)
    assert reasons(drops) == [(Reason.GROUP_INCOMPLETE, ["train-1.0"])]
    batch, _ = i.take(0)
    assert len(batch[0].rollouts) == 3, "what came is used"


def test_a_late_member_still_joins_a_group_that_waits():
    i = intake(groups=2)
    for index in range(2):
        i.offer(rollout("train-0", index, group_size=3), 1 + index, 0, 0.0)
    i.expire(61.0, group_deadline=60, task_deadline=1000)
    i.offer(rollout("train-0", 2, group_size=3), 3, 0, 62.0)
    for index in range(2):
        i.offer(rollout("train-1", index), 4 + index, 0, 62.0)
    batch, _ = i.take(0)
    assert [len(g.rollouts) for g in batch] == [3, 2]


def test_tasks_that_nobody_does_are_given_up_and_replaced():
    i = intake(bound=0, groups=2)
    i.gate.published("train-0", 1)
    i.offer(rollout("train-1", 0), 1, 0, 0.0)
    i.gate.observe_queue(True, 0.0)
    drops = i.expire(301.0, group_deadline=1000, task_deadline=300)
    assert reasons(drops) == [(Reason.TASK_EXPIRED, [])]
    assert i.gate.admit(0) == [2]


def test_a_task_that_became_a_dead_letter_is_given_up_at_once():
    i = intake(bound=0, groups=2)
    i.offer(rollout("train-1", 0), 1, 0, 0.0)
    assert reasons(i.give_up("train-0", "dead letter: bad_task")) == [(Reason.TASK_EXPIRED, [])]
    assert i.give_up("train-0", "again") == []
    assert i.give_up("train-1", "its rollout has arrived") == []
    assert i.give_up("train-99", "never published") == []
    assert i.gate.admit(0) == [2]


def test_position_is_the_oldest_rollout_still_needed():
    i = intake()
    assert i.position == 1
    for sequence, (task, index) in enumerate([(0, 0), (1, 0), (1, 1), (2, 0)], start=11):
        i.offer(rollout(f"train-{task}", index), sequence, 0, 0.0)
    i.take(0)
    assert i.position == 11, "train-0 still waits for its second rollout"
    i.offer(rollout("train-0", 1), 20, 0, 0.0)
    i.take(0)
    assert i.position == 14


def test_a_checkpoint_holds_the_moment_it_was_taken():
    """It is written while the next batch is already taken: what that consumes must be read again after a kill."""
    i = intake()
    for index in (0, 1):
        i.offer(rollout("train-0", index), 1 + index, 0, 0.0)
    state = i.state()
    before = json.dumps(state)
    assert i.take(0)[0] is not None
    assert json.dumps(state) == before


@pytest.mark.parametrize("seed", range(20))
def test_a_learner_killed_anywhere_trains_everything_once(seed):
    """A random order of arrivals with duplicates, a checkpoint every few steps, kills in between."""
    rng = random.Random(seed)
    groups, size, steps, bound = 2, 3, 12, 3
    stream = [(task, index) for task in range(groups * steps) for index in range(size)]
    stream.sort(key=lambda pair: pair[0] + rng.uniform(0, 3))
    stream += rng.sample(stream, 6)
    messages = [rollout(training_id(t), i, group_size=size, reward=rng.random()) for t, i in stream]

    def fresh() -> Intake:
        gate = AdmissionGate(bound, groups, steps)
        return Intake(gate, Lineage([(1, 0)]), max_staleness=steps, token_budget=100, vocabulary=1000)

    trained: list[list[str]] = []  # per version of the surviving line
    checkpoint = (0, json.dumps(fresh().state()))
    for life in range(6):
        version, state = checkpoint
        i = fresh()
        i.restore(json.loads(state))
        del trained[version:]
        die_at = rng.randrange(len(messages)) if life < 5 else None
        for sequence, message in enumerate(messages, start=1):
            if sequence < json.loads(state)["position"]:
                continue
            i.gate.admit(version)
            i.gate.adopt(message.task_id, version)
            i.offer(message, sequence, version, 0.0)
            while version < steps and (batch := i.take(version)[0]) is not None:
                i.trained()
                trained.append([r.id for g in batch for r in g.rollouts])
                version += 1
                if version % 3 == 0:
                    checkpoint = (version, json.dumps(i.state()))
            if sequence == die_at:
                break
    ids = [rollout_id for step in trained for rollout_id in step]
    assert len(trained) == steps
    assert sorted(ids) == sorted({m.id for m in messages}), "nothing twice, nothing lost"


def slow_and_fast(patience: float) -> Intake:
    """Tasks 0 to 3 began with version 0; at version 2 the last two are ready, and so are younger ones."""
    gate = AdmissionGate(2, 2, 100)
    i = Intake(gate, Lineage([(1, 0)]), max_staleness=2, token_budget=9, vocabulary=99, straggler_seconds=patience)
    gate.admit(0)
    for sequence, task in enumerate([4, 5], start=1):
        for index in (0, 1):
            i.offer(rollout(f"train-{task}", index, version=2), 2 * sequence + index, 2, 0.0)
    for task in (2, 3):
        gate.close(f"train-{task}")
    return i


def test_a_step_waits_for_a_group_that_it_would_make_too_stale():
    i = slow_and_fast(patience=30.0)
    in_hand = {"train-0": 0, "train-1": 1}
    assert i.take(2, 0.0, in_hand) == (None, [])
    assert i.stragglers == ["train-0"], "train-1 has a step more"
    for index in (0, 1):
        i.offer(rollout("train-0", index, version=0), 20 + index, 2, 0.0)
    batch, drops = i.take(2, 1.0, {"train-1": 1})
    assert ([g.task_id for g in batch], drops, i.stragglers) == (["train-0", "train-4"], [], [])


def test_a_member_that_has_arrived_says_when_its_group_began():
    i = slow_and_fast(patience=30.0)
    i.offer(rollout("train-0", 0, version=2), 20, 2, 0.0)
    assert i.take(2, 0.0, {"train-0": 0})[0] is not None


def test_nobody_waits_for_a_group_that_nobody_works_on():
    assert slow_and_fast(patience=30.0).take(2, 0.0, {})[0] is not None


def test_a_straggler_is_waited_for_no_longer_than_it_is_worth():
    i = slow_and_fast(patience=30.0)
    for now in (100.0, 110.0, 129.9):
        assert i.take(2, now, {"train-0": 0})[0] is None
        i.hold(now)
    assert i.take(2, 130.0, {"train-0": 0})[0] is not None
    i.trained()
    for index in (0, 1):
        i.offer(rollout("train-0", index, version=0), 20 + index, 3, 131.0)
    assert [reason for reason, _ in reasons(i.take(3, 131.0)[1])] == [Reason.STALE] * 2


def test_a_group_that_is_dropped_while_the_batch_is_put_together_is_not_waited_for():
    i = slow_and_fast(patience=30.0)
    for index in (0, 1):
        i.offer(rollout("train-1", index, version=0), 20 + index, 2, 0.0)
    batch, drops = i.take(3, 0.0, {"train-1": 0})
    assert [d.task_id for d in drops] == ["train-1", "train-1"]
    assert batch is not None


def test_without_patience_no_step_waits():
    assert slow_and_fast(patience=0.0).take(2, 0.0, {"train-0": 0})[0] is not None


def test_a_task_that_is_given_up_while_a_step_begins_to_wait_for_it_is_not_waited_for():
    i = slow_and_fast(patience=30.0)
    assert i.take(2, 0.0, {"train-0": 0})[0] is None
    assert reasons(i.give_up("train-0", "dead letter")) == [(Reason.TASK_EXPIRED, [])]
    i.hold(0.0)
    assert i.take(2, 0.1, {})[0] is not None


def test_a_checkpoint_tells_when_tasks_were_issued_and_an_older_one_without_is_read():
    i = intake()
    i.gate.close("train-0")
    i.gate.admit(5)
    state = json.loads(json.dumps(i.state()))
    for found, expected in [(state, [0, 0, 5]), ({k: v for k, v in state.items() if k != "floors"}, [0, 0, 0])]:
        resumed = intake()
        resumed.restore(found)
        assert [entry.floor for entry in resumed.gate.outstanding.values()] == expected
        assert resumed.gate.admit(5) == [], "what was under way still is: the bound holds over a restart"
