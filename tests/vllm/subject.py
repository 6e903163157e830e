"""A real model sampled by a real vLLM, beside an untouched copy of it in transformers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from contracts.messages import PolicyRef
from generator.engines.vllm_engine import VllmEngine
from generator.settings import GeneratorSettings, VllmSettings
from infra import models
from tests.integration.test_torch_engine import CPU, FIRST, Groups, Subject, tokens

Weights = dict[str, torch.Tensor]


class VllmSubject(Subject):
    """`Subject` whose engine is vLLM. Starting one takes half a minute, so a module shares it."""

    @asynccontextmanager
    async def vllm(self, **options: Any) -> AsyncIterator[VllmEngine]:
        settings = GeneratorSettings(
            engine="vllm",
            threads=1,
            max_requests=16,
            precision="bf16" if self.dtype == torch.bfloat16 else "fp32",
            vllm=VllmSettings(kv_cache_gib=0.5, enforce_eager=True, **options),
        )
        engine = VllmEngine(settings, self.folder, self.tokenizer)
        try:
            await engine.load(FIRST, self.weights)
            yield engine
        finally:
            await engine.close()

    def successor(self, weights: Weights) -> Subject:
        """The same model with other weights, to compute log-probs with."""
        other = Subject.__new__(Subject)
        other.reference = models.load_model(self.folder, dtype=self.dtype, device=CPU)
        other.reference.load_state_dict(weights)
        return other

    def altered(self, seed: int, scale: float) -> Weights:
        """Every weight moved by `scale` times its tensor's spread: another policy through and through."""
        generator = torch.Generator().manual_seed(seed)
        weights = self.weights
        for name, tensor in weights.items():
            if name != "lm_head.weight":
                noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std().nan_to_num(0.0)
                weights[name] = (tensor.float() + scale * noise).to(tensor.dtype)
        for head, embedding in (
            ("lm_head.weight", "model.embed_tokens.weight"),
            ("lm_head.weight", "transformer.wte.weight"),
        ):
            if embedding in weights:  # tied
                weights[head] = weights[embedding]
        return weights


def differences(
    groups: Groups, prompt: list[int], sampling: Any, policies: dict[PolicyRef, Subject]
) -> list[tuple[float, float]]:
    """(recorded, expected under the policy it names) log-prob of every token."""
    pairs = []
    for group in groups.values():
        expected = {ref: subject.logprobs(prompt, tokens(group), sampling) for ref, subject in policies.items()}
        pairs += [(sampled.logprob, expected[sampled.policy][at]) for at, sampled in enumerate(group)]
    return pairs


async def until(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    """Wait for a condition; fails with what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(0.002)


def descendants(pid: int) -> dict[int, str]:
    """The processes that `pid` has started, and those that one of them has, by id: their command lines."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_text().replace("\0", " ").strip()
            except (OSError, IndexError):  # it has just ended
                continue
            if parent == pid:
                found |= {int(entry.name): command, **descendants(int(entry.name))}
    return found


def engine_core(pid: int) -> int:
    """The process id of vLLM's engine core below `pid`."""
    (core,) = [child for child, command in descendants(pid).items() if command.startswith("VLLM::EngineCore")]
    return core
