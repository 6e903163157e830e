"""The processes of the ranks that follow: started by rank 0, watched, and gone when it goes."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.errors import UserError
from infra.service import EXIT_FAILURE, EXIT_USER_ERROR, Service
from infra.supervisor import KILL_SECONDS, die_with_parent
from learner.ranks import Alone, Leader, Ranks, started_by_launcher
from learner.settings import LearnerSettings

LEAVE_SECONDS = 10.0  # from the end of the last step until a follower has ended
ABORT_SECONDS = 20.0  # from the loss of a rank until this process ends, whatever its computing thread waits for


@asynccontextmanager
async def ranks_of(service: Service, settings: LearnerSettings) -> AsyncIterator[Ranks]:
    """The ranks that the settings ask for; the processes live as long as the context.

    The loss of one ends the service. Under torchrun, which has started all of them, it is torchrun that sees to this.
    """
    launched = started_by_launcher(settings.ranks)
    if settings.ranks == 1:
        yield Alone()
        return
    processes: list[Process] = []
    if launched:
        leader = await asyncio.to_thread(Leader.of_environment)
    else:
        if sys.platform.startswith("linux"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # what ranks on one machine exchange stays on it
        leader, port = Leader.listening(settings.ranks)
        processes = [await _start(rank, settings.ranks, port) for rank in range(1, settings.ranks)]
    watches = [
        service.spawn(_watch(rank, process, leader), f"rank {rank}") for rank, process in enumerate(processes, start=1)
    ]
    try:
        yield leader
        for watch in watches:
            watch.cancel()
        leader.close()
        if processes:
            await _ended(processes, LEAVE_SECONDS)
    except RuntimeError as error:  # a collective failed: perhaps because a rank had a reason to leave
        if sentence := leader.failure():
            raise UserError(sentence) from error
        raise
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
        if processes:
            await _ended(processes, KILL_SECONDS)


async def _ended(processes: list[Process], limit: float) -> None:
    await asyncio.wait([asyncio.ensure_future(process.wait()) for process in processes], timeout=limit)


async def _start(rank: int, count: int, port: int) -> Process:
    """A follower, configured as torchrun does it; it writes to this process's log and belongs to its group."""
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "learner",
        stdin=asyncio.subprocess.DEVNULL,
        env=os.environ | place,
        preexec_fn=die_with_parent(os.getpid()),
    )


async def _watch(rank: int, process: Process, leader: Leader) -> None:
    code = await process.wait()
    sentence = leader.failure()
    limit = threading.Timer(ABORT_SECONDS, os._exit, (EXIT_USER_ERROR if sentence else EXIT_FAILURE,))
    limit.daemon = True
    limit.start()
    if sentence:
        raise UserError(sentence)
    raise RuntimeError(f"rank {rank} ended with code {code} in the middle of the work")
