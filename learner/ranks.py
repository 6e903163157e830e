"""Several processes that compute each step together: rank 0 leads, the others follow.

Only rank 0 is on the bus. It calls methods of `Worker` on all ranks at once: a key in the store that torch's processes
meet at says that there is a call, and a scatter over gloo carries each rank its share of the arguments. A follower
waits at the store, where a rank 0 that has died is noticed; in a collective, gloo notices, and NCCL's time limit.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from infra import models
from infra.errors import UserError
from learner.settings import LearnerSettings
from learner.worker import Worker

COLLECTIVE = timedelta(seconds=300)  # ranks compute in step: they are never apart for as long
IDLE = timedelta(hours=1)  # a follower's wait at the store before it waits again; torch logs two warnings each time

SETTINGS, SEED, FAILED, CLOSE = "settings", "seed", "failed", "close"


class Ranks(Protocol):
    """The ranks as rank 0 sees them."""

    count: int

    def start(self, folder: Path, settings: LearnerSettings, seed: int) -> Worker:
        """Make the worker of this rank, and have the others make theirs."""
        ...

    def call(self, method: str, shares: Sequence[tuple[Any, ...]], **own: Any) -> list[Any]:
        """Call a worker's method on every rank, with its share of arguments; what each returned, rank 0 first.

        `own` are arguments that rank 0's call has in addition; only its result may be large. Blocks for all of it.
        """
        ...

    def close(self) -> None:
        """End the other ranks between two calls."""
        ...


class Alone:
    """One rank, no process group: the plain path."""

    count = 1

    def start(self, folder: Path, settings: LearnerSettings, seed: int) -> Worker:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._worker = Worker(folder, settings, models.pick_device(settings.device), seed=seed)
        return self._worker

    def call(self, method: str, shares: Sequence[tuple[Any, ...]], **own: Any) -> list[Any]:
        return [getattr(self._worker, method)(*shares[0], **own)]

    def close(self) -> None: ...


class Member:
    """A process among several: what leader and followers have in common."""

    def __init__(self, store: dist.Store, rank: int, count: int) -> None:
        self.count = count
        self._rank = rank
        self._store = store
        # A connection of its own: torch's is locked for as long as one of its threads waits for a rank.
        self._calls = dist.PrefixStore("learner", store.clone())  # type: ignore[attr-defined]  # not in its stubs
        self._number = 0
        self._objects: dist.ProcessGroup | None = None  # gloo, for what is not a tensor

    def _join(self, folder: Path, settings: LearnerSettings, seed: int) -> Worker:
        device = _device(settings.device)
        if settings.threads or device.type == "cpu":
            torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() // self.count))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
        dist.init_process_group(
            backend, store=self._store, rank=self._rank, world_size=self.count, timeout=COLLECTIVE
        )  # fmt: skip
        self._objects = dist.new_group(backend="gloo", timeout=COLLECTIVE)
        mesh = init_device_mesh(device.type, (self.count,))
        worker = Worker(folder, settings, device, seed=seed, mesh=mesh)
        dist.barrier(self._objects)
        return worker

    def _perform(self, worker: Worker, calls: list[Any] | None, own: dict[str, Any]) -> list[Any] | None:
        """One call, together with the other ranks."""
        received: list[Any] = [None]
        dist.scatter_object_list(received, calls, src=0, group=self._objects)
        method, arguments = received[0]
        result = getattr(worker, method)(*arguments, **own)
        if self._rank:
            dist.gather_object(result, None, dst=0, group=self._objects)
            return None
        results: list[Any] = [None] * self.count
        dist.gather_object(None, results, dst=0, group=self._objects)  # its own result may be the whole state
        return [result, *results[1:]]


class Leader(Member):
    """Rank 0."""

    def __init__(self, store: dist.Store, count: int) -> None:
        super().__init__(store, 0, count)

    @classmethod
    def listening(cls, count: int) -> tuple[Leader, int]:
        """A leader that waits for followers on this machine, and the port at which they find it."""
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            count,
            is_master=True,
            timeout=COLLECTIVE,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return cls(store, count), port

    @classmethod
    def of_environment(cls) -> Leader:
        """The leader among processes that torchrun, or what stands in for it, has started."""
        store, _, count = next(dist.rendezvous("env://", timeout=COLLECTIVE))
        return cls(store, count)

    def start(self, folder: Path, settings: LearnerSettings, seed: int) -> Worker:
        self._calls.set(SEED, str(seed))
        self._calls.set(SETTINGS, settings.model_dump_json())
        self._worker = self._join(folder, settings, seed)
        return self._worker

    def call(self, method: str, shares: Sequence[tuple[Any, ...]], **own: Any) -> list[Any]:
        self._calls.set(str(self._number), method)
        self._calls.delete_key(str(self._number - 1))  # everybody has seen it
        self._number += 1
        results = self._perform(self._worker, [(method, share) for share in shares], own)
        assert results is not None, "rank 0 has the results"
        return results

    def failure(self) -> str | None:
        """What a person has to do about a follower that could not start."""
        return self._calls.get(FAILED).decode() if self._calls.check([FAILED]) else None

    def close(self) -> None:
        self._calls.set(str(self._number), CLOSE)
        if dist.is_initialized():
            dist.destroy_process_group()


class Follower(Member):
    """Any rank but 0."""

    @classmethod
    def of_environment(cls) -> Follower:
        return cls(*next(dist.rendezvous("env://", timeout=COLLECTIVE)))

    def run(self) -> None:
        """Do what the leader says until it says that it is over.

        Raises `UserError` where a person has to act, after telling the leader; other errors when a rank is gone.
        """
        try:
            settings = LearnerSettings.model_validate_json(self._next(SETTINGS))
            seed = int(self._next(SEED))
            worker = self._join(models.resolve(settings.model, seed=seed), settings, seed)
        except UserError as error:
            self._calls.set(FAILED, f"rank {self._rank}: {error}")
            raise
        while self._next(str(self._number)).decode() != CLOSE:
            self._number += 1
            self._perform(worker, None, {})
        dist.destroy_process_group()

    def _next(self, key: str) -> bytes:
        """Wait for a key, for as long as there is a store."""
        while True:
            try:
                self._calls.wait([key], IDLE)
                return self._calls.get(key)
            except dist.DistStoreError:  # the time is over; a store that is gone is a `DistNetworkError` at once
                continue


def _device(name: str) -> torch.device:
    """This rank's device. Raises `UserError` where there are fewer devices than ranks on this machine."""
    chosen = models.pick_device(name)
    if chosen.type != "cuda":
        return chosen
    if chosen.index is not None:
        raise UserError(
            f"learner.device {name!r} is one device, but learner.ranks needs several; use auto, cpu or cuda"
        )
    return models.pick_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")


def started_by_launcher(ranks: int, environment: Callable[[str], str | None] = os.environ.get) -> bool:
    """Whether torchrun, or what stands in for it, has started the other ranks.

    Raises `UserError` when it has started another number of them than the settings ask for.
    """
    world = environment("WORLD_SIZE")
    if world is None:
        return False
    if int(world) != ranks:
        raise UserError(
            f"learner.ranks is {ranks}, but WORLD_SIZE says that {world} processes were started; make them the same"
        )
    return ranks > 1
