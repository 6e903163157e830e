"""One step of learning: when a trial begins, and when it ends without anything to show."""

from __future__ import annotations

from pathlib import Path

from contracts.routing import Verdict
from router.policy.evidence import Journal
from router.policy.learning import ENOUGH, TRIAL_SECONDS, step
from router.policy.store import PolicyStore
from tests.unit.router.test_evidence import attempt, decision, outcome
from tests.unit.router.test_policy_store import opened

S = 10**9


def judged(journal: Journal, count: int, at_ns: int, policy: str) -> None:
    for index in range(count):
        id = f"{policy}-{at_ns}-{index}"
        journal.add(decision(id, at_ns=at_ns + index, policy=policy))
        journal.add(outcome(attempt(Verdict.PASSED if index % 3 else Verdict.FAILED), request=id))


def stepped(store: PolicyStore, journal: Journal, now_ns: int) -> str:
    step(store, journal, now_ns)
    return store.trial.version if store.trial else ""


def test_a_trial_begins_when_enough_was_judged_and_not_again_for_the_same(tmp_path: Path) -> None:
    store, journal = opened(tmp_path), Journal()
    shipped = store.shipped.version
    judged(journal, ENOUGH - 1, at_ns=S, policy=shipped)
    assert stepped(store, journal, 2 * S) == ""
    judged(journal, ENOUGH, at_ns=2 * S, policy="made on another model")
    assert stepped(store, journal, 2 * S) == ""
    judged(journal, 1, at_ns=2 * S, policy=shipped)
    version = stepped(store, journal, 3 * S)
    assert version and store.head.notes[version].reason == f"fitted to {ENOUGH} judged answers"
    assert stepped(store, journal, 4 * S) == version  # it goes on
    assert store.policy is store.shipped

    late = round((TRIAL_SECONDS + 10) * S)
    assert stepped(store, journal, late) == ""
    assert "too little came of it" in store.head.notes[version].reason
    assert store.policy is store.shipped


def test_a_restart_in_the_middle_of_a_trial_goes_on_with_it(tmp_path: Path) -> None:
    store, journal = opened(tmp_path), Journal()
    judged(journal, ENOUGH, at_ns=S, policy=store.shipped.version)
    version = stepped(store, journal, 2 * S)
    again = opened(tmp_path)
    assert again.trial is not None and again.trial.version == version
    assert stepped(again, journal, 3 * S) == version
    assert again.head == store.head
