"""Create what the catalogue describes, and refuse what differs from it: streams, key-value buckets, durable consumers.

Only this step needs the permission to create; with `create=False` it verifies what an operator has made.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog
from nats.aio.client import Client
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    ConsumerInfo,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)
from nats.js.errors import APIError, NotFoundError

from contracts.messages import Purpose
from contracts.subjects import KV_BUCKET, KV_LEASES, LEASE_TTL, STREAMS, TASK_WORKERS, Durable, Stream
from infra.bus import Bus
from infra.connection import FULL, Unavailable
from infra.errors import UserError

log = structlog.get_logger(__name__)

T = TypeVar("T")

PATIENCE = 30.0  # seconds for each request
PURPOSES = (Purpose.TRAIN, Purpose.EVAL, Purpose.SERVE)
NO_JETSTREAM = {10039, 10076}  # for this account, for this server
KV_MAX_BYTES = 256 * 1024 * 1024
MIB = 1024 * 1024


async def bootstrap(bus: Bus, run: str, pools: Sequence[str], *, create: bool) -> None:
    """Make sure that all streams and buckets exist, and this run's task consumers for every pool.

    Several processes may do this at once. Raises `UserError` naming stream, field, found and expected where an existing
    one differs in a way that matters, where one is missing and `create` is False, and where the server has no JetStream
    or not enough storage for a stream's limit.
    """
    leases = bucket_config(KV_LEASES, ttl=LEASE_TTL)
    for config in (*map(stream_config, STREAMS), bucket_config(KV_BUCKET), leases):
        await ensure_stream(bus, config, create=create)
    for pool in pools:
        for purpose in PURPOSES:
            tokens = {"run": run, "purpose": purpose.value, "pool": pool}
            await ensure_consumer(bus, TASK_WORKERS, create=create, **tokens)


def stream_config(stream: Stream) -> StreamConfig:
    """A catalogue entry as JetStream's configuration."""
    return StreamConfig(
        name=stream.name,
        description=stream.description,
        subjects=list(stream.subjects),
        retention=RetentionPolicy(stream.retention),
        discard=DiscardPolicy(stream.discard),
        storage=StorageType.FILE,
        max_bytes=stream.max_bytes,
        max_age=stream.max_age,
        max_msgs_per_subject=stream.max_per_subject,
        duplicate_window=stream.duplicate_window,
        allow_direct=True,
    )


def bucket_config(name: str, *, ttl: float = 0.0) -> StreamConfig:
    """A key-value bucket with one value per key, as the stream behind it; `ttl` in seconds, 0 = values stay."""
    return StreamConfig(
        name=f"KV_{name}",
        subjects=[f"$KV.{name}.>"],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.NEW,
        storage=StorageType.FILE,
        max_bytes=KV_MAX_BYTES,
        max_age=ttl,
        max_msgs_per_subject=1,
        duplicate_window=min(ttl, 120.0) or 120.0,
        allow_direct=True,
        allow_rollup_hdrs=True,
        deny_delete=True,
    )


def consumer_config(durable: Durable, **tokens: str) -> ConsumerConfig:
    """A catalogue entry as JetStream's configuration.

    Deliveries are not limited by the server: an exhausted message would stay in the work queue, unseen. The worker
    that gets one too often makes it a dead letter, which also covers a message that kills its workers.
    """
    name = durable.name(**tokens)
    return ConsumerConfig(
        name=name,
        durable_name=name,
        filter_subject=durable.channel.subject(**tokens),
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=durable.ack_wait,
        max_deliver=-1,
        max_ack_pending=durable.max_ack_pending,
    )


def stream_differences(found: StreamConfig, expected: StreamConfig) -> list[str]:
    """What matters and differs, as `field: found …, expected …`. Operators may give a stream more than we ask for."""
    fields = ("retention", "discard", "storage", "allow_direct", "max_msgs_per_subject")
    differences = [_difference(name, getattr(found, name), getattr(expected, name)) for name in fields]
    if sorted(found.subjects or []) != sorted(expected.subjects or []):
        differences.append(_difference("subjects", found.subjects, expected.subjects))
    is_lease = expected.name == f"KV_{KV_LEASES}"
    for name in ("max_age", "duplicate_window"):
        have, want = getattr(found, name) or 0.0, getattr(expected, name) or 0.0
        enough = have == want if is_lease else (have == 0 and name == "max_age") or (0 < want <= have)
        if not enough:
            differences.append(_difference(name, f"{have:g} s", f"{want:g} s"))
    if expected.discard == DiscardPolicy.NEW and (found.max_bytes or -1) <= 0:
        differences.append(_difference("max_bytes", "no limit", f"a limit, e.g. {expected.max_bytes}"))
    return [difference for difference in differences if difference]


def consumer_differences(found: ConsumerConfig, expected: ConsumerConfig) -> list[str]:
    """What matters and differs, as `field: found …, expected …`."""
    fields = ("filter_subject", "deliver_policy", "ack_policy", "ack_wait", "max_deliver", "max_ack_pending")
    differences = [_difference(name, getattr(found, name), getattr(expected, name)) for name in fields]
    return [difference for difference in differences if difference]


async def ensure_stream(bus: Bus, config: StreamConfig, *, create: bool) -> None:
    """Create one stream, or verify the one that exists. Raises `UserError`."""
    name = str(config.name)

    async def look(client: Client, limit: float) -> StreamInfo:
        return await client.jetstream(timeout=limit).stream_info(name)

    async def make(client: Client, limit: float) -> StreamInfo:
        return await client.jetstream(timeout=limit).add_stream(config)

    try:
        found = await _ask(bus, look)
    except NotFoundError:
        if not create:
            raise UserError(
                f"stream {name} does not exist on the NATS server; create it, or set nats.manage_streams = true"
            ) from None
        try:
            found = await _ask(bus, make)
        except APIError as error:
            raise UserError(_creation_failed(name, config, error)) from None
        log.info("stream created", stream=name)
    _refuse(f"stream {name}", stream_differences(found.config, config))


async def ensure_consumer(bus: Bus, durable: Durable, *, create: bool, **tokens: str) -> None:
    """Create one durable consumer, or verify the one that exists. Raises `UserError`."""
    stream, config = durable.channel.stream, consumer_config(durable, **tokens)
    name = str(config.name)

    async def look(client: Client, limit: float) -> ConsumerInfo:
        return await client.jetstream(timeout=limit).consumer_info(stream, name)

    async def make(client: Client, limit: float) -> ConsumerInfo:
        return await client.jetstream(timeout=limit).add_consumer(stream, config)

    try:
        found = await _ask(bus, look)
    except NotFoundError:
        if not create:
            raise UserError(
                f"consumer {name} of stream {stream} does not exist on the NATS server; run tailrace bootstrap, "
                "or set nats.manage_streams = true"
            ) from None
        try:
            found = await _ask(bus, make)
        except APIError as error:
            raise UserError(f"consumer {name} of stream {stream} cannot be created: {error.description}") from None
        log.info("consumer created", stream=stream, consumer=name)
    _refuse(f"consumer {name} of stream {stream}", consumer_differences(found.config, config))


async def _ask(bus: Bus, request: Callable[[Client, float], Coroutine[Any, Any, T]]) -> T:
    try:
        return await bus.connection.call(request, patience=PATIENCE)
    except APIError as error:
        if error.err_code in NO_JETSTREAM:
            raise UserError("the NATS server has no JetStream for this user: enable jetstream in its config") from None
        raise
    except Unavailable as error:
        raise UserError(f"{error}; is JetStream enabled, and may this user call $JS.API?") from None


def _creation_failed(name: str, config: StreamConfig, error: APIError) -> str:
    if error.err_code in FULL:
        return (
            f"stream {name} cannot reserve its {(config.max_bytes or 0) // MIB} MiB ({error.description}); raise "
            "jetstream max_file_store on the NATS server, or create the stream yourself with a smaller max_bytes"
        )
    return f"stream {name} cannot be created: {error.description}"


def _refuse(what: str, differences: list[str]) -> None:
    if differences:
        raise UserError(f"{what} differs from the catalogue: {'; '.join(differences)}; change it or delete it")


def _difference(name: str, found: Any, expected: Any) -> str:
    return "" if found == expected else f"{name}: found {_plain(found)}, expected {_plain(expected)}"


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))
