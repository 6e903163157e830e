"""Checkpoints are written while training goes on, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog
from torch import Tensor

from learner.checkpoints import Checkpoints

log = structlog.get_logger(__name__)


class Saver:
    """Writes checkpoints beside the training; `spawn` starts a coroutine whose failure ends the service."""

    def __init__(
        self, checkpoints: Checkpoints, spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    ) -> None:
        self.checkpoints = checkpoints
        self.version: int | None = None  # of the newest checkpoint on disk
        self._spawn = spawn
        self._saving: asyncio.Task[None] | None = None

    async def finished(self) -> None:
        """Return when no checkpoint is being written."""
        if self._saving is not None:
            await self._saving
            self._saving = None

    async def save(
        self, version: int, snapshot: dict[str, Tensor], position: dict[str, Any], after: Awaitable[None] | None
    ) -> None:
        """Begin to write a checkpoint as soon as the one before is written; it counts once `after` is done."""
        await self.finished()
        self._saving = self._spawn(self._save(version, snapshot, position, after), "checkpoint")

    async def _save(
        self, version: int, snapshot: dict[str, Tensor], position: dict[str, Any], after: Awaitable[None] | None
    ) -> None:
        if after is not None:
            await after
        await asyncio.to_thread(self.checkpoints.save, version, snapshot, position)
        self.version = version
        log.info("checkpoint", version=version)
