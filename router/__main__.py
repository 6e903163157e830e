"""`python -m router`: one router process, configured by the run file and `TAILRACE_*` variables."""

import asyncio
import importlib

from infra.service import Service, serve


async def main(service: Service) -> None:
    """Load the service's code beside the event loop, so that health and heartbeats answer meanwhile, and run it."""
    module = await asyncio.to_thread(importlib.import_module, "router.service")
    await module.main(service)


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:  # not made for this platform
        pass
    else:
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    serve("router", main, bus_later=True)
