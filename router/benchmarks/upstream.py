"""An upstream that answers at once, so that what a gateway adds can be seen: `python -m router.benchmarks.upstream`.

It speaks just enough HTTP for one well-behaved client after another, reads nothing but whether a stream is wanted, and
always says the same. It prints its port and serves until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys

WORDS = 32  # of the answer; each is one chunk of a stream
ANSWER = " ".join(f"word{number}" for number in range(WORDS))
USAGE = {"prompt_tokens": 250, "completion_tokens": WORDS, "total_tokens": 250 + WORDS}
COMMON = {"id": "chatcmpl-bench", "created": 1_700_000_000, "model": "bench"}


def _head(content_type: str, length: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n".encode()


def _plain() -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
    body = json.dumps({**COMMON, "object": "chat.completion", "choices": [choice], "usage": USAGE}).encode()
    return _head("application/json", len(body)) + body


def _stream() -> bytes:
    def event(delta: dict[str, str], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return f"data: {json.dumps({**COMMON, 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"

    usage = {**COMMON, "object": "chat.completion.chunk", "choices": [], "usage": USAGE}
    words = [event({"content": f"{word} "}) for word in ANSWER.split()]
    parts = [event({"role": "assistant", "content": ""}), *words, event({}, "stop"), f"data: {json.dumps(usage)}\n\n"]
    body = "".join([*parts, "data: [DONE]\n\n"]).encode()
    return _head("text/event-stream; charset=utf-8", len(body)) + body


PLAIN, STREAM = _plain(), _stream()


class Upstream(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.data = transport, b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            _, _, rest = head.partition(b"content-length:")
            length = int(rest.split(b"\r\n", 1)[0] or b"0")
            if len(self.data) < end + 4 + length:
                return
            body, self.data = self.data[end + 4 : end + 4 + length], self.data[end + 4 + length :]
            streamed = b'"stream":true' in body or b'"stream": true' in body
            self.transport.write(STREAM if streamed else PLAIN)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Upstream, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(_serve())
