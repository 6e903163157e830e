"""Sampling speed of the torch engine beside transformers: `python -m tests.benchmarks.engine [--json FILE]`.

32 requests of 40 tokens each from SmolLM2-135M in bf16 on one thread, first as 32 different prompts, then as 4 groups
of 8 that share theirs; and prefill. Repeated in turns, the best of each counts: the machine may be busy with others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from contracts.messages import PolicyRef, Sampling
from generator.engines.base import SampleRequest
from generator.engines.torch_engine import TorchEngine
from infra import models

REQUESTS, TOKENS, GROUP = 32, 40, 8
PREFILL_PROMPTS, PREFILL_LENGTH = 16, 64


def prompt(number: int, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return tokenizer(f"Question {number}: tell me a long story about the number {number * 17} and the sea.\n").input_ids


async def sample(engine: TorchEngine, requests: list[SampleRequest]) -> int:
    async def one(request: SampleRequest) -> int:
        async with aclosing(engine.submit(request)) as steps:
            return sum([len(step) async for step in steps])

    return sum(await asyncio.gather(*(one(request) for request in requests)))


def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]) -> int:
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(
            **batch, do_sample=True, top_k=0, top_p=1.0, min_new_tokens=TOKENS, max_new_tokens=TOKENS
        )
    return output[:, batch.input_ids.shape[1] :].numel()


async def measure(threads: int, repeats: int, dtype: torch.dtype, clock: Callable[[], float]) -> dict[str, float]:
    torch.set_num_threads(threads)
    folder = models.resolve("smollm2")
    device = torch.device("cpu")
    tokenizer = models.load_tokenizer(folder)
    reference = models.load_model(folder, dtype=dtype, device=device)
    model = models.load_model(folder, dtype=dtype, device=device, weights=False)
    pad = tokenizer.pad_token
    model.generation_config.eos_token_id = tokenizer.eos_token = None  # every completion runs to its full length
    engine = TorchEngine(model, tokenizer, max_requests=REQUESTS)
    tokenizer.pad_token = pad
    await engine.load(PolicyRef(1, 0, "0" * 64), reference.state_dict())

    sampling = Sampling(max_tokens=TOKENS)
    prompts = [prompt(number, tokenizer) for number in range(REQUESTS)]
    single = [SampleRequest(ids, 1, sampling, seed) for seed, ids in enumerate(prompts)]
    groups = [SampleRequest(ids, GROUP, sampling, seed) for seed, ids in enumerate(prompts[: REQUESTS // GROUP])]
    random = torch.Generator().manual_seed(0)
    long = torch.randint(1000, 40_000, (PREFILL_PROMPTS, PREFILL_LENGTH), generator=random)
    prefill = [SampleRequest(ids, 1, Sampling(max_tokens=1), 0) for ids in long.tolist()]

    async def transformers_generate() -> int:
        return await asyncio.to_thread(generate, reference, tokenizer, prompts)

    async def engine_prefill() -> int:
        await sample(engine, prefill)
        return long.numel()

    runs: dict[str, Callable[[], Awaitable[int]]] = {
        "transformers_tokens_per_second": transformers_generate,
        "engine_tokens_per_second": lambda: sample(engine, single),
        "engine_grouped_tokens_per_second": lambda: sample(engine, groups),
        "engine_prefill_tokens_per_second": engine_prefill,
    }
    best = dict.fromkeys(runs, 0.0)
    loads = []
    for _ in range(repeats):
        for name, run in runs.items():
            started = clock()
            tokens = await run()
            best[name] = max(best[name], tokens / (clock() - started))
        loads.append(await engine.load(PolicyRef(1, 0, "0" * 64), reference.state_dict()))
    await engine.close()
    best["ratio_to_transformers"] = best["engine_tokens_per_second"] / best["transformers_tokens_per_second"]
    best["load_seconds"] = min(loads)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fp32", action="store_true", help="weights and arithmetic in fp32 instead of bf16")
    parser.add_argument("--cpu-time", action="store_true", help="per CPU second: for a machine busy with others")
    arguments = parser.parse_args()
    dtype = torch.float32 if arguments.fp32 else torch.bfloat16
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    figures = asyncio.run(measure(arguments.threads, arguments.repeats, dtype, clock))
    for name, value in figures.items():
        print(f"{name:36} {value:10.3f}" if value < 10 else f"{name:36} {value:10.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
