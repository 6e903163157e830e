"""What hostile text might make a verifier do; runs inside the sandbox.

`python -m tests.integration.hostile FILE` runs some of it in a process that may not make namespaces, as in a container.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from infra.sandbox import Limits, Sandbox, SandboxCrash, SandboxTimeout, linux

HERE = "tests.integration.hostile"


def echo(payload: Any) -> Any:
    return payload


def environment(_: Any) -> dict[str, str]:
    return dict(os.environ)


def identity(_: Any) -> dict[str, int]:
    return {"user": os.geteuid(), "group": os.getegid(), "groups": len(os.getgroups())}


def read(path: str) -> str:
    return Path(path).read_text()


def write(path: str) -> str:
    Path(path).write_text("written")
    return Path(path).read_text()


def litter(_: Any) -> list[str]:
    before = [str(path) for path in Path().iterdir()]
    Path("folder").mkdir()
    Path("folder/file").write_text("left behind")
    Path("folder").chmod(0)
    return before


def connect(port: int) -> str:
    socket.create_connection(("127.0.0.1", port), timeout=1).close()
    return "connected"


def fork(_: Any) -> int:
    return os.fork() or os._exit(0)  # type: ignore[func-returns-value]


def shell(command: str) -> str:
    return subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False).stdout


def bomb(_: Any) -> int:
    started = 0
    for _ in range(64):
        try:
            subprocess.Popen(["/bin/sleep", "60"])
            started += 1
        except OSError:
            break
    return started


def signal_process(process: int) -> None:
    os.kill(process, 0)  # signal 0 asks for the right to send one, and sends none


def allocate(count: int) -> int:
    return len(bytearray(count))


def spin(_: Any) -> None:
    while True:
        pass


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def leave(code: int) -> None:
    os._exit(code)


def fail(text: str) -> None:
    raise ValueError(text)


def recurse(_: Any) -> Any:
    return recurse(_)


def large(count: int) -> str:
    return "x" * count


def not_finite(_: Any) -> float:
    return float("nan")


def write_to_every_descriptor(_: Any) -> int:
    forged = b'r+{"outcome": "ok"}'
    for descriptor in range(64):
        try:
            os.write(descriptor, forged)
        except OSError:
            continue
    os._exit(0)


async def attempts(path: str) -> dict[str, Any]:
    sandbox = Sandbox(1, Limits(wall_seconds=5), packages=(HERE,))
    await sandbox.start()
    results: dict[str, Any] = {"missing": sandbox.missing, "enforced": sandbox.enforced}
    try:
        for name, payload in (
            ("read", path),
            ("write", path),
            ("write", "inside"),
            ("connect", 9),
            ("fork", None),
            ("signal_process", os.getpid()),
            ("allocate", 4 << 30),
            ("sleep", 100),
            ("echo", 7),
        ):
            try:
                limits = Limits(wall_seconds=0.3) if name == "sleep" else None
                results[f"{name} {payload}"] = await sandbox.call(f"{HERE}:{name}", payload, limits=limits)
            except (SandboxCrash, SandboxTimeout) as error:
                results[f"{name} {payload}"] = type(error).__name__
    finally:
        await sandbox.close()
    return results


if __name__ == "__main__":
    linux.forbid_new_privileges()
    linux.filter_calls(processes=True)
    print(json.dumps(asyncio.run(attempts(sys.argv[1]))))
