"""The summary of hand-made records."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.messages import (
    DeadLetter,
    Discard,
    GeneratorReport,
    Message,
    Outcome,
    PolicySegment,
    PolicyVersion,
    Purpose,
    Reason,
    Split,
    StepReport,
)
from contracts.policies import WeightPatch
from infra.summary import summarise
from tests.unit.builders import policy, rollout

S = 10**9


def published(version: int, generation: int = 1, *, size: int = 100, digest: str = "") -> PolicyVersion:
    reference = policy(version, generation)
    if digest:
        reference = type(reference)(generation, version, digest)
    return PolicyVersion(
        run="test", policy=reference, tensors=[], size=size, bundle="b", parent=None, published_ns=0
    )  # fmt: skip


def step(version: int, ids: list[str], generation: int = 1, **changes: Any) -> StepReport:
    fields: dict[str, Any] = {
        "run": "test",
        "policy": policy(version, generation),
        "step": version,
        "rollout_ids": ids,
        "staleness": [0] * len(ids),
        "rewards": [0.0] * len(ids),
        "groups": 1,
        "zero_advantage_groups": 0,
        "tokens": 2 * len(ids),
        "loss": 0.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "metrics": {},
        "seconds": {},
        "wall_seconds": 10.0,
        "idle_seconds": 1.0,
        "staleness_bound": 4,
        "outstanding": 0,
        "at_ns": 0,
    }
    return StepReport(**(fields | changes))


def generator(name: str, wall: float, idle: float, tokens: int = 0) -> GeneratorReport:
    return GeneratorReport(
        run="test", generator=name, generation=1, version=0, seconds={}, wall_seconds=wall, idle_seconds=idle,
        tokens=tokens, rollouts=0, outcomes={}, inflight=0, at_ns=0,
    )  # fmt: skip


def discard(reason: str, *ids: str, task: str = "train-0") -> Discard:
    return Discard(
        run="test", task_id=task, rollout_ids=list(ids), reason=reason, detail="", generation=1, version=0, at_ns=0
    )


def answer(item: str, version: int, outcome: str, **changes: Any):  # type: ignore[no-untyped-def]
    fields = {"purpose": Purpose.EVAL, "split": Split.HELDOUT, "item": item, "outcome": outcome, "version": version}
    return rollout(f"eval-{version}-{item}", **(fields | changes))


def of(*records: Message | tuple[Message, float]) -> dict[str, Any]:
    """The summary of records; those without a time follow each other by a second."""
    timed = [record if isinstance(record, tuple) else (record, float(n)) for n, record in enumerate(records)]
    return summarise((message, int(seconds * S)) for message, seconds in timed)


def test_nothing_at_all() -> None:
    summary = of()
    assert summary["steps"] == 0
    assert summary["eval_delta_ci"] is None
    assert summary["learner_idle_ratio"] is None
    assert summary["mismatches"] == []


def test_evaluation_pairs_items_of_the_first_and_the_last_policy() -> None:
    summary = of(
        *[published(version) for version in range(3)],
        *[answer(item, 0, Outcome.WRONG) for item in "abc"],
        answer("d", 0, Outcome.OK),
        answer("a", 1, Outcome.WRONG),  # an evaluation in between does not count
        *[answer(item, 2, Outcome.OK) for item in "abd"],
        answer("c", 2, Outcome.NO_ANSWER),
        answer("e", 2, Outcome.OK),  # only on one side
    )
    assert (summary["eval_before"], summary["eval_after"], summary["eval_delta"]) == (0.25, 0.8, 0.5)
    assert summary["eval_items"] == 4
    low, high = summary["eval_delta_ci"]
    assert low < 0.5 < high
    assert high == 1.0, "the symmetric interval would reach beyond the largest possible gain"


def test_answers_that_say_nothing_are_left_out() -> None:
    mixed = answer("d", 0, Outcome.OK, length=6, segments=[PolicySegment(3, policy(0)), PolicySegment(4, policy(1))])
    summary = of(
        published(0),
        answer("a", 0, Outcome.OK),
        answer("a", 0, Outcome.OK),  # the same rollout again
        answer("b", 0, Outcome.VERIFIER_TIMEOUT, reward=None),
        answer("c", 0, Outcome.TRUNCATED),
        mixed,
        answer("e", 0, Outcome.OK, split=Split.TRAIN),
    )
    assert summary["eval_before"] == 0.5
    assert summary["eval_unusable"] == 2


def test_the_same_weights_under_a_new_generation_are_the_same_policy() -> None:
    summary = of(
        published(0, 1, digest="aa"),
        published(0, 2, digest="aa"),
        published(1, 2, digest="bb"),
        rollout(
            "eval-0-x", **_eval("x", Outcome.WRONG), segments=[PolicySegment(3, published(0, 1, digest="aa").policy)]
        ),
        rollout("eval-1-x", **_eval("x", Outcome.OK), segments=[PolicySegment(3, published(1, 2, digest="bb").policy)]),
    )
    assert (summary["eval_before"], summary["eval_after"]) == (0.0, 1.0)
    assert summary["policy_versions"] == 2
    assert summary["weights_bytes"] == 200


def test_weights_are_counted_as_they_were_stored() -> None:
    whole, same = published(0, size=1000), published(0, generation=2, size=1000, digest=policy(0).digest)
    steps = [WeightPatch(policy(number), f"{number:064x}", 10 * number) for number in (1, 2)]
    patched = [
        msgspec.structs.replace(published(count, size=1000), keyframe=whole.policy, patches=steps[:count])
        for count in (1, 2)
    ]
    summary = of(whole, *patched, same)
    assert summary["weights_bytes"] == 1000 + 10 + 20
    assert (summary["weights_keyframes"], summary["weights_patches"]) == (1, 2)


def _eval(item: str, outcome: str) -> dict[str, Any]:
    return {"purpose": Purpose.EVAL, "split": Split.HELDOUT, "item": item, "outcome": outcome}


def test_staleness_comes_from_the_rollouts_themselves() -> None:
    summary = of(
        *[published(version) for version in range(4)],
        *[rollout("train-0", index, version=0, reward=0.0) for index in range(2)],
        *[rollout("train-1", index, version=1, reward=0.0) for index in range(2)],
        step(1, ["train-0.0", "train-0.1"]),
        step(3, ["train-1.0", "train-1.1"], staleness=[1, 1]),
    )
    assert (summary["staleness_max"], summary["staleness_mean"], summary["staleness_bound"]) == (1, 0.5, 4)
    assert summary["mismatches"] == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"staleness": [0]}, "step 3: 1 of 1 trained rollouts have another staleness than the step reports"),
        ({"rewards": [1.0], "staleness": [2]}, "have another reward"),
        ({"rollout_ids": ["train-9.0"]}, "are not on the bus"),
    ],
)
def test_a_report_that_disagrees_with_the_rollouts_is_named(changes: dict[str, Any], sentence: str) -> None:
    sampled = rollout("train-0", 0, version=0, reward=0.0)
    summary = of(published(0), published(3), sampled, step(3, ["train-0.0"], **changes))
    assert sentence in " ".join(summary["mismatches"])
    if "rollout_ids" not in changes:
        assert summary["staleness_max"] == 2


def test_a_rollout_of_a_lost_policy_is_named() -> None:
    summary = of(
        published(0, 1),
        published(2, 1),
        published(1, 2),
        rollout("train-0", 0, version=2, generation=1, reward=0.0),
        step(3, ["train-0.0"], generation=2),
    )
    assert "do not descend from" in " ".join(summary["mismatches"])


def test_steps_that_a_restart_lost_count_for_nothing_but_time() -> None:
    ids = {version: [f"train-{version}.0", f"train-{version}.1"] for version in range(1, 5)}
    rollouts = [
        rollout(f"train-{v}", i, version=v - 1, reward=0.0, issued_ns=int(2.5 * S)) for v in ids for i in range(2)
    ]
    summary = of(
        (published(0), 0),
        *[(each, 3) for each in rollouts],
        (published(1), 12),
        (step(1, ids[1], wall_seconds=10.0, idle_seconds=4.0), 12),
        (published(2), 22),
        (step(2, ids[2], wall_seconds=20.0, idle_seconds=8.0), 22),  # lost: learner 2 took over at version 1
        (published(1, 2), 30),
        (published(2, 2), 40),
        (step(2, ids[2], 2, staleness=[0, 0], wall_seconds=10.0, idle_seconds=2.0), 40),
    )
    assert (summary["steps"], summary["steps_lost"], summary["learner_generations"]) == (2, 1, 2)
    assert summary["rollouts_trained"] == 4
    assert summary["duplicates_trained"] == 0
    assert summary["policy_versions"] == 3
    assert summary["training_seconds"] == 30.0
    assert summary["learner_idle_ratio"] == pytest.approx(10 / 30)
    assert summary["tokens_per_second"] == pytest.approx(16 / 30)


def test_a_rollout_in_two_surviving_steps_is_a_duplicate() -> None:
    summary = of(
        *[published(version) for version in range(3)],
        *[rollout("train-0", index, reward=0.0) for index in range(2)],
        step(1, ["train-0.0", "train-0.1"]),
        step(2, ["train-0.0"], staleness=[1]),
        step(2, ["train-0.0"], staleness=[1]),  # the same report again is not another step
    )
    assert (summary["steps"], summary["rollouts_trained"], summary["duplicates_trained"]) == (2, 2, 1)


def test_discards_are_counted_once_per_rollout_under_their_last_reason() -> None:
    summary = of(
        published(0),
        discard(Reason.STALE, "train-0.0", "train-0.1"),
        discard(Reason.STALE, "train-0.0", "train-0.1"),
        discard(Reason.UNSCORED, "train-1.0", task="train-1"),
        discard(Reason.STALE, "train-1.0", task="train-1"),
        discard(Reason.STALE, "train-2.0", task="train-2"),  # decided by a learner that died, then trained
        discard(Reason.ZERO_ADVANTAGE, "train-2.1", task="train-2"),  # part of the batch, without a gradient
        discard(Reason.DUPLICATE, "train-2.0", task="train-2"),
        discard(Reason.TASK_EXPIRED, task="train-3"),
        step(1, ["train-2.0", "train-2.1"]),
    )
    assert summary["rollouts_discarded"] == {"duplicate": 1, "stale": 3, "zero_advantage": 1}
    assert summary["tasks_expired"] == 1
    assert summary["rollouts_trained"] == 2


def test_idle_time_of_generators_adds_up_over_restarts() -> None:
    sampling = [rollout(f"t-{n}", generator="g-1", started_ns=n * S, finished_ns=(n + 1) * S) for n in range(14)]
    summary = of(
        *sampling,
        generator("g-1", 5, 1),
        generator("g-1", 10, 2),
        generator("g-1", 3, 1),  # the process was started again
        generator("g-1", 6, 2),
        generator("g-2", 8, 8),
    )
    assert summary["generator_idle_ratio"] == pytest.approx((2 + 2 + 8) / (10 + 6 + 8))
    assert summary["mismatches"] == []


def test_idle_times_that_the_records_contradict_are_named() -> None:
    busy = of(generator("g-1", 100, 1), rollout("t-0", generator="g-1", started_ns=0, finished_ns=5 * S))
    assert "g-1 reports 99.0 busy seconds" in busy["mismatches"][0]
    late = rollout("train-1", 0, reward=0.0, issued_ns=S)
    waited = of(
        (published(0), 0),
        (rollout("train-0", 0, reward=0.0, issued_ns=S), 2),
        (step(1, ["train-0.0"], wall_seconds=9.0, idle_seconds=0.0), 10),
        (late, 60),
        (step(2, ["train-1.0"], staleness=[1], wall_seconds=65.0, idle_seconds=0.0), 66),
    )
    assert "waited for at least 50.0 s" in waited["mismatches"][0]


def test_wall_time_that_the_server_contradicts_is_named() -> None:
    summary = of(
        (published(0), 0),
        (rollout("train-0", 0, reward=0.0, issued_ns=S), 2),
        (step(1, ["train-0.0"], wall_seconds=100.0, idle_seconds=0.0), 11),
    )
    assert "reports 100.0 s of training, the server saw 10.0 to 11.0 s" in summary["mismatches"][0]


def test_wall_seconds_leave_out_the_time_between_stop_and_resume() -> None:
    assert of((published(0), 0), (published(1), 30), (published(1, 2), 10_000), (published(2, 2), 10_020))[
        "wall_seconds"
    ] == pytest.approx(30 + 60 + 20)


def test_dead_letters_are_counted_by_code() -> None:
    letter = DeadLetter(
        stream="ROLLOUTS", subject="s", sequence=1, consumer="c", code="malformed", reason="", headers={}, payload=b"",
        size=0, deliveries=1, at_ns=0,
    )  # fmt: skip
    assert of(letter, letter)["dead_letters"] == {"malformed": 2}


def test_rewards_per_step() -> None:
    summary = of(
        published(0),
        *[rollout("train-0", index, reward=float(index)) for index in range(2)],
        step(1, ["train-0.0", "train-0.1"], rewards=[0.0, 1.0]),
    )
    assert summary["reward_per_step"] == [0.5]
