"""The admission gate bounds what is under way, and tells slow from lost."""

import pytest

from learner.gate import AdmissionGate, training_id, training_index


def gate(bound: int = 1, groups: int = 2, steps: int = 10) -> AdmissionGate:
    return AdmissionGate(bound, groups, steps)


@pytest.mark.parametrize(("bound", "expected"), [(0, 2), (1, 4), (4, 10)])
def test_admits_bound_plus_one_batches(bound, expected):
    assert len(gate(bound).admit(version=0)) == expected


def test_admits_nothing_more_until_something_closes():
    g = gate()
    g.admit(0)
    assert g.admit(0) == []
    g.close("train-0")
    assert g.admit(0) == [4]


def test_a_batch_in_training_counts_until_its_version_exists():
    g = gate(bound=0)
    for task in map(training_id, g.admit(0)):
        g.close(task)
    g.in_training = 2
    assert g.admit(0) == [], "synchronous: nothing is sampled while the batch is trained"
    g.in_training = 0
    assert g.admit(1) == [2, 3]


def test_admits_only_what_the_remaining_steps_need():
    g = gate(bound=4, groups=2, steps=3)
    assert g.admit(0) == [0, 1, 2, 3, 4, 5]
    assert gate(bound=4, groups=2, steps=3).admit(2) == [0, 1]


def test_staleness_of_a_group_trained_in_order_never_exceeds_the_bound():
    bound, groups, steps = 3, 4, 30
    g = gate(bound, groups, steps)
    admitted_at: dict[int, int] = {}
    for version in range(steps):
        admitted_at.update(dict.fromkeys(g.admit(version), version))
        batch = sorted(entry.index for entry in g.outstanding.values())[:groups]
        for index in batch:
            assert 0 <= version - admitted_at[index] <= bound
            g.close(training_id(index))
        assert version < bound or version - min(admitted_at[i] for i in batch) == bound, "the bound is used"


def test_tasks_expire_only_while_the_queue_is_empty_and_nobody_holds_them():
    g = gate()
    for index in g.admit(0):
        g.published(training_id(index), index + 1)
    g.arrived("train-3")
    g.observe_queue(False, now=0.0)
    assert g.expired(1e9, 10) == [], "they wait or are worked on, however long that takes"
    g.observe_queue(True, now=50.0)
    g.observe_queue(True, now=59.0)
    assert g.expired(59.0, 10) == []
    assert g.expired(61.0, 10) == ["train-0", "train-1", "train-2"]
    g.observe_queue(False, now=62.0)
    assert g.expired(1e9, 10) == [], "a sign of life clears the suspicion"
    g.observe_queue(True, now=70.0)
    g.arrived("train-0")
    g.observe_queue(True, now=81.0)
    assert g.expired(81.0, 10) == ["train-1", "train-2"]


def test_a_task_that_waits_to_be_published_is_not_lost_however_full_the_queue_is():
    g = gate()
    g.admit(0)
    g.published("train-0", 1)
    g.observe_queue(True, now=0.0)
    assert g.expired(1e9, 10) == ["train-0"]


def test_adopting_issues_everything_up_to_the_seen_task():
    g = gate()
    g.admit(0)
    assert g.adopt("train-2", 0) == []
    assert g.adopt("train-6", 0) == [4, 5, 6]
    assert g.next_index == 7
    assert g.adopt("train-99999", 0) == [], "no learner can have been that far ahead"
    assert g.adopt("eval-0-3", 0) == []


@pytest.mark.parametrize("text", ["train-", "train-x", "train--1", "eval-3", "", "train-9999999999999", "train-٣"])
def test_foreign_ids_have_no_index(text):
    assert training_index(text) is None


def test_task_ids_round_trip():
    assert [training_index(training_id(i)) for i in (0, 7, 123456)] == [0, 7, 123456]


def test_the_target_may_lower_what_is_admitted_and_never_raises_it_above_the_limit():
    g = gate(bound=1, groups=2)
    g.target = 3
    assert g.admit(0) == [0, 1, 2]
    g.target = 99
    assert g.admit(0) == [3]
    g.target = 2
    assert g.admit(0) == [], "what is out is out"


def test_a_task_remembers_the_version_it_was_issued_at():
    g = gate(bound=1, groups=2)
    g.admit(0)
    g.close("train-0")
    g.admit(3)
    g.adopt("train-5", 4)
    assert [entry.floor for entry in g.outstanding.values()] == [0, 0, 0, 3, 4]
