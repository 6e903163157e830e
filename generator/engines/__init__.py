"""What samples completions. Every engine speaks the protocol in `base`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from generator.engines.base import (
    Engine,
    EngineError,
    EngineFull,
    EngineStats,
    PromptTooLong,
    RequestRefused,
    SampledToken,
    SampleRequest,
)
from generator.settings import GeneratorSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "Engine",
    "EngineError",
    "EngineFull",
    "EngineStats",
    "PromptTooLong",
    "RequestRefused",
    "SampleRequest",
    "SampledToken",
    "make_engine",
]


def make_engine(settings: GeneratorSettings, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Engine:
    """The engine that the settings name, for the model described in `folder`; its weights come with `Engine.load`.

    Blocks while the model is built. Raises `UserError` on an unusable device or model, or an engine that is missing.
    """
    if settings.engine == "vllm":
        from generator.engines.vllm_engine import VllmEngine

        return VllmEngine(settings, folder, tokenizer)

    import torch

    from generator.engines.torch_engine import TorchEngine
    from infra import models

    if settings.threads:
        torch.set_num_threads(settings.threads)
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    model = models.load_model(folder, dtype=dtype, device=models.pick_device(settings.device), weights=False)
    return TorchEngine(model, tokenizer, max_requests=settings.max_requests)
