"""The names that applications may ask for as `model`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.errors import UserError
from router.admission.keys import Caller
from router.chat import ApiError
from router.settings import PoolSettings

AUTO = "auto"
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,100}")
_THRESHOLD = re.compile(r"auto-(\d*\.?\d+)")


@dataclass(frozen=True)
class Asked:
    """What a model's name asks for."""

    tolerance: float  # P(success) that may be given up for a lower cost; 0 = always the best
    pools: frozenset[str]  # that may answer
    named: bool = False  # one pool was asked for: nothing is decided, and nothing is taken apart


def check(pools: Mapping[str, PoolSettings]) -> None:
    """Raises `UserError` where a pool has a name that cannot be asked for, or means something else."""
    for name in pools:
        if not _NAME.fullmatch(name):
            raise UserError(
                f"router.pools.{name!r}: a pool's name has 1 to 100 letters, digits and . _ : / -; give another one"
            )
        if name == AUTO or _THRESHOLD.fullmatch(name):
            raise UserError(f"router.pools.{name}: the name is taken, it asks the router to choose; give another one")


def asked(model: str, pools: Mapping[str, PoolSettings], caller: Caller, tolerance: float) -> Asked:
    """What `model` asks for: auto, auto-<threshold>, or a pool. Raises `ApiError` 404 for anything else.

    `tolerance` is what plain `auto` gives up. A pool that the caller may not use does not exist for it.
    """
    usable = frozenset(pools) if caller.pools is None else caller.pools & pools.keys()
    if model in usable:
        return Asked(0.0, frozenset({model}), named=True)
    if usable and model == AUTO:
        return Asked(tolerance, usable)
    if usable and (match := _THRESHOLD.fullmatch(model)) and float(match[1]) <= 1:
        return Asked(float(match[1]), usable)
    known = ", ".join([AUTO, f"{AUTO}-<threshold from 0 to 1>", *sorted(usable)]) if usable else "none for this key"
    raise ApiError(
        404,
        f"the model {model[:100]!r} does not exist or you do not have access to it; there are: {known}",
        code="model_not_found",
        param="model",
    )


def listing(pools: Mapping[str, PoolSettings], caller: Caller, created: int) -> dict[str, Any]:
    """The answer to GET /v1/models: what `asked` accepts from this caller. `created` in unix seconds."""
    usable = [name for name in sorted(pools) if caller.pools is None or name in caller.pools]
    names = [AUTO, *usable] if usable else []
    return {"object": "list", "data": [described(name, created) for name in names]}


def described(name: str, created: int) -> dict[str, Any]:
    """OpenAI's model object."""
    return {"id": name, "object": "model", "created": created, "owned_by": "tailrace"}
