"""Another environment's items, whose rollouts wait for a simulated tool before they are scored.

Agents call search engines, compilers and browsers between sampling and reward. How long that takes is heavy-tailed, and
it is what makes a synchronous run wait for its slowest rollout. Here the waiting is real and the tool is not, so what
latency costs can be measured with any environment and on any machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

from contracts.messages import Split
from generator.environments.base import Environment, Item
from infra.errors import UserError

LONGEST_SECONDS = 600.0  # the tail of a lognormal distribution has no end, a wait has
WIDEST_SIGMA = 5.0
FORM = "median seconds, sigma and another environment, as in tools:0.2:1.0:reverse-text"


@dataclass(frozen=True)
class ToolLatency:
    """Lognormal seconds: half of the waits are shorter than `median`, and their logarithms have deviation `sigma`."""

    median: float
    sigma: float
    seed: int

    def seconds(self, index: int) -> float:
        """How long rollout `index` of the group waits; the same wherever and whenever the task is done."""
        normal = Random(f"tool {self.seed} {index}").gauss()
        return min(self.median * math.exp(self.sigma * normal), LONGEST_SECONDS)


class Tools:
    """Items of another environment, each with a tool that has to be waited for."""

    def __init__(self, median: float, sigma: float, inner: Environment) -> None:
        """`median` in seconds. Raises `UserError` on one that is not in (0, 600], or a `sigma` not in [0, 5]."""
        self.name = f"tools:{median:g}:{sigma:g}:{inner.name}"
        if not 0 < median <= LONGEST_SECONDS:
            raise UserError(
                f"environment {self.name}: the median must be above 0 and at most {LONGEST_SECONDS:g} seconds"
            )
        if not 0 <= sigma <= WIDEST_SIGMA:
            raise UserError(f"environment {self.name}: sigma must be between 0 and {WIDEST_SIGMA:g}")
        self._median = median
        self._sigma = sigma
        self._inner = inner

    def item(self, seed: int, split: Split) -> Item:
        """See `Environment.item`."""
        return replace(self._inner.item(seed, split), tool=ToolLatency(self._median, self._sigma, seed))


def parse(argument: str) -> tuple[float, float, str]:
    """Median, sigma and the other environment's name from `MEDIAN:SIGMA:ENVIRONMENT`. Raises `UserError`."""
    median, _, rest = argument.partition(":")
    sigma, _, inner = rest.partition(":")
    try:
        numbers = float(median), float(sigma)
    except ValueError:
        raise UserError(f"environment tools:{argument}: needs {FORM}") from None
    if not inner or inner.partition(":")[0] == "tools":
        raise UserError(f"environment tools:{argument}: needs {FORM}")
    return *numbers, inner
