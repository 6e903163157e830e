"""The vLLM engine on the tiny model in fp32, its cache computed again at each swap: exact, token by token."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

from contracts.messages import Finish, PolicyRef, Sampling
from generator.engines.base import EngineError, EngineFull, PromptTooLong, RequestRefused, SampleRequest
from generator.engines.vllm_engine import VllmEngine
from generator.settings import GeneratorSettings
from infra.errors import UserError
from infra.supervisor import Backoff
from tests.integration.test_torch_engine import FIRST, SECOND, TEXTS, Groups, collect, request, said, tokens
from tests.vllm.subject import VllmSubject, differences, engine_core, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

WINDOW = 256


@pytest.fixture(scope="module")
def tiny() -> VllmSubject:
    return VllmSubject("tiny", torch.float32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tiny: VllmSubject) -> AsyncIterator[VllmEngine]:
    async with tiny.vllm(kv_cache="recompute") as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(running: VllmEngine, tiny: VllmSubject) -> VllmEngine:
    """The shared engine, with the first policy again."""
    if running.policy != FIRST:
        await running.load(FIRST, tiny.weights)
    return running


async def test_greedy_is_what_transformers_generates_with_requests_arriving_all_the_time(
    engine: VllmEngine, tiny: VllmSubject
) -> None:
    prompts = [tiny.ids(text) for text in TEXTS]
    asked = [request(prompt, group_size=2, temperature=0.0, max_tokens=9) for prompt in prompts]
    results: list[asyncio.Task[Groups]] = []
    for one in asked:
        results.append(asyncio.create_task(collect(engine, one)))
        await asyncio.sleep(0.01)
    for prompt, result in zip(prompts, await asyncio.gather(*results), strict=True):
        expected = tiny.greedy(prompt, 9)
        for group in result.values():
            assert tokens(group) == expected
            assert all(sampled.logprob == 0.0 and sampled.policy == FIRST for sampled in group)


async def test_log_probs_are_those_of_the_distribution_sampled_whatever_is_mixed_in_a_batch(
    engine: VllmEngine, tiny: VllmSubject
) -> None:
    settings = [
        Sampling(max_tokens=6),
        Sampling(max_tokens=6, temperature=0.6),
        Sampling(max_tokens=6, temperature=1.4, top_k=6),
        Sampling(max_tokens=6, top_p=0.7),
        Sampling(max_tokens=6, temperature=0.7, top_p=0.8, top_k=9),
        Sampling(max_tokens=6, temperature=0.0),
    ]
    asked = [SampleRequest(tiny.ids(TEXTS[n % 4]), 2, sampling, n) for n, sampling in enumerate(settings)]
    results = await asyncio.gather(*(collect(engine, one) for one in asked))
    for one, result in zip(asked, results, strict=True):
        for recorded, expected in differences(result, one.prompt, one.sampling, {FIRST: tiny}):
            assert recorded == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_around_many_swaps_every_token_was_drawn_from_the_policy_it_names(
    engine: VllmEngine, tiny: VllmSubject, stream: bool
) -> None:
    """Each policy moves every weight, so a token under a wrong name would show: the smallest gap is checked as well."""
    policies, weights = {FIRST: tiny}, {}
    for version in range(1, 7):
        ref = PolicyRef(1, version, f"{version:064x}")
        weights[ref] = tiny.altered(version, scale=0.4)
        policies[ref] = tiny.successor(weights[ref])
    asked = [
        replace(request(tiny.ids(text), 4, seed, max_tokens=120, temperature=1.2), stream=stream)
        for seed, text in enumerate(TEXTS)
    ]
    before = engine.stats.tokens
    groups = [asyncio.create_task(collect(engine, one)) for one in asked]
    for number, (ref, own) in enumerate(weights.items()):
        await until(
            lambda n=number: engine.stats.tokens >= before + 40 * (n + 1) or not engine.stats.inflight, "tokens"
        )
        assert await engine.load(ref, own) > 0
        assert engine.policy == ref
    swapped = 0
    for one, result in zip(asked, await asyncio.gather(*groups), strict=True):
        for recorded, expected in differences(result, one.prompt, one.sampling, policies):
            assert recorded == pytest.approx(expected, abs=1e-3)
        for group in result.values():
            order = [sampled.policy for sampled in group]
            assert order == sorted(order), "a completion never goes back to an older policy"
            swapped += len(set(order)) > 2
            misnamed = tiny.logprobs(one.prompt, tokens(group), one.sampling)
            later = [at for at, sampled in enumerate(group) if sampled.policy != FIRST]
            if len(later) > 10:
                gap = max(abs(group[at].logprob - misnamed[at]) for at in later)
                assert gap > 0.05, "the policies differ enough for the test to see a wrong name"
    assert swapped > 4, "several completions went through more than one swap"


async def test_a_new_policy_finds_nothing_that_an_older_one_has_cached(engine: VllmEngine, tiny: VllmSubject) -> None:
    prompt = (tiny.ids("what is 7 and 8>") * 20)[:160]
    asked = request(prompt, 4, max_tokens=4)
    await collect(engine, asked)
    changed = tiny.altered(3, scale=0.4)
    await engine.load(SECOND, changed)
    result = await collect(engine, asked)
    for recorded, expected in differences(result, prompt, asked.sampling, {SECOND: tiny.successor(changed)}):
        assert recorded == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"transformer.ln_f.weight": torch.zeros(3)}, "transformer.ln_f.weight has shape"),
        ({"model.extra": torch.zeros(3)}, "no tensor model.extra"),
        ({"transformer.ln_f.weight": None}, "missing, the first is transformer.ln_f.weight"),
        ({"transformer.ln_f.weight": torch.full((48,), math.nan)}, "holds numbers that are not finite"),
    ],
)
async def test_weights_that_do_not_fit_change_nothing(
    engine: VllmEngine, tiny: VllmSubject, change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    altered = {name: tensor * 2 for name, tensor in tiny.weights.items()} | change
    wrong = {name: tensor for name, tensor in altered.items() if tensor is not None}
    before = await collect(engine, request(tiny.ids("abc>")))
    with pytest.raises(EngineError, match=complaint):
        await engine.load(SECOND, wrong)
    assert engine.policy == FIRST and engine.error is None and engine.unable is None
    assert said(await collect(engine, request(tiny.ids("abc>")))) == said(before)


async def test_a_policy_that_overflows_ends_its_requests_and_the_next_one_is_not_tainted(
    engine: VllmEngine, tiny: VllmSubject
) -> None:
    asked = request(tiny.ids("abc>"), 12, max_tokens=200)
    expected = await collect(engine, asked)
    norm = "transformer.h.0.ln_2.weight"  # of the first layer: the second one's cache is not finite
    await engine.load(SECOND, tiny.weights | {norm: tiny.weights[norm] * 1e38})
    with pytest.raises(EngineError, match=r"policy 1\.1 gives logits that are not finite"):
        await collect(engine, asked)
    await engine.load(FIRST, tiny.weights)
    assert said(await collect(engine, asked)) == said(expected)


async def test_the_end_token_ends_a_completion_and_is_part_of_it(engine: VllmEngine, tiny: VllmSubject) -> None:
    weights = tiny.weights
    del weights["lm_head.weight"]  # tied tensors may come once
    head, end = weights["transformer.wte.weight"], tiny.tokenizer.eos_token_id
    head[end] = head.mean(0) + 0.3 * head.std(0)
    await engine.load(SECOND, weights)
    result = await collect(engine, request(tiny.ids("abc>"), 16, max_tokens=200))
    ended = [group for group in result.values() if group[-1].finish == Finish.STOP]
    assert ended and all(tokens(group).index(end) == len(group) - 1 for group in ended)


@pytest.mark.parametrize("length", [1, 200, WINDOW - 1])
async def test_completions_stop_at_the_window(engine: VllmEngine, tiny: VllmSubject, length: int) -> None:
    prompt = (tiny.ids("abcdefgh12345678>") * 20)[:length]
    result = await collect(engine, request(prompt, 2, temperature=0.0, max_tokens=60))
    for group in result.values():
        assert tokens(group) == tiny.greedy(prompt, min(60, WINDOW - length))
        assert group[-1].finish is not None and all(sampled.finish is None for sampled in group[:-1])


async def test_a_seed_gives_the_same_completions_alone_and_in_company(engine: VllmEngine, tiny: VllmSubject) -> None:
    asked = request(tiny.ids("reverse abc>"), 6, seed=11)
    alone = await collect(engine, asked)
    company = [request(tiny.ids("a" * n), 2, seed=n, temperature=0.5 + n / 9, max_tokens=4 + n) for n in range(1, 4)]
    results = await asyncio.gather(*(collect(engine, one) for one in [*company, asked, *company]))
    other = await collect(engine, request(tiny.ids("reverse abc>"), 6, seed=12))
    assert said(results[3]) == said(alone)
    assert said(other) != said(alone)
    assert len({tuple(group) for group in said(alone)}) == 6


async def test_closing_the_iterator_frees_its_slots_and_leaves_others_alone(
    engine: VllmEngine, tiny: VllmSubject
) -> None:
    asked = request(tiny.ids("abc>"), 8, seed=5, max_tokens=30)
    expected = await collect(engine, asked)
    kept = asyncio.create_task(collect(engine, asked))
    left = engine.submit(request(tiny.ids("xyz>"), 8, max_tokens=240))
    async with aclosing(left) as steps:
        await anext(steps)
    assert said(await kept) == said(expected)
    assert engine.stats.inflight == engine.stats.queued == 0
    assert len(await collect(engine, request(tiny.ids("abc>"), 16))) == 16, "all slots are really there"


async def test_groups_that_do_not_fit_wait_in_order_up_to_a_bound(engine: VllmEngine, tiny: VllmSubject) -> None:
    ended: list[int] = []

    async def run(seed: int) -> None:
        await collect(engine, request(tiny.ids("abc>"), 16, seed, max_tokens=20))
        ended.append(seed)

    groups = [asyncio.create_task(run(seed)) for seed in range(2)]
    await asyncio.sleep(0)
    assert (engine.stats.inflight, engine.stats.queued) == (16, 16)
    with pytest.raises(EngineFull):
        await collect(engine, request(tiny.ids("abc>"), 1))
    await asyncio.gather(*groups)
    assert ended == [0, 1]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (request([]), RequestRefused),
        (request([5, 10_000]), RequestRefused),
        (request([5, -1]), RequestRefused),
        (request([5] * WINDOW), PromptTooLong),
        (request([5], group_size=17), RequestRefused),
        (request([5], temperature=math.nan), RequestRefused),
        (request([5], temperature=0.001), RequestRefused),
        (request([5], temperature=2.5), RequestRefused),
    ],
)
async def test_a_bad_request_fails_alone(
    engine: VllmEngine, tiny: VllmSubject, bad: SampleRequest, error: type[EngineError]
) -> None:
    running = asyncio.create_task(collect(engine, request(tiny.ids("abc>"), 4, max_tokens=20)))
    await asyncio.sleep(0)
    with pytest.raises(error):
        await collect(engine, bad)
    assert len(await running) == 4
    assert engine.stats.inflight == engine.stats.queued == 0


async def test_counters_add_up(engine: VllmEngine, tiny: VllmSubject) -> None:
    before = engine.stats
    results = await asyncio.gather(*(collect(engine, request(tiny.ids("abc>"), 4, seed)) for seed in range(3)))
    counted = engine.stats
    assert counted.tokens - before.tokens == sum(len(group) for result in results for group in result.values())
    assert counted.busy_seconds > before.busy_seconds and counted.load_seconds == before.load_seconds
    await asyncio.sleep(0.01)
    assert engine.stats.busy_seconds == counted.busy_seconds, "nothing is running"
    assert counted.inflight == counted.queued == 0


async def test_what_vllm_cannot_do_is_a_sentence_for_a_person(tiny: VllmSubject) -> None:
    settings = GeneratorSettings(engine="vllm", threads=1, device="cuda")
    engine = VllmEngine(settings, tiny.folder, tiny.tokenizer)
    with pytest.raises(UserError, match=r"generator\.device is cuda, but the vLLM installed here is the one for cpu"):
        await engine.load(FIRST, tiny.weights)
    assert engine.error is not None
    await engine.close()


async def test_closing_in_the_middle_of_the_start_leaves_no_process(tiny: VllmSubject) -> None:
    others = set(multiprocessing.active_children())
    engine = VllmEngine(GeneratorSettings(engine="vllm", threads=1), tiny.folder, tiny.tokenizer)
    loading = asyncio.create_task(engine.load(FIRST, tiny.weights))
    await until(lambda: set(multiprocessing.active_children()) - others or loading.done(), "its first process")
    assert not loading.done() and engine.policy is None
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await loading
    assert set(multiprocessing.active_children()) <= others


async def test_who_reads_along_gets_the_same_tokens_long_before_the_end(engine: VllmEngine, tiny: VllmSubject) -> None:
    asked = request(tiny.ids(TEXTS[0]), 2, max_tokens=100, temperature=0.8)
    whole = await collect(engine, asked)
    steps = []
    async with aclosing(engine.submit(replace(asked, stream=True))) as sampled:
        async for step in sampled:
            steps.append(step)  # noqa: PERF401
    assert len(steps) > 10 and not any(token.finish for token in steps[0])
    streamed = {index: [token for step in steps for token in step if token.index == index] for index in whole}
    assert said(streamed) == said(whole)
    assert [group[-1].finish for group in streamed.values()] == [group[-1].finish for group in whole.values()]


async def test_an_engine_that_does_not_come_back_is_given_up(
    engine: VllmEngine, tiny: VllmSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test here: it leaves no engine."""
    monkeypatch.setattr(Backoff, "LIMIT", 3)
    assert engine._folder is not None
    shutil.rmtree(engine._folder)
    group = asyncio.create_task(collect(engine, request(tiny.ids("abc>"), 16, max_tokens=200)))
    waiting = asyncio.create_task(collect(engine, request(tiny.ids("abc>"), 16)))
    await asyncio.sleep(0)
    os.kill(engine_core(os.getpid()), signal.SIGKILL)
    for ended, reason in ((group, "died"), (waiting, "failed 3 times in a row")):
        with pytest.raises(EngineError, match=reason):
            await ended
    assert engine.error is not None
    with pytest.raises(EngineError, match="failed 3 times in a row"):
        await collect(engine, request(tiny.ids("abc>")))
    with pytest.raises(EngineError, match="failed 3 times in a row"):
        await engine.load(SECOND, tiny.weights)
