"""The routing policy learns over a real server: from messages to a promotion that every router takes up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from contracts.messages import Message
from contracts.routing import Attempt, Demand, Feedback, RouteDecision, RouteOutcome, Status, Verdict
from contracts.subjects import FEEDBACK, ROUTE_DECISION, ROUTE_OUTCOME
from infra.bus import Bus
from infra.server import EmbeddedServer
from router.decomposition.plan import Kind
from router.policy import learning
from router.policy.decide import NeutralModel, Policy, decide
from router.policy.learning import learn
from router.policy.model import RoutingModel
from router.policy.sharing import share
from router.policy.store import PolicyStore
from tests.integration.helpers import until
from tests.unit.router.policies import pool, question
from tests.unit.router.test_policy_store import promoted

POOLS = [pool("compact"), pool("strong")]
TRUE = {Kind.CODE: {"compact": 0.9, "strong": 0.92}, Kind.TESTS: {"compact": 0.15, "strong": 0.95}}


def opened(directory: Path) -> PolicyStore:
    return PolicyStore(directory, NeutralModel(), RoutingModel.load)


@asynccontextmanager
async def learning_in(bus: Bus, run: str, store: PolicyStore) -> AsyncIterator[None]:
    task = asyncio.create_task(learn(bus, run, store, holder="test", every=0.1, sharing=0.1))
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def traffic(bus: Bus, run: str, policy: Policy, trial: Policy | None, count: int, seed: int) -> None:
    """Requests that a router answers under `policy`, and what people say of the answers."""
    rng = random.Random(seed)
    decisions, outcomes, feedback = dict[str, Message](), dict[str, Message](), dict[str, Message]()
    for index in range(count):
        id, kind = f"{seed}-{index}", rng.choice(list(TRUE))
        asked = question(kind=kind, demand=Demand.MECHANICAL, tolerance=0.1)
        made = decide(asked, POOLS, policy, draw=rng.random(), exploration=0.3, trial=trial)
        right = rng.random() < TRUE[kind][made.pool]
        price = made.scores[made.pool].cost
        attempt = Attempt("", made.pool, "m", "answer", Status.OK, Verdict.NONE, 1000, 0, 300, price, False, 1.0, 0.1,
                          tier=made.pool)  # fmt: skip
        decisions[id] = RouteDecision(
            id=id, run=run, request_id=id, subtask="", session="", key="", requested="auto", kind=kind,
            demand=asked.demand, pool=made.pool, order=[name for name in made.order if name != made.pool],
            reason=made.reason, scores=made.scores, excluded=made.excluded, features=made.features,
            propensity=made.propensity, tolerance=asked.tolerance, policy=made.policy, shadow=made.shadow,
            at_ns=learning.time.time_ns(),
        )  # fmt: skip
        outcomes[id] = RouteOutcome(
            request_id=id, run=run, key="", session="", requested="auto", pool=made.pool, kind=kind, status=Status.OK,
            decisions=[id], attempts=[attempt], cost=price, counterfactual=price, error="", seconds=1.0,
            overhead_seconds=0.0, at_ns=1,
        )  # fmt: skip
        feedback[id] = Feedback(id=id, run=run, request_id=id, key="", passed=right)
    for channel, messages in ((FEEDBACK, feedback), (ROUTE_OUTCOME, outcomes), (ROUTE_DECISION, decisions)):
        await bus.publish_all(channel, messages, run=run)


async def test_it_learns_where_compact_fails_and_every_router_follows(
    bus: Bus, server: EmbeddedServer, run: str, tmp_path: Path
) -> None:
    store, other = opened(tmp_path / "one"), opened(tmp_path / "two")
    shipped = store.policy
    async with learning_in(bus, run, store):
        await traffic(bus, run, shipped, None, 400, seed=1)
        assert await until(lambda: store.trial is not None, seconds=20)
        trial = store.trial
        assert trial is not None and store.policy is shipped  # asked, and not yet followed
        server.kill()  # while it learns
        server.start()
        await traffic(bus, run, shipped, trial, 2000, seed=2)
        assert await until(lambda: store.policy.version == trial.version, seconds=30)
    note = store.head.notes[trial.version]
    assert note.metrics["success"] > note.metrics["success_in_force"] + 0.1
    asked = question(kind=Kind.TESTS, tolerance=0.1)
    assert decide(asked, POOLS, shipped, draw=0.9).pool == "compact"
    assert decide(asked, POOLS, store.policy, draw=0.9).pool == "strong"
    assert decide(replace(asked, kind=Kind.CODE), POOLS, store.policy, draw=0.9).pool == "compact"

    async with learning_in(bus, run, opened(tmp_path / "one")):  # restarted: what was read before changes nothing
        async with asyncio.timeout(10):
            while other.policy.version != trial.version:
                await share(bus, run, other)
        assert opened(tmp_path / "two").policy.calibration == store.policy.calibration
        await asyncio.sleep(0.5)
    assert opened(tmp_path / "one").head.history == [trial.version]


async def test_what_is_poisoned_on_the_bus_is_refused_and_replaced(bus: Bus, run: str, tmp_path: Path) -> None:
    one, two = opened(tmp_path / "one"), opened(tmp_path / "two")
    first = promoted(one, 1.0)
    await share(bus, run, one)
    await share(bus, run, two)
    assert two.policy.version == first
    await bus.put(f"{run}.routing.head", b"\xff not a head")
    await share(bus, run, two)
    assert two.policy.version == first
    head = await bus.get(f"{run}.routing.head")
    assert head is not None and first.encode() in head[0]  # put right again

    second = promoted(one, 2.0)
    await bus.put(f"{run}.routing.policy.{second}", b"{}")
    await share(bus, run, one)
    await share(bus, run, two)
    assert (one.policy.version, two.policy.version) == (second, first)  # the former one stays in force


async def test_a_rollback_at_one_router_is_one_at_all(bus: Bus, run: str, tmp_path: Path) -> None:
    one, two = opened(tmp_path / "one"), opened(tmp_path / "two")
    first, _ = promoted(one, 1.0), promoted(one, 2.0)
    await share(bus, run, one)
    await share(bus, run, two)
    assert two.roll_back() == first
    await share(bus, run, two)
    await share(bus, run, one)
    assert one.policy.version == first
