"""The router's section of the run file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from infra.settings import Section


class PoolSettings(Section):
    """One place that answers requests. Prices are US dollars per million tokens."""

    kind: Literal["openai", "bus"] = Field("openai", description="openai: a compatible upstream; bus: our generators")
    tier: Literal["compact", "strong"] = Field("strong", description="what it is for: compact or strong")
    model: str = Field("", description="name of the model upstream; for a bus pool, the generators' pool")
    url: str = Field("", description="base address of an openai pool, up to and including /v1")
    key_variable: str = Field("", description="environment variable that holds its API key; empty = none")
    like: str = Field("", description="model of the routing policy's training data that it resembles; empty = its tier")
    price_in: float = Field(0.0, ge=0, description="dollars per million prompt tokens")
    price_out: float = Field(0.0, ge=0, description="dollars per million sampled tokens")
    price_cached: float | None = Field(
        None, ge=0, description="per million read from the prompt cache; none = price_in"
    )
    price_cache_write: float | None = Field(None, ge=0, description="per million written to it; none = price_in")
    window: int = Field(8192, ge=1, description="tokens of prompt and answer together")
    capabilities: frozenset[Literal["tools", "json", "images"]] = Field(
        frozenset({"tools", "json"}), description="what it can do: tools, json, images; for a bus pool tools or nothing"
    )
    concurrency: int = Field(64, ge=1, description="calls at once; four times as many wait their turn")
    first_token_seconds: float = Field(
        60.0, gt=0, description="longest wait for its turn, and for a stream's first token"
    )
    next_token_seconds: float = Field(30.0, gt=0, description="longest pause once an answer has begun")
    total_seconds: float = Field(
        600.0, gt=0, description="longest time for a whole answer; of one that is not streamed also until it begins"
    )
    retries: int = Field(
        1, ge=0, description="times a call that failed in time is made again here before the next pool is tried"
    )
    failures: int = Field(3, ge=1, description="failed calls in a row after which it is left alone for a while")
    cooldown_seconds: float = Field(
        10.0, gt=0, description="how long it is left alone; doubled each time, up to 8 times"
    )
    hedge_seconds: float = Field(
        0.0, ge=0, description="silence, waiting its turn included, after which the next pool is asked too; 0 = never"
    )

    @model_validator(mode="before")
    @classmethod
    def _generators_only_write_text(cls, values: Any) -> Any:
        """Our engines constrain nothing: unless something is claimed, a bus pool is for text."""
        if isinstance(values, dict) and values.get("kind") == "bus" and "capabilities" not in values:
            return {**values, "capabilities": frozenset()}
        return values

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.kind == "bus" and not re.fullmatch("[a-z0-9-]*", self.model):
            raise ValueError(f"model {self.model!r} of a bus pool names a pool of generators: use [a-z0-9-] only")
        if self.kind == "bus" and self.capabilities & {"json", "images"}:
            raise ValueError("a bus pool can have the capability tools, but neither json nor images")
        return self

    @property
    def generators(self) -> str:
        """The pool of generators behind a bus pool."""
        return self.model or "default"


class KeySettings(Section):
    """One application or team."""

    variable: str = Field(..., description="environment variable that holds its API key")
    budget_usd: float = Field(
        0.0, ge=0, description="dollars a calendar month (UTC); what is under way at its end is paid; 0 = without limit"
    )
    requests_per_minute: int = Field(0, ge=0, description="0 = without limit")
    tokens_per_minute: int = Field(0, ge=0, description="prompt and answer together; 0 = without limit")
    pools: frozenset[str] = Field(frozenset(), description="pools it may use; empty = all")


class PlanSettings(Section):
    """How requests are taken apart, and how far."""

    planner: Literal["structural", "model", "none"] = Field(
        "structural",
        description="structural: by its form; model: a model plans, by its form when it fails; none: never",
    )
    subtasks: int = Field(8, ge=2, le=64, description="most subtasks of a plan")
    depth: int = Field(3, ge=1, le=16, description="most subtasks that wait for each other")
    width: int = Field(8, ge=1, le=64, description="subtasks in progress at once")
    usd: float = Field(0.0, ge=0, description="dollars that one plan may cost; 0 = without limit of its own")


class RouterSettings(Section):
    """Requests in, decisions and answers out."""

    host: str = Field("127.0.0.1", description="address of the gateway")
    port: int = Field(8080, ge=0, le=65535, description="port of the gateway; 0 = any free port")
    directory: Path = Field(Path("runs/router"), description="ledger, routing policies, and messages not yet published")
    pools: dict[str, PoolSettings] = Field(default_factory=dict, description="pools by name, as applications see them")
    keys: dict[str, KeySettings] = Field(default_factory=dict, description="API keys by name; none = open to everyone")
    plan: PlanSettings = Field(default_factory=PlanSettings, description="how requests are taken apart")
    tolerance: float = Field(0.1, ge=0, le=1, description="P(success) that `auto` may give up for a lower cost")
    exploration: float = Field(0.01, ge=0, le=0.2, description="share of decisions made at random, to learn from")

    def task_pools(self) -> set[str]:
        """See `Section.task_pools`."""
        return {pool.generators for pool in self.pools.values() if pool.kind == "bus"}
