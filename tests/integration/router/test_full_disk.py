"""A disk that takes nothing: the ledger and the outbox wait for it, say so, and lose nothing of what they hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# The limit on the size of files stands for the full disk: writes fail in the same place, and can be let go on.
SCRIPT = """
import asyncio, resource, sys
from pathlib import Path
from contracts.subjects import ROUTE_OUTCOME
from infra.bus import Bus
from infra.settings import NatsSettings
from router.ledger import report, schema
from router.ledger.store import Ledger
from router.outbox import Outbox
from tests.integration.helpers import until
from tests.integration.router.test_ledger import now, outcome

def full(is_full):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 if is_full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))

async def main(directory):
    ledger = Ledger(directory, now)
    box = Outbox(Bus.later(NatsSettings(url="nats://127.0.0.1:9"), "full"), directory, "demo")
    running = asyncio.create_task(box.run())
    def give(numbers):
        for number in numbers:
            ledger.record(outcome(f"r{number}"))
            box.put(ROUTE_OUTCOME, outcome(f"r{number}"), id=f"r{number}")
    def stored():
        return report.total(connection).requests
    connection = schema.connect(ledger.path)
    give(range(3))
    assert await until(lambda: stored() == 3 and box.backlog)
    before = box.backlog
    full(True)
    give(range(3, 6))
    assert await until(lambda: ledger.trouble)
    assert stored() == 3 and box.backlog == before
    assert ledger.spent("build-bots") == 6 * outcome("x").cost  # budgets hold all the same
    full(False)
    assert await until(lambda: stored() == 6 and not ledger.trouble)
    assert await until(lambda: box.backlog == 2 * before)
    assert not ledger.lost and not box.lost
    await box.close()
    await running
    ledger.close()
    print("done")

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["done"], done.stdout + done.stderr
    assert "the ledger cannot be written" in done.stdout and "the outbox cannot be written" in done.stdout
