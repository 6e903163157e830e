"""vLLM on SmolLM2 in bf16, its cache kept at a swap: it agrees with the torch engine, and it survives its own death."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from contracts.messages import Finish, PolicyRef, Sampling, Split
from generator.engines.base import EngineError
from generator.engines.torch_engine import TorchEngine
from generator.engines.vllm_engine import VllmEngine
from generator.environments import environment
from infra import models
from tests.integration.test_torch_engine import CPU, FIRST, SECOND, collect, request, said, tokens
from tests.vllm.subject import VllmSubject, descendants, differences, engine_core, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

THIRD = PolicyRef(1, 2, "c" * 64)
NORM = "model.norm.weight"  # the last one: changing it leaves the cache right
MISMATCH_KL = 0.01  # nats per token, at most; bf16 noise is a tenth of it


@pytest.fixture(scope="module")
def smollm2() -> VllmSubject:
    return VllmSubject("smollm2", torch.bfloat16)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(smollm2: VllmSubject) -> AsyncIterator[VllmEngine]:
    async with smollm2.vllm(kv_cache="keep", max_model_len=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(smollm2: VllmSubject) -> list[list[int]]:
    items = [environment("quick-facts").item(seed, Split.TRAIN) for seed in range(4)]
    return [models.encode_prompt(smollm2.tokenizer, item.prompt) for item in items]


def kl(pairs: list[tuple[float, float]]) -> float:
    """KL(recorded || expected) in nats per token, from samples of the recorded one: mean of exp(-d) - 1 + d."""
    gaps = torch.tensor([recorded - expected for recorded, expected in pairs], dtype=torch.float64)
    return float((torch.exp(-gaps) - 1 + gaps).mean())


async def test_both_engines_agree(engine: VllmEngine, smollm2: VllmSubject, prompts: list[list[int]]) -> None:
    model = models.load_model(smollm2.folder, dtype=torch.bfloat16, device=CPU, weights=False)
    torch_engine = TorchEngine(model, smollm2.tokenizer, max_requests=16)
    await torch_engine.load(FIRST, smollm2.weights)
    try:
        for prompt in prompts:
            asked = request(prompt, 1, temperature=0.0, max_tokens=8, stop=["\n"])
            one, other = await collect(engine, asked), await collect(torch_engine, asked)
            assert said(one) == said(other)
            assert [s.finish for s in one[0]] == [s.finish for s in other[0]]
        sampling = Sampling(max_tokens=16)
        found = {}
        for name, sampler in (("vLLM", engine), ("torch", torch_engine)):
            groups = [await collect(sampler, request(prompt, 8, max_tokens=16)) for prompt in prompts]
            found[name] = [
                pair
                for prompt, group in zip(prompts, groups, strict=True)
                for pair in differences(group, prompt, sampling, {FIRST: smollm2})
            ]
    finally:
        await torch_engine.close()
    print()
    for name, pairs in found.items():
        gap = statistics.mean(abs(recorded - expected) for recorded, expected in pairs)
        print(f"{name} against one torch forward: mean |d log-prob| {gap:.4f}, KL {kl(pairs):.6f} nats per token")
        assert gap < 0.06
        assert kl(pairs) < MISMATCH_KL


async def test_a_stop_string_across_tokens_ends_the_completion_with_the_token_that_completes_it(
    engine: VllmEngine, smollm2: VllmSubject
) -> None:
    prompt = smollm2.ids("The capital of France is")
    expected = tokens((await collect(engine, request(prompt, 1, temperature=0.0)))[0])
    pieces = [smollm2.tokenizer.decode([token]) for token in expected]
    stop = pieces[3][-1:] + pieces[4][:2]
    assert "".join(pieces).index(stop) == len("".join(pieces[:4])) - 1
    result = await collect(engine, request(prompt, 1, temperature=0.0, stop=["never", stop]))
    assert tokens(result[0]) == expected[:5]
    assert result[0][-1].finish == Finish.STOP


async def test_a_swap_in_flight_keeps_the_cache_and_every_token_names_its_policy(
    engine: VllmEngine, smollm2: VllmSubject
) -> None:
    changed = smollm2.weights | {NORM: smollm2.weights[NORM] * 0.5}
    asked = request(smollm2.ids("count with me 1 2 3 4"), 6, seed=3, max_tokens=80)
    before = engine.stats.tokens
    group = asyncio.create_task(collect(engine, asked))
    await until(lambda: engine.stats.tokens > before + 30, "tokens")
    await engine.load(SECOND, changed)
    result = await group
    assert {sampled.policy for members in result.values() for sampled in members} == {FIRST, SECOND}
    pairs = differences(result, asked.prompt, asked.sampling, {FIRST: smollm2, SECOND: smollm2.successor(changed)})
    assert max(abs(recorded - expected) for recorded, expected in pairs) < 0.3
    misnamed = differences(result, asked.prompt, asked.sampling, {FIRST: smollm2, SECOND: smollm2})
    assert max(abs(recorded - expected) for recorded, expected in misnamed) > 1.0, "a wrong name would show"


async def test_new_requests_find_nothing_that_an_older_policy_has_cached(
    engine: VllmEngine, smollm2: VllmSubject, prompts: list[list[int]]
) -> None:
    prompt = prompts[0]
    assert len(prompt) > 32, "as long as a block of the cache at least"
    asked = request(prompt, 4, max_tokens=4)
    await collect(engine, asked)
    changed = smollm2.altered(1, scale=0.1)
    await engine.load(THIRD, changed)
    pairs = differences(await collect(engine, asked), prompt, asked.sampling, {THIRD: smollm2.successor(changed)})
    assert kl(pairs) < MISMATCH_KL


async def test_a_dead_engine_ends_its_groups_and_comes_back_with_the_policy_it_had(
    engine: VllmEngine, smollm2: VllmSubject
) -> None:
    changed = smollm2.weights | {NORM: smollm2.weights[NORM] * 0.5}
    await engine.load(SECOND, changed)
    dying = [asyncio.create_task(collect(engine, request([seed] * 9, 8, max_tokens=200))) for seed in (5, 6)]
    waiting = asyncio.create_task(collect(engine, request(smollm2.ids("and on it goes"), 8, max_tokens=8)))
    before = engine.stats.tokens
    await until(lambda: engine.stats.tokens > before, "the first token")
    assert engine.stats.queued == 8
    children = descendants(os.getpid())
    os.kill(engine_core(os.getpid()), signal.SIGKILL)
    for group in dying:
        with pytest.raises(EngineError, match="died"):
            await group
    assert engine.error is None and engine.unable == "vLLM is starting"
    assert engine.policy == SECOND
    result = await waiting  # it had not begun: it is sampled by the new engine
    assert engine.unable is None
    asked = request(smollm2.ids("and on it goes"), 8, max_tokens=8)
    pairs = differences(result, asked.prompt, asked.sampling, {SECOND: smollm2.successor(changed)})
    assert kl(pairs) < MISMATCH_KL
    await engine.load(THIRD, smollm2.weights)
    pairs = differences(await collect(engine, asked), asked.prompt, asked.sampling, {THIRD: smollm2})
    assert kl(pairs) < MISMATCH_KL
    remaining = descendants(os.getpid())
    assert not [child for child, command in children.items() if command.startswith("VLLM::") and child in remaining]


async def test_closing_ends_every_process_and_deletes_every_folder(engine: VllmEngine, smollm2: VllmSubject) -> None:
    running = asyncio.create_task(collect(engine, request([5] * 9, 8, max_tokens=200)))
    before = engine.stats.tokens
    await until(lambda: engine.stats.tokens > before, "the first token")
    homes = list(engine._folders._homes)
    assert homes and all(home.is_dir() for home in homes)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await running
    with pytest.raises(EngineError, match="closed"):
        await collect(engine, request([5]))
    with pytest.raises(EngineError, match="closed"):
        await engine.load(FIRST, smollm2.weights)
    assert not [command for command in descendants(os.getpid()).values() if command.startswith("VLLM::")]
    assert not any(home.exists() for home in homes)
