"""The torch engine on real models: what transformers generates, at the log-probs of the distribution sampled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from contracts.messages import Finish, PolicyRef, Sampling
from generator.engines import torch_engine
from generator.engines.base import (
    EngineError,
    EngineFull,
    PromptTooLong,
    RequestRefused,
    SampledToken,
    SampleRequest,
)
from generator.engines.torch_engine import TorchEngine
from infra import models
from infra.sampling import distribution_logprobs

FIRST, SECOND = PolicyRef(1, 0, "a" * 64), PolicyRef(1, 1, "b" * 64)
CPU = torch.device("cpu")
LIMIT = 60.0  # seconds: a hang fails the test, nothing depends on speed

Groups = dict[int, list[SampledToken]]


class Subject:
    """A model, its tokenizer, and an untouched copy as reference."""

    def __init__(self, source: str, dtype: torch.dtype) -> None:
        self.folder = models.resolve(source)
        self.dtype = dtype
        self.tokenizer: PreTrainedTokenizerFast = models.load_tokenizer(self.folder)
        self.reference: PreTrainedModel = models.load_model(self.folder, dtype=dtype, device=CPU)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.reference.state_dict().items()}

    @asynccontextmanager
    async def engine(self, **options: Any) -> AsyncIterator[TorchEngine]:
        model = models.load_model(self.folder, dtype=self.dtype, device=CPU, weights=False)
        engine = TorchEngine(model, self.tokenizer, **({"max_requests": 16} | options))
        try:
            await engine.load(FIRST, self.weights)
            yield engine
        finally:
            await engine.close()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        output = self.reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=count, do_sample=False
        )
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], tokens: list[int], sampling: Sampling) -> list[float]:
        """Of `tokens` after `prompt`, by one forward pass over the whole sequence."""
        logits = self.reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        full = distribution_logprobs(logits, sampling.temperature, sampling.top_p, sampling.top_k)
        return full.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.fixture(autouse=True)
def every_step_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test does after the first token happens in mid-group: a tiny model ends a group within one delivery."""
    monkeypatch.setattr(torch_engine, "DELIVER_SECONDS", 0.0)


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return Subject("tiny", torch.float32)


@pytest.fixture(scope="module")
def smollm2() -> Subject:
    return Subject("smollm2", torch.float32)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.getfixturevalue(request.param)


BOTH = pytest.mark.parametrize("subject", ["tiny", "smollm2"], indirect=True)


def request(prompt: list[int], group_size: int = 4, seed: int = 0, **sampling: Any) -> SampleRequest:
    return SampleRequest(prompt, group_size, Sampling(**({"max_tokens": 12} | sampling)), seed)


async def collect(
    engine: TorchEngine, asked: SampleRequest, after_first: Callable[[], Awaitable[None]] | None = None
) -> Groups:
    groups: Groups = {index: [] for index in range(asked.group_size)}
    async with asyncio.timeout(LIMIT), aclosing(engine.submit(asked)) as steps:
        async for step in steps:
            for sampled in step:
                groups[sampled.index].append(sampled)
            if after_first is not None:
                await after_first()
                after_first = None
    return groups


def tokens(group: list[SampledToken]) -> list[int]:
    return [sampled.token for sampled in group]


def said(groups: Groups) -> list[list[int]]:
    """The sampled tokens; log-probs differ in the last bits with the shapes that a step happens to compute."""
    return [tokens(group) for group in groups.values()]


TEXTS = ["abc>", "what is 7 and 8 and 9 and 10 and 11 and 12>", "z", "a rather longer question here 12 34 56 78>\n"]


@BOTH
async def test_greedy_is_what_transformers_generates_with_requests_arriving_all_the_time(subject: Subject) -> None:
    prompts = [subject.ids(text) for text in TEXTS]
    async with subject.engine() as engine:
        results: list[asyncio.Task[Groups]] = []

        async def start(position: int) -> None:
            if position == len(prompts):
                return
            asked = request(prompts[position], group_size=2, temperature=0.0, max_tokens=9)
            results.append(asyncio.create_task(collect(engine, asked, lambda: start(position + 1))))

        await start(0)
        while any(not task.done() for task in results):
            await asyncio.wait(results, timeout=LIMIT)
        assert len(results) == len(prompts)
        for prompt, result in zip(prompts, results, strict=True):
            expected = subject.greedy(prompt, 9)
            for group in result.result().values():
                assert tokens(group) == expected
                assert all(sampled.logprob == 0.0 for sampled in group)


@BOTH
async def test_log_probs_are_those_of_a_full_forward_pass_whatever_is_mixed_in_a_batch(subject: Subject) -> None:
    settings = [
        Sampling(max_tokens=6),
        Sampling(max_tokens=6, temperature=0.6),
        Sampling(max_tokens=6, temperature=1.4, top_k=6),
        Sampling(max_tokens=6, top_p=0.7),
    ]
    asked = [
        SampleRequest(subject.ids(text), 2, sampling, seed)
        for seed, (text, sampling) in enumerate(zip(TEXTS, settings, strict=True))
    ]
    async with subject.engine() as engine:
        results = await asyncio.gather(*(collect(engine, one) for one in asked))
    for one, result in zip(asked, results, strict=True):
        for group in result.values():
            expected = subject.logprobs(one.prompt, tokens(group), one.sampling)
            assert [sampled.logprob for sampled in group] == pytest.approx(expected, abs=1e-4)


async def test_bf16_log_probs_agree_within_its_precision() -> None:
    subject = Subject("smollm2", torch.bfloat16)
    asked = request(subject.ids("The capital of France is"), group_size=4, max_tokens=8)
    async with subject.engine() as engine:
        result = await collect(engine, asked)
    differences = [
        abs(sampled.logprob - expected)
        for group in result.values()
        for sampled, expected in zip(group, subject.logprobs(asked.prompt, tokens(group), asked.sampling), strict=True)
    ]
    assert sum(differences) / len(differences) < 0.06


async def test_tokens_come_at_the_frequencies_of_the_distribution(tiny: Subject) -> None:
    prompt = tiny.ids("abc>")
    with torch.inference_mode():
        logits = tiny.reference(torch.tensor([prompt])).logits[0, -1:]
    async with tiny.engine(max_requests=64) as engine:
        for sampling in (
            {"temperature": 1.0},
            {"temperature": 0.5},
            {"temperature": 1.5, "top_k": 8},
            {"temperature": 1.0, "top_p": 0.8},
        ):
            results = await asyncio.gather(
                *(collect(engine, request(prompt, 16, seed, max_tokens=1, **sampling)) for seed in range(8)),
            )
            more = [await collect(engine, request(prompt, 64, seed, max_tokens=1, **sampling)) for seed in range(8, 28)]
            drawn = [sampled.token for result in [*results, *more] for group in result.values() for sampled in group]
            expected = distribution_logprobs(logits, **sampling).exp()[0] * len(drawn)
            seen = torch.bincount(torch.tensor(drawn), minlength=len(expected))
            assert seen[expected == 0].sum() == 0
            common = expected >= 5
            statistic = float(((seen - expected)[common] ** 2 / expected[common]).sum())
            freedom = int(common.sum())
            assert statistic < freedom + 5 * math.sqrt(2 * freedom), sampling


@BOTH
async def test_a_swap_in_flight_loses_no_request_and_every_token_names_its_policy(subject: Subject) -> None:
    # Only the last norm changes, so that the cache kept from the old policy is also the new policy's.
    tiny_model = "tiny" in subject.folder.name
    norm = "transformer.ln_f.weight" if tiny_model else "model.norm.weight"
    changed = subject.weights | {norm: subject.weights[norm] * 0.5}
    successor = models.load_model(subject.folder, dtype=subject.dtype, device=CPU)
    successor.load_state_dict(changed)
    # Long enough not to be over before the new policy arrives.
    size, length = (12, 200) if tiny_model else (3, 9)
    asked = request(subject.ids("count with me 1 2 3 4"), size, seed=3, max_tokens=length)
    async with subject.engine() as engine:

        async def swap() -> None:
            assert await engine.load(SECOND, changed) > 0

        result = await collect(engine, asked, swap)
        assert engine.policy == SECOND
    versions = {sampled.policy for group in result.values() for sampled in group}
    assert versions == {FIRST, SECOND}
    after = Subject.__new__(Subject)
    after.reference = successor
    for group in result.values():
        assert group[-1].finish is not None
        assert [sampled.policy for sampled in group] == sorted(sampled.policy for sampled in group)
        by_policy = {
            FIRST: subject.logprobs(asked.prompt, tokens(group), asked.sampling),
            SECOND: after.logprobs(asked.prompt, tokens(group), asked.sampling),
        }
        expected = [by_policy[sampled.policy][position] for position, sampled in enumerate(group)]
        assert [sampled.logprob for sampled in group] == pytest.approx(expected, abs=1e-4)


async def test_tied_weights_may_come_once(smollm2: Subject) -> None:
    weights = smollm2.weights
    del weights["lm_head.weight"]
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * 1.5
    model = models.load_model(smollm2.folder, dtype=torch.float32, device=CPU, weights=False)
    engine = TorchEngine(model, smollm2.tokenizer, max_requests=2)
    await engine.load(FIRST, weights)
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])
    await engine.close()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"transformer.ln_f.weight": torch.zeros(3)}, "transformer.ln_f.weight has shape"),
        ({"model.extra": torch.zeros(3)}, "no tensor model.extra"),
        ({"transformer.ln_f.weight": None}, "missing, the first is transformer.ln_f.weight"),
        (
            {"transformer.ln_f.weight": torch.full((48,), math.nan)},
            "transformer.ln_f.weight holds numbers that are not finite",
        ),
        (
            {"transformer.ln_f.weight": torch.full((48,), math.inf)},
            "transformer.ln_f.weight holds numbers that are not finite",
        ),
    ],
)
async def test_weights_that_do_not_fit_change_nothing(
    tiny: Subject, change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    altered = {name: tensor * 2 for name, tensor in tiny.weights.items()} | change
    wrong = {name: tensor for name, tensor in altered.items() if tensor is not None}
    async with tiny.engine() as engine:
        before = await collect(engine, request(tiny.ids("abc>")))
        with pytest.raises(EngineError, match=complaint):
            await engine.load(SECOND, wrong)
        assert engine.policy == FIRST and engine.error is None
        assert said(await collect(engine, request(tiny.ids("abc>")))) == said(before)


async def test_a_stop_string_across_tokens_ends_the_completion_with_the_token_that_completes_it(
    smollm2: Subject,
) -> None:
    prompt = smollm2.ids("The capital of France is")
    expected = smollm2.greedy(prompt, 12)
    pieces = [smollm2.tokenizer.decode([token]) for token in expected]
    stop = pieces[3][-1:] + pieces[4][:2]
    assert "".join(pieces).index(stop) == len("".join(pieces[:4])) - 1
    async with smollm2.engine() as engine:
        result = await collect(engine, request(prompt, 1, temperature=0.0, stop=["never", stop]))
    assert tokens(result[0]) == expected[:5]
    assert result[0][-1].finish == Finish.STOP


async def test_the_end_token_ends_a_completion_and_is_part_of_it(tiny: Subject) -> None:
    weights = tiny.weights
    del weights["lm_head.weight"]  # tied
    head = weights["transformer.wte.weight"]
    head[tiny.tokenizer.eos_token_id] = head.mean(0) + 0.3 * head.std(0)
    async with tiny.engine() as engine:
        await engine.load(SECOND, weights)
        result = await collect(engine, request(tiny.ids("abc>"), 16, max_tokens=200))
    ended = [group for group in result.values() if group[-1].finish == Finish.STOP]
    assert ended and all(tokens(group).index(tiny.tokenizer.eos_token_id) == len(group) - 1 for group in ended)


@pytest.mark.parametrize("prefill_tokens", [16, 512])
@pytest.mark.parametrize("length", [1, 200, 250, 255])
async def test_long_prompts_are_prefilled_in_pieces_and_stop_at_the_window(
    tiny: Subject, length: int, prefill_tokens: int
) -> None:
    prompt = (tiny.ids("abcdefgh12345678>") * 20)[:length]
    async with tiny.engine(prefill_tokens=prefill_tokens) as engine:
        short, result = await asyncio.gather(
            collect(engine, request(tiny.ids("xyz>"), temperature=0.0)),
            collect(engine, request(prompt, 2, temperature=0.0, max_tokens=40)),
        )
    expected = tiny.greedy(prompt, min(40, tiny.reference.config.n_positions - length))
    for group in result.values():
        assert tokens(group) == expected
        assert group[-1].finish is not None
    assert tokens(short[0]) == tiny.greedy(tiny.ids("xyz>"), 12)


async def test_a_seed_gives_the_same_completions_alone_and_in_company(tiny: Subject) -> None:
    asked = request(tiny.ids("reverse abc>"), 6, seed=11)
    async with tiny.engine(max_requests=32) as engine:
        alone = await collect(engine, asked)
        company = [
            request(tiny.ids("a" * n), 3, seed=n, temperature=0.5 + n / 9, max_tokens=4 + n) for n in range(1, 7)
        ]
        results = await asyncio.gather(*(collect(engine, one) for one in [*company, asked, *company]))
        other = await collect(engine, request(tiny.ids("reverse abc>"), 6, seed=12))
    assert said(results[6]) == said(alone)
    assert said(other) != said(alone)
    assert len({tuple(group) for group in said(alone)}) == 6


async def test_closing_the_iterator_frees_its_slots_and_leaves_others_alone(tiny: Subject) -> None:
    async with tiny.engine(max_requests=8) as engine:
        asked = request(tiny.ids("abc>"), 4, seed=5, max_tokens=30)
        expected = await collect(engine, asked)
        kept = asyncio.create_task(collect(engine, asked))
        async with aclosing(engine.submit(request(tiny.ids("xyz>"), 4, max_tokens=200))) as steps:
            await anext(steps)
        assert said(await kept) == said(expected)
        async with asyncio.timeout(LIMIT):
            while engine.stats.inflight or engine.stats.queued:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # All eight slots are really there.
        assert len(await collect(engine, request(tiny.ids("abc>"), 8))) == 8


async def test_groups_that_do_not_fit_wait_in_order_up_to_a_bound(tiny: Subject) -> None:
    async with tiny.engine(max_requests=8) as engine:
        order: list[int] = []

        async def run(seed: int) -> None:
            async def note() -> None:
                order.append(seed)

            await collect(engine, request(tiny.ids("abc>"), 8, seed, max_tokens=20), note)

        tasks = [asyncio.create_task(run(seed)) for seed in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineFull):
            await collect(engine, request(tiny.ids("abc>"), 1))
        await asyncio.gather(*tasks)
        assert order == [0, 1]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (request([]), RequestRefused),
        (request([5, 10_000]), RequestRefused),
        (request([5, -1]), RequestRefused),
        (request([5] * 256), PromptTooLong),
        (request([5], group_size=17), RequestRefused),
        (request([5], temperature=math.nan), RequestRefused),
    ],
)
async def test_a_bad_request_fails_alone(tiny: Subject, bad: SampleRequest, error: type[EngineError]) -> None:
    async with tiny.engine() as engine:
        good = request(tiny.ids("abc>"), 4, max_tokens=20)
        expected = await collect(engine, good)
        running = asyncio.create_task(collect(engine, good))
        await asyncio.sleep(0)
        with pytest.raises(error):
            await collect(engine, bad)
        assert said(await running) == said(expected)
        assert engine.stats.inflight == engine.stats.queued == 0


async def test_a_policy_that_overflows_ends_its_requests_and_the_next_policy_is_not_tainted(tiny: Subject) -> None:
    asked = request(tiny.ids("abc>"), 12, max_tokens=200)
    norm = "transformer.h.0.ln_2.weight"  # of the first layer: the second one's cache is not finite
    overflowing = tiny.weights | {norm: tiny.weights[norm] * 1e38}
    async with tiny.engine() as engine:
        expected = await collect(engine, asked)

        async def swap() -> None:
            await engine.load(SECOND, overflowing)

        with pytest.raises(EngineError, match=r"policy 1\.1 gives logits that are not finite"):
            await collect(engine, asked, swap)
        with pytest.raises(EngineError, match="not finite"):
            await collect(engine, asked)
        assert engine.error is None and engine.stats.inflight == engine.stats.queued == 0
        await engine.load(FIRST, tiny.weights)
        assert said(await collect(engine, asked)) == said(expected)


async def test_a_step_that_raises_ends_what_took_part_and_the_engine_goes_on(
    tiny: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tiny.ids("abc>"), 4, max_tokens=30)
    async with tiny.engine() as engine:
        expected = await collect(engine, asked)
        whole = engine._decoder.decode

        def failing(*arguments: Any) -> torch.Tensor:
            monkeypatch.setattr(engine._decoder, "decode", whole)
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine._decoder, "decode", failing)
        with pytest.raises(EngineError, match="RuntimeError: out of memory"):
            await collect(engine, asked)
        assert engine.error is None and engine.stats.inflight == engine.stats.queued == 0
        assert said(await collect(engine, asked)) == said(expected)


async def test_nothing_is_sampled_before_a_policy_and_nothing_after_the_end(tiny: Subject) -> None:
    model = models.load_model(tiny.folder, dtype=torch.float32, device=CPU, weights=False)
    engine = TorchEngine(model, tiny.tokenizer, max_requests=4)
    with pytest.raises(EngineError, match="no policy"):
        await collect(engine, request(tiny.ids("abc>")))
    await engine.load(FIRST, tiny.weights)
    running = asyncio.create_task(collect(engine, request(tiny.ids("abc>"), 4, max_tokens=240)))
    await asyncio.sleep(0)  # it is submitted, and the end comes right behind it
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await running
    with pytest.raises(EngineError, match="closed"):
        await collect(engine, request(tiny.ids("abc>")))
    with pytest.raises(EngineError, match="closed"):
        await engine.load(SECOND, tiny.weights)


async def test_counters_add_up(tiny: Subject) -> None:
    async with tiny.engine() as engine:
        results = await asyncio.gather(*(collect(engine, request(tiny.ids("abc>"), 4, seed)) for seed in range(3)))
        counted = engine.stats
    assert counted.tokens == sum(len(group) for result in results for group in result.values())
    assert counted.busy_seconds > 0 and counted.load_seconds > 0
    assert counted.inflight == counted.queued == 0
