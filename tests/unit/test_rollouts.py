"""Sampled tokens become one flat, valid message."""

import pytest

from contracts import codec
from contracts.messages import Finish, Outcome, Purpose, Rollout, Sampling, Task
from generator.engines import SampledToken
from generator.environments import make_item
from generator.rollouts import Completion, clean_text, rollout_of, sampling_seed
from infra.grading import Grade
from tests.unit.builders import policy


def task(name: str = "train-7", **changes: object) -> Task:
    fields = {
        "id": name, "run": "test", "purpose": Purpose.TRAIN, "environment": "quick-facts", "seed": 1, "group_size": 2,
        "sampling": Sampling(max_tokens=4, temperature=0.7), "issued_ns": 5,
    }  # fmt: skip
    return Task(**(fields | changes))


def completion(*versions: int) -> Completion:
    made = Completion()
    for position, version in enumerate(versions):
        last = position == len(versions) - 1
        made.add(SampledToken(0, 10 + position, -0.5 * position, policy(version), Finish.STOP if last else None))
    return made


def test_a_rollout_survives_the_wire_as_it_was_sampled():
    item = make_item("Q", "A", "exact")
    made = rollout_of(
        task(), item.hash, 1, [1, 2, 3], completion(3, 3, 4), "ab", Grade(Outcome.OK, 1.0, {"exact": 1.0}),
        generator="generator-1", started_ns=6, finished_ns=7,
    )  # fmt: skip
    read = codec.decode(codec.encode(made), Rollout)
    assert read == made
    assert read.id == "train-7.1"
    assert read.tokens.array().tolist() == [1, 2, 3, 10, 11, 12]
    assert read.loss_mask.array().tolist() == [0, 0, 0, 1, 1, 1]
    assert read.logprobs.array().tolist() == [0, 0, 0, 0, -0.5, -1]
    assert read.temperatures.array().tolist() == pytest.approx([0, 0, 0, 0.7, 0.7, 0.7])
    assert [(s.start, s.policy.version) for s in read.segments] == [(3, 3), (5, 4)]
    assert read.oldest == policy(3), "as old as its oldest token"
    assert read.item == item.hash
    assert not read.sanitised


def test_a_score_that_is_missing_stays_missing():
    grade = Grade(Outcome.VERIFIER_TIMEOUT, None, {})
    made = rollout_of(
        task(), make_item("Q", "A", "exact").hash, 0, [1], completion(0), "a", grade,
        generator="g", started_ns=1, finished_ns=2,
    )  # fmt: skip
    assert codec.decode(codec.encode(made), Rollout).reward is None


def test_text_that_is_not_unicode_is_made_so_and_that_is_recorded():
    assert clean_text("plain ü 🙂") == ("plain ü 🙂", False)
    text, changed = clean_text("a\udcb2b")
    assert changed and text.encode()
    made = rollout_of(
        task(), make_item("Q", "A", "exact").hash, 0, [1], completion(0), "a\udcb2b", Grade(Outcome.WRONG, 0.0, {}),
        generator="g", started_ns=1, finished_ns=2,
    )  # fmt: skip
    assert made.sanitised
    assert codec.decode(codec.encode(made), Rollout).completion == text


def test_a_task_has_one_seed_wherever_it_is_done():
    assert sampling_seed(task()) == sampling_seed(task(issued_ns=9, generation=3))
    assert sampling_seed(task()) != sampling_seed(task("train-8"))
    assert sampling_seed(task()) != sampling_seed(task(run="other"))
