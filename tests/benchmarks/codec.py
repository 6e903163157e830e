"""Encode and decode a rollout of 4,096 tokens: µs and bytes, beside msgpack alone and beside lists for arrays.

`python -m tests.benchmarks.codec [--tokens N] [--json FILE]`. Figures are the fastest of repeated runs, in µs, with
validation on. The ratios are what to compare between machines.
"""

from __future__ import annotations

import argparse
import json
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np

from contracts import codec
from contracts.examples import EXAMPLES, POLICY
from contracts.messages import PolicySegment, Rollout
from contracts.tensors import Tensor

CALLS, REPEATS = 500, 15
TARGET_US = 50.0


def rollout(tokens: int) -> Rollout:
    """A rollout of that many tokens, one in sixteen of them prompt."""
    base = EXAMPLES["rollout"]
    assert isinstance(base, Rollout)
    generator = np.random.default_rng(1)
    prompt = tokens // 16
    sampled = (np.arange(tokens) >= prompt).astype(np.float32)
    return msgspec.structs.replace(
        base,
        tokens=Tensor.of(generator.integers(0, 50_000, tokens, dtype=np.int32)),
        loss_mask=Tensor.of(sampled.astype(np.uint8)),
        logprobs=Tensor.of(-generator.exponential(1.0, tokens).astype(np.float32) * sampled),
        temperatures=Tensor.of(sampled),
        prompt_length=prompt,
        segments=[PolicySegment(start=prompt, policy=POLICY)],
        completion="word " * tokens,
    )


def as_lists(body: dict[str, Any], message: Rollout) -> dict[str, Any]:
    """The same map with every array as a list of numbers."""
    arrays = {name: value for name in body if isinstance(value := getattr(message, name, None), Tensor)}
    return {**body, **{name: tensor.array().tolist() for name, tensor in arrays.items()}}


def microseconds(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS * 1e6


def measure(tokens: int) -> dict[str, float]:
    """All figures of the benchmark by name."""
    message = rollout(tokens)
    data = codec.encode(message)
    body = codec.unpack(data)
    lists = as_lists(body, message)
    packed_lists = msgpack.packb(lists)
    figures = {
        "encode_us": microseconds(lambda: codec.encode(message)),
        "decode_us": microseconds(lambda: codec.decode(data, Rollout)),
        "check_us": microseconds(message.check),
        "msgpack_alone_us": microseconds(lambda: msgpack.packb(body)) + microseconds(lambda: msgpack.unpackb(data)),
        "lists_us": microseconds(lambda: msgpack.packb(lists)) + microseconds(lambda: msgpack.unpackb(packed_lists)),
        "bytes": float(len(data)),
        "lists_bytes": float(len(packed_lists)),
    }
    figures["both_us"] = figures["encode_us"] + figures["decode_us"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = measure(options.tokens)
    both = figures["both_us"]
    print(f"a rollout of {options.tokens} tokens, {figures['bytes'] / 1000:.1f} kB")
    print(f"encode             {figures['encode_us']:8.1f} µs")
    print(f"decode             {figures['decode_us']:8.1f} µs")
    print(f"encode + decode    {both:8.1f} µs   (target for 4,096 tokens: below {TARGET_US:.0f})")
    print(f"  of it validation {2 * figures['check_us']:8.1f} µs   (two passes, one on each side)")
    print(f"msgpack alone      {figures['msgpack_alone_us']:8.1f} µs   {both / figures['msgpack_alone_us']:.1f} x that")
    print(f"lists, unvalidated {figures['lists_us']:8.1f} µs   {figures['lists_us'] / both:.1f} x ours")
    ratio = figures["lists_bytes"] / figures["bytes"]
    print(f"lists, size        {figures['lists_bytes'] / 1000:8.1f} kB   {ratio:.2f} x ours")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
