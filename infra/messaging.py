"""What goes over the client of the moment: messages to store, each acknowledged, and subscriptions to core subjects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.api import Header
from nats.js.errors import APIError, NoStreamResponseError


@dataclass(frozen=True)
class Outgoing:
    """A message to store; `id` is the same in every attempt, so that the stream keeps it once."""

    id: str
    payload: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Stored:
    """Where a published message lies."""

    sequence: int
    duplicate: bool  # the stream already had this message id


@dataclass(eq=False)
class Subscriber:
    """Who listens on a core subject, whichever client is in use."""

    subject: str
    take: Callable[[Msg], Awaitable[None]]
    limit: int  # messages that may wait to be taken; what comes beyond is dropped by the client
    subscription: Subscription | None = None  # with the client of the moment


async def subscribe(client: Client, subscriber: Subscriber) -> None:
    """Subscribe with the client of the moment, once."""
    if subscriber.subscription is None or subscriber.subscription._conn is not client:
        subscriber.subscription = await client.subscribe(
            subscriber.subject, cb=subscriber.take, pending_msgs_limit=subscriber.limit
        )


async def store(
    client: Client, subject: str, messages: Sequence[Outgoing], stored: dict[int, Stored], limit: float
) -> None:
    """One attempt to store the messages that `stored` lacks, by position. One inbox takes all acknowledgements."""
    missing = [number for number in range(len(messages)) if number not in stored]
    if not missing:
        return
    complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def note(answer: Msg) -> None:
        try:
            stored[int(answer.subject.rpartition(".")[2])] = _stored(answer)
        except (NatsError, ValueError) as error:
            if not complete.done():
                complete.set_exception(error)
        if len(stored) == len(messages) and not complete.done():
            complete.set_result(None)

    inbox = client.new_inbox()
    acknowledgements = await client.subscribe(f"{inbox}.*", cb=note)
    try:
        for number in missing:
            message = messages[number]
            headers = {**message.headers, Header.MSG_ID.value: message.id}
            await client.publish(subject, message.payload, reply=f"{inbox}.{number}", headers=headers)
        await asyncio.wait_for(complete, limit)
    finally:
        with contextlib.suppress(NatsError, OSError):
            await acknowledgements.unsubscribe()


def _stored(answer: Msg) -> Stored:
    if (answer.headers or {}).get(Header.STATUS) == "503":
        raise NoStreamResponseError
    acknowledgement = json.loads(answer.data)
    if "error" in acknowledgement:
        raise APIError.from_error(acknowledgement["error"])
    return Stored(acknowledgement["seq"], acknowledgement.get("duplicate", False))
