"""Who is there and who works on what, from reports that come late and from generators that vanish."""

import msgspec
import pytest

from contracts.examples import EXAMPLES
from contracts.messages import GeneratorReport
from learner.fleet import Fleet
from learner.gate import AdmissionGate


def report(generator: str, version: int, **tasks: int) -> GeneratorReport:
    example = EXAMPLES["generator_report"]
    assert isinstance(example, GeneratorReport)
    named = {task.replace("_", "-"): began for task, began in tasks.items()}
    return msgspec.structs.replace(example, generator=generator, version=version, tasks=named)


def gate(*published: int) -> AdmissionGate:
    made = AdmissionGate(1, 2, 10)
    for index in made.admit(3):
        if index in published:
            made.published(f"train-{index}", 10 + index)
    return made


def test_a_generator_is_there_while_it_reports():
    fleet = Fleet(silence=6)
    assert (fleet.present(0.0), fleet.floor(0.0)) == ([], 0)
    fleet.report(report("a", 5), 0.0)
    fleet.report(report("b", 4), 3.0)
    assert fleet.floor(5.0) == 4, "of the slowest"
    fleet.report(report("b", 7), 5.0)
    assert [r.generator for r in fleet.present(7.0)] == ["b"]
    assert fleet.floor(7.0) == 7


def test_work_is_what_a_generator_names_or_has_taken_too_recently_to_name():
    fleet, g = Fleet(silence=6), gate(0, 1, 2)
    assert fleet.in_hand(g.outstanding, 0.0) == {}, "nobody was seen to take anything"
    g.observe_taken(11, floor=5, now=0.0)
    assert fleet.in_hand(g.outstanding, 1.0) == {"train-0": 3, "train-1": 3}
    fleet.report(report("a", 5, train_1=4, train_99=4), 2.0)
    assert fleet.in_hand(g.outstanding, 5.0) == {"train-0": 3, "train-1": 4}
    assert fleet.in_hand(g.outstanding, 7.0) == {"train-1": 4}, "whoever took train-0 is gone, or gave it back"
    assert fleet.in_hand(g.outstanding, 9.0) == {}, "and so is the other"
    fleet.report(report("b", 6, train_0=6), 9.0)
    assert fleet.in_hand(g.outstanding, 9.0) == {"train-0": 6}, "it is sampled afresh"


def test_what_still_waits_in_the_queue_will_be_sampled_by_what_generators_have_by_now():
    fleet, g = Fleet(silence=6), gate(0, 1)
    g.observe_taken(10, floor=8, now=0.0)
    g.observe_taken(11, floor=9, now=1.0)
    assert fleet.in_hand(g.outstanding, 1.0) == {"train-0": 3, "train-1": 8}


@pytest.mark.parametrize("task", ["train-0", "train-7"])
def test_a_task_that_is_closed_when_its_publication_returns_is_forgotten(task):
    g = gate()
    if task in g.outstanding:
        g.close(task)
    g.published(task, 10)
    assert task not in g.outstanding
