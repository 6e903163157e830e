"""Where a request, or a part of one, goes: the policy is asked about the pools as they are at this moment."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from router.decomposition.plan import Plan, Subtask
from router.policy.affinity import Affinity, View
from router.policy.decide import Policy, decide
from router.policy.decision import Decision
from router.pools.relay import Relay
from router.question import question_of
from router.record import Record

Policies = Callable[[], tuple[Policy, Policy | None]]


class Deciding:
    """Decides for those who answer requests, and for those who are only asked where one would go."""

    def __init__(self, relay: Relay, policies: Policies, exploration: float) -> None:
        """`policies` gives the routing policy in force, and the one on trial; `exploration` is as in `decide`."""
        self.affinity = Affinity()
        self._relay = relay
        self.policies = policies
        self._exploration = exploration

    def view(self, record: Record) -> View:
        """What is known now of the session that a request is a turn of."""
        return self.affinity.view(record.conversation, time.monotonic())

    def decide(
        self,
        record: Record,
        plan: Plan,
        subtask: Subtask,
        view: View,
        *,
        body: Mapping[str, Any] | None = None,
        minimum: str = "",
        checked: bool = False,
        explores: bool = True,
    ) -> Decision:
        """Where `subtask` goes; the rest as in `question_of`. The record keeps it. Raises `ApiError`."""
        question = question_of(
            record.request, record.asked, plan, subtask,
            view=view, body=body, budget=record.left, minimum=minimum, checked=checked,
        )  # fmt: skip
        states = self._relay.states()
        policy, trial = self.policies()
        decision = decide(
            question,
            states if subtask.prompt else view.known(states),
            policy,
            draw=random.random(),
            exploration=self._exploration if explores and not minimum and not record.asked.named else 0.0,
            trial=trial,
        )
        if record.asked.named:
            decision = replace(decision, reason="named")
        elif minimum:
            decision = replace(decision, reason="deferred" if record.deferred(subtask.name) else "verifier")
        record.decided(question, decision, subtask)
        return decision
