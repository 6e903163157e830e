"""The generator's section of the run file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.settings import Section


class VllmSettings(Section):
    """What is passed through to vLLM, where it is the engine."""

    tensor_parallel_size: int = Field(1, ge=1, description="devices that one model is spread over")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of the device's memory that vLLM takes")
    kv_cache_gib: float = Field(0.0, ge=0, description="GiB of KV cache; 0 = what the share above leaves")
    max_model_len: int = Field(0, ge=0, description="tokens of the longest sequence; 0 = the model's own limit")
    enforce_eager: bool = Field(False, description="neither compile nor capture graphs: starts sooner, samples slower")
    kv_cache: Literal["keep", "recompute"] = Field(
        "keep", description="keep or recompute: the KV cache of requests in flight at a new policy"
    )


class GeneratorSettings(Section):
    """Tasks in, rollouts out."""

    role: Literal["train", "serve"] = Field(
        "train", description="train: tasks of the learner and of evaluation; serve: requests, with the promoted policy"
    )
    pool: str = Field("default", pattern=r"^[a-z0-9-]+$", description="tasks of this pool are sampled here")
    engine: Literal["torch", "vllm"] = Field("torch", description="what samples: torch, or vllm where it is installed")
    max_requests: int = Field(64, ge=1, description="completions sampled at once")
    precision: Literal["bf16", "fp32"] = Field("bf16", description="weights and arithmetic of the engine")
    threads: int = Field(0, ge=0, description="CPU threads of torch; 0 = torch's choice")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, …")
    verifiers: int = Field(1, ge=1, description="verifier processes")
    verifier_seconds: float = Field(5.0, gt=0, description="time limit of one verification")
    vllm: VllmSettings = VllmSettings()

    def task_pools(self) -> set[str]:
        """See `Section.task_pools`."""
        return {self.pool}
