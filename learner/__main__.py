"""`python -m learner`: one learner process, configured by the run file and `TAILRACE_*` variables.

With `learner.ranks` above 1 it starts the other ranks itself. Started by torchrun, it is the rank that torchrun says.
"""

import asyncio
import importlib
import os
import signal
import sys

from infra.errors import UserError
from infra.service import EXIT_USER_ERROR, Service, serve


async def main(service: Service) -> None:
    """Load the service's code beside the event loop, so that health and heartbeats answer meanwhile, and run it."""
    module = await asyncio.to_thread(importlib.import_module, "learner.service")
    await module.main(service)


def follow() -> None:
    """Be a rank that follows; rank 0, which drains when it is asked to stop, says when to end."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    from learner.ranks import Follower

    try:
        Follower.of_environment().run()
    except UserError as error:
        print(f"tailrace learner: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    if os.environ.get("RANK", "0") != "0":
        follow()
    else:
        serve("learner", main)
