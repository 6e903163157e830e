"""Clients that ask without pause: `python -m router.benchmarks.load URL MODEL CLIENTS SECONDS plain|stream`.

Prints one line of JSON: how long each answer took, and how many failed. A process of its own, so that the gateway that
is measured has the event loop of nobody else in its way.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp

PROMPT = "Summarise in one sentence what a tailrace is, and say why a mill has one. " * 14  # about 1 kB
LIMIT = aiohttp.ClientTimeout(total=60)


async def load(url: str, model: str, clients: int, seconds: float, stream: bool) -> tuple[list[float], int]:
    """Seconds of each answer to its last byte, and how many answers were none."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}]} | ({"stream": True} if stream else {})
    data = json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer bench"}
    end = time.perf_counter() + seconds
    latencies: list[float] = []
    failures = 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal failures
        while (start := time.perf_counter()) < end:
            async with session.post(f"{url}/chat/completions", data=data, headers=headers) as answer:
                text = await answer.read()
                good = answer.status == 200 and (b"[DONE]" in text) is stream
                failures += not good
            latencies.append(time.perf_counter() - start)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=LIMIT) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return latencies, failures


if __name__ == "__main__":
    url, model, clients, seconds, way = sys.argv[1:]
    latencies, failures = asyncio.run(load(url, model, int(clients), float(seconds), way == "stream"))
    print(json.dumps({"latencies": latencies, "failures": failures}))
