"""`python -m generator`: one generator process, configured by the run file and `TAILRACE_*` variables."""

import asyncio
import importlib

from infra.service import Service, serve


async def main(service: Service) -> None:
    """Load the service's code beside the event loop, so that health and heartbeats answer meanwhile, and run it."""
    name = "generator.serving" if service.settings.section("generator").role == "serve" else "generator.service"
    module = await asyncio.to_thread(importlib.import_module, name)
    await module.main(service)


if __name__ == "__main__":
    serve("generator", main)
