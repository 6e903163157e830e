"""`tailrace bench agents`: what routing does to the bill and to the success of coding-agent sessions.

The sessions are made up (`sessions.py` documents their mix) and the two models are tables of probabilities; everything
between them is the router itself, in this process: requests are parsed, planned, decided, called through the relay,
verified, escalated and booked. The same sessions go all to the strong pool, all to the compact one, by chance at the
router's share, and by what each turn needs in truth.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev
from typing import Annotated, Any

import msgspec
import typer

from contracts.routing import Attempt, Role, Status
from infra.benchmarks.cluster import Cluster, cluster
from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, progress, publish
from infra.bootstrap import bootstrap
from infra.cli.interrupts import run_to_end
from router.admission.keys import EVERYONE, Keys
from router.admission.parse import parse
from router.answering import Answering
from router.benchmarks.sessions import MECHANICAL, Answer, Session
from router.chat import Chunk, Reply, Usage
from router.ledger.books import Books
from router.ledger.store import Ledger
from router.outbox import Outbox
from router.pieces import pieces
from router.policy.calibration import Calibration
from router.policy.decide import Policy
from router.policy.model import cold_start
from router.pools.counting import prompt_tokens
from router.pools.relay import Relay
from router.settings import PoolSettings, RouterSettings
from router.verification.verifiers import Verifiers

POOLS = {
    "compact": PoolSettings(tier="compact", url="-", price_in=0.1, price_out=0.2, price_cached=0.025, window=131072),
    "strong": PoolSettings(
        tier="strong", url="-", price_in=3.0, price_out=15.0, price_cached=0.3, price_cache_write=3.75, window=200000
    ),
}
LONGEST = 150  # turns until a session is given up
CHARTED = {"success": "success", "cost ÷ all strong": "cost_ratio", "turns on compact": "compact_share"}

Choice = Callable[[Session, random.Random], str]  # the model that is asked for


@dataclass
class Desk:
    """What the simulated pools share: the sessions under way, and everything that was said."""

    sessions: dict[str, Session] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)


class SimulatedPool:
    """A model that is a table: answers whatever session a request belongs to, and caches its prompts."""

    def __init__(self, name: str, settings: PoolSettings, desk: Desk) -> None:
        self.name = name
        self.settings = settings
        self._desk = desk
        self._cached: dict[str, int] = {}  # session -> prompt tokens of its last call here

    async def complete(self, body: dict[str, Any]) -> Reply:
        """What a model of this tier says next in the session."""
        session, size = body["prompt_cache_key"], prompt_tokens(body)
        answer = self._desk.sessions[session].answer(self.settings.tier)
        self._desk.answers.append(answer)
        cached = min(self._cached.get(session, 0), size)
        self._cached[session] = size + answer.tokens
        written = 0 if self.settings.price_cache_write is None else size - cached
        choice = {"index": 0, "message": answer.message, "finish_reason": "stop"}
        return Reply(
            body={"id": str(len(self._desk.answers) - 1), "choices": [choice]},
            text=answer.message.get("content") or "",
            finish="stop",
            usage=Usage(size, answer.tokens, cached, written),
            model=self.name,
            tool_calls=tuple(answer.message.get("tool_calls") or ()),
        )

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The same in pieces."""
        async for chunk in pieces(await self.complete(body)):
            yield chunk

    async def close(self) -> None:
        """Nothing is held."""


@dataclass
class Tally:
    """What came of one way of routing, over all sessions."""

    attempts: list[Attempt] = field(default_factory=list)
    cost: list[int] = field(default_factory=list)  # picodollars by session
    success: list[bool] = field(default_factory=list)  # by session
    compact: int = 0  # turns whose answer a compact pool gave
    mechanical: int = 0  # turns that were mechanical in truth
    mechanical_compact: int = 0
    turns: int = 0


def by_router(_session: Session, _draw: random.Random) -> str:
    return "auto"


def by_truth(session: Session, _draw: random.Random) -> str:
    return "compact" if session.work in MECHANICAL else "strong"


def agents_benchmark(
    sessions: Annotated[int, typer.Option(help="Sessions, the same for each way of routing.", min=20)] = 400,
    seed: Annotated[int, typer.Option(help="Of the first session; the others follow.", min=0)] = 1000,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """What routing does to bill and success of coding-agent sessions (simulated models)."""
    tallies = run_to_end(_measure(range(seed, seed + sessions)))
    publish(report(tallies), json_file=json_file, plot_file=plot_file)


async def _measure(seeds: Sequence[int]) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {}
    async with cluster() as machine:
        ways: dict[str, Choice] = {
            "all strong": lambda *_: "strong",
            "all compact": lambda *_: "compact",
            "router": by_router,
        }
        for name, choice in ways.items():
            tallies[name] = await _sessions(machine, name, choice, seeds)
        share = tallies["router"].compact / tallies["router"].turns
        ways = {"random": lambda _, draw: "compact" if draw.random() < share else "strong", "truth": by_truth}
        for name, choice in ways.items():
            tallies[name] = await _sessions(machine, name, choice, seeds)
    return tallies


async def _sessions(machine: Cluster, name: str, choice: Choice, seeds: Sequence[int]) -> Tally:
    """All sessions, one after the other, with a router of their own."""
    tally, desk = Tally(), Desk()
    async with _router(machine, name.replace(" ", "-"), desk) as answering:
        for number, seed in enumerate(seeds):
            if number % 50 == 0:
                progress(f"{name}: session {number + 1} of {len(seeds)}")
            session = desk.sessions[f"s{seed}"] = Session(seed)
            tally.cost.append(await _session(answering, session, desk, choice, random.Random(seed), tally))
            tally.success.append(session.success)
            del desk.sessions[f"s{seed}"]
    return tally


async def _session(
    answering: Answering, session: Session, desk: Desk, choice: Choice, draw: random.Random, tally: Tally
) -> int:
    """One session to its end; its cost in picodollars."""
    cost = turns = 0
    while not session.done and turns < LONGEST:
        body = session.body | {"model": choice(session, draw)}
        record = answering.begin(parse(msgspec.json.encode(body)), EVERYONE)
        reply = await answering.answer(record)
        assert record.outcome is not None
        compact, mechanical = reply.pool == "compact", session.work in MECHANICAL
        turns += 1
        tally.turns += 1
        tally.compact += compact
        tally.mechanical += mechanical
        tally.mechanical_compact += compact and mechanical
        tally.attempts += record.attempts
        cost += record.outcome.cost
        session.advance(desk.answers[int(reply.body["id"])])
    return cost


@asynccontextmanager
async def _router(machine: Cluster, run: str, desk: Desk) -> AsyncIterator[Answering]:
    """The router in this process, between simulated pools and a real ledger and bus."""
    await bootstrap(machine.bus, run, [], create=True)
    settings = RouterSettings(pools=POOLS, directory=machine.directory / run, exploration=0.0)
    pools = {name: SimulatedPool(name, each, desk) for name, each in POOLS.items()}
    policy = Policy("cold start", cold_start(), Calibration())
    outbox = Outbox(machine.bus, settings.directory, run)
    publishing = asyncio.create_task(outbox.run())
    verifiers = Verifiers(1)
    await verifiers.start()
    try:
        with closing(Ledger(settings.directory)) as ledger:
            keys = Keys({}, {}, 0.0)
            yield Answering(run, settings, Relay(pools), keys, Books(ledger, outbox), verifiers, lambda: (policy, None))
    finally:
        await verifiers.close()
        await outbox.close()
        await publishing


# -- figures -----------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean, by the normal approximation."""
    half = NormalDist().inv_cdf(0.975) * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


def report(tallies: Mapping[str, Tally]) -> Report:
    """Figures and table; success and cost are compared session by session with those of `all strong`."""
    strong = tallies["all strong"]
    figures: dict[str, Any] = {"sessions": len(strong.cost)}
    rows = []
    for name, tally in tallies.items():
        gained = [float(a) - float(b) for a, b in zip(tally.success, strong.success, strict=True)]
        low, high = interval(gained)
        prompt = sum(each.prompt_tokens for each in tally.attempts)
        found = figures[name.replace(" ", "_")] = {
            "compact_share": tally.compact / tally.turns,
            "mechanical_share": tally.mechanical / tally.turns,
            "mechanical_to_compact": tally.mechanical_compact / tally.mechanical,
            "cost_usd": sum(tally.cost) / 1e12,
            "cost_ratio": sum(tally.cost) / sum(strong.cost),
            "success": fmean(tally.success),
            "success_difference": fmean(gained),
            "success_difference_interval": [low, high],
            "turns_per_session": tally.turns / len(tally.cost),
            "cached_share": sum(each.cached_tokens for each in tally.attempts) / prompt,
            "escalations": sum(each.role == Role.ESCALATION for each in tally.attempts),
            "failed_calls": sum(each.status != Status.OK for each in tally.attempts),
        }
        rows.append(
            [
                name,
                f"{found['compact_share']:.0%}",
                f"{found['cost_ratio']:.2f}",
                f"{found['success']:.1%}",
                f"{100 * fmean(gained):+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]",
                f"{found['turns_per_session']:.1f}",
                f"{found['cached_share']:.0%}",
            ]
        )
    routed = figures["router"]
    return Report(
        figures,
        ["way", "turns on compact", "cost ÷ all strong", "success", "difference, 95 %", "turns", "prompt cached"],
        rows,
        [
            f"{routed['compact_share']:.0%} of turns went to the compact pool (reference: up to 60 %) "
            f"at {routed['cost_ratio']:.0%} of the cost of all strong.",
            "The models are tables of probabilities and the sessions are made up: differences count, levels do not.",
            "truth: routed by what each turn needs, which no router knows; random: at the router's own share.",
        ],
        Chart(
            "Coding-agent sessions", "", "share", list(tallies),
            {
                title: [figures[name.replace(" ", "_")][key] for name in tallies]
                for title, key in CHARTED.items()
            },
        ),
    )  # fmt: skip
