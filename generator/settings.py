"""The generator's section of the run file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.settings import Section


class GeneratorSettings(Section):
    """Tasks in, rollouts out."""

    pool: str = Field("default", pattern=r"^[a-z0-9-]+$", description="tasks of this pool are sampled here")
    engine: Literal["torch"] = Field("torch", description="what samples")
    max_requests: int = Field(64, ge=1, description="completions sampled at once")
    precision: Literal["bf16", "fp32"] = Field("bf16", description="weights and arithmetic of the engine")
    threads: int = Field(0, ge=0, description="CPU threads of torch; 0 = torch's choice")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, …")
    verifiers: int = Field(1, ge=1, description="verifier processes")
    verifier_seconds: float = Field(5.0, gt=0, description="time limit of one verification")
