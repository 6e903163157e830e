"""One thread for everything that torch computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TorchThread:
    """Runs blocking functions off the event loop, always in the same thread.

    In a pool, every thread would keep an OpenMP team and an allocator arena of its own: several times the memory.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "torch")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` there and wait for what it returns or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args, **kwargs))
