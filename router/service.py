"""The router: pools from the settings, a gateway before them, a ledger behind it, and the bus beside it.

Requests come in at `router.gateway`, and `router.answering` tells what becomes of one. Here the parts are put together,
started, and stopped in an order that loses nothing: no new requests, the running ones to their end, then the books.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager

import structlog
import uvicorn
from nats.errors import Error as NatsError
from starlette.types import ASGIApp

from infra.bus import Bus, Unavailable
from infra.errors import UserError
from infra.service import Service
from router.admission.keys import Keys
from router.admission.models import check
from router.admission.parse import parse
from router.advice import Advisor, answer_requests
from router.answering import Answering
from router.decomposition.planner import plan
from router.gateway.app import make_app
from router.gateway.completions import Completions
from router.ledger.books import Books
from router.ledger.store import Ledger, follow
from router.outbox import Outbox
from router.policy.learning import learn
from router.policy.model import RoutingModel, cold_start
from router.policy.store import PolicyStore
from router.pools.base import Pool
from router.pools.bus import BusPool
from router.pools.openai import OpenAIPool
from router.pools.relay import Relay
from router.settings import RouterSettings
from router.verification.verifiers import Verifiers

log = structlog.get_logger(__name__)

BACKLOG = 2048  # connections that wait to be accepted
FILES = 65_536  # open at once, where the system allows that many
KEEP_ALIVE_SECONDS = 75  # idle connections of applications
DRAIN_SHARE = 0.7  # of the time that a service has to stop: for running requests; the rest is for the books
CLOSE_SECONDS = 2  # for connections, once nothing is being answered
VERIFIERS = 1  # processes that check answers, and as many that run tests
BEAT_SECONDS = 1.0
FIRST_REQUEST = b'{"model": "auto", "messages": [{"role": "user", "content": "1. Write a haiku.\\n2. Add 2 and 2."}]}'
GC_ALLOCATIONS = 10_000  # objects between two looks for garbage; requests leave few cycles behind
BUS_SECONDS = 2.0  # before what the bus has ended is begun again


async def main(service: Service) -> None:
    """Answer requests until the service is told to stop, and the running ones to their end."""
    settings: RouterSettings = service.settings.section("router")
    run = service.settings.run.name
    keys = Keys(settings.keys, os.environ, time.monotonic())
    if keys.open:
        log.warning("the gateway is open to everyone: router.keys names no API key")
    pools = make_pools(settings, os.environ, service.bus, run)
    async with AsyncExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger(settings.directory)))
        outbox = Outbox(service.bus, settings.directory, run)
        service.spawn(outbox.run(), "outbox")
        stack.push_async_callback(outbox.close)
        relay = Relay(pools)
        stack.push_async_callback(relay.close)
        verifiers = Verifiers(VERIFIERS)
        stack.push_async_callback(verifiers.close)
        await verifiers.start()
        store = PolicyStore(settings.directory / "policies", cold_start(), RoutingModel.load)
        books = Books(ledger, outbox)
        answering = Answering(run, settings, relay, keys, books, verifiers, lambda: (store.policy, store.trial))
        completions = Completions(answering, keys)
        service.spawn(_on_the_bus(service, answering, ledger, store), "bus")

        def ready() -> tuple[bool, str]:
            return readiness(relay, service.bus.connected, service.stopping.is_set())

        _allow_connections()
        plan(parse(FIRST_REQUEST))  # what is made when it is first needed is made now
        app = make_app(answering, completions, keys, books, alive=service.health.liveness, ready=ready)
        address = await stack.enter_async_context(listening(service, app, settings.host, settings.port))
        _settle_memory()
        service.ready(address)
        await _until_stopped(service)
        completions.draining = True
        await completions.drained(DRAIN_SHARE * service.settings.service.drain_seconds)


def _allow_connections() -> None:
    """As many open files as the system lets this process have: each request that runs needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _settle_memory() -> None:
    """Keep the garbage collector from what is loaded by now and stays, tens of thousands of objects.

    It looked through them again and again, for a fifth of the time that a request took.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 20)


async def _on_the_bus(service: Service, answering: Answering, ledger: Ledger, store: PolicyStore) -> None:
    """What is done with others, from when the bus is there: decisions for those who ask, the books of all, learning."""
    await service.bus_ready()
    bus, run, create = service.bus, answering.run, service.settings.nats.manage_streams
    works: dict[str, Callable[[], Awaitable[None]]] = {
        "advice": lambda: answer_requests(bus, run, Advisor(answering), create=create, stopping=service.stopping),
        "ledger": lambda: follow(bus, ledger, run),
        "policy": lambda: learn(bus, run, store, holder=service.instance),
    }
    async with asyncio.TaskGroup() as group:
        for name, work in works.items():
            group.create_task(_lasting(service, name, work), name=name)


async def _lasting(service: Service, name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Applications are answered whatever becomes of bus and disk: what needs them is begun again after a while.

    Streams that are gone, because the server was set up anew, are made again first.
    """
    while True:
        try:
            await work()
            return
        except* (UserError, Unavailable, NatsError, OSError) as errors:  # a full disk among them
            log.error("not done for now", work=name, error="; ".join(map(str, errors.exceptions)))
        await asyncio.sleep(BUS_SECONDS)
        await service.prepare_bus()


def make_pools(settings: RouterSettings, environment: Mapping[str, str], bus: Bus, run: str) -> dict[str, Pool]:
    """The pools of the settings. Raises `UserError` where one cannot be."""
    if not settings.pools:
        raise UserError("router.pools is empty; describe at least one pool in the run file, as [router.pools.NAME]")
    check(settings.pools)
    pools: dict[str, Pool] = {}
    for name, each in settings.pools.items():
        if each.kind == "bus":
            pools[name] = BusPool(name, each, bus, run)
        else:
            pools[name] = OpenAIPool.from_environment(name, each, environment)
    return pools


def readiness(relay: Relay, connected: bool, stopping: bool) -> tuple[bool, str]:
    """Whether a request could be answered now, and a sentence."""
    if stopping:
        return False, "draining"
    states = relay.states()
    able = [each.name for each in states if each.available and (connected or each.settings.kind != "bus")]
    why = ", ".join(f"{each.name}: {each.reason or 'not connected to NATS'}" for each in states)
    return (True, f"ready: {', '.join(able)}") if able else (False, why)


async def _until_stopped(service: Service) -> None:
    while not service.stopping.is_set():
        service.beat()
        try:
            async with asyncio.timeout(BEAT_SECONDS):
                await service.stopping.wait()
        except TimeoutError:
            continue


class _Server(uvicorn.Server):
    """uvicorn within a service, whose signals are the service's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


@asynccontextmanager
async def listening(service: Service, app: ASGIApp, host: str, port: int) -> AsyncIterator[str]:
    """Serve `app` over HTTP; yields the address. Raises `UserError` where the port is taken.

    Should the server end by itself, so does the service.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"router.port {port} on {host}: {error.strerror}; choose another port, or 0 for any free one"
        ) from None
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    server = _Server(config)
    with listener:
        serving = service.spawn(server.serve([listener]), "gateway")
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
