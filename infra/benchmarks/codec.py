"""`tailrace bench codec`: what the contracts cost per rollout, beside msgpack alone and beside lists for arrays."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Annotated, Any

import msgpack
import msgspec
import numpy as np
import typer

from contracts import codec
from contracts.examples import EXAMPLES, POLICY
from contracts.messages import PolicySegment, Rollout
from contracts.tensors import Tensor
from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, publish

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


def codec_benchmark(
    tokens: Annotated[int, typer.Option(min=32, help="Length of the rollout, prompt included.")] = 4096,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Encode and decode a rollout, with validation on both sides: µs and bytes.

    Each figure is the fastest of repeated runs. Compare the ratios between machines, not the times.
    """
    figures = measure(tokens)
    both, alone = figures["both_us"], figures["msgpack_alone_us"]

    def row(name: str, us: float, size: float) -> list[str]:
        return [name, f"{us:.1f}", f"{us / alone:.1f}", f"{size / 1000:.1f}"]

    report = Report(
        figures=figures,
        columns=["encode + decode", "µs", "x msgpack alone", "kB"],
        rows=[
            row("contract, validated", both, figures["bytes"]),
            row("  of it validation", 2 * figures["check_us"], figures["bytes"]),
            row("msgpack alone", alone, figures["bytes"]),
            row("lists for arrays, unvalidated", figures["lists_us"], figures["lists_bytes"]),
        ],
        notes=[f"A rollout of {tokens} tokens; the target for 4096 is below {TARGET_US:.0f} µs."],
        chart=Chart(
            title=f"Encoding and decoding a rollout of {tokens} tokens",
            x_label="",
            y_label="µs",
            x=["contract", "msgpack alone", "lists"],
            series={"encode + decode": [both, alone, figures["lists_us"]]},
        ),
    )
    publish(report, json_file=json_file, plot_file=plot_file)
