"""A router as a process between OpenAI's client and scripted upstreams, with a real server beside it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import openai

from infra.server import EmbeddedServer
from tests.upstream import Upstream

T = TypeVar("T")

READY_SECONDS = 30.0


class Thread:
    """An event loop of its own for what must answer while a test waits."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float = 30.0) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


class Router:
    """One router process and what it needs; everything lives below one directory."""

    def __init__(
        self,
        directory: Path,
        pools: Mapping[str, Mapping[str, Any]],
        keys: Mapping[str, Mapping[str, Any]] | None = None,
        secrets: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        """`pools` without a url get an upstream of their own, in `upstreams`. `secrets` are environment variables."""
        self.directory = directory
        self.secrets = dict(secrets or {})
        self._thread = Thread()
        self.upstreams = {name: Upstream() for name, pool in pools.items() if "url" not in pool}
        for upstream in self.upstreams.values():
            self._thread.run(upstream.start())
        self._pools = {
            name: {"kind": "openai", "model": name, **pool}
            | ({"url": self.upstreams[name].url} if name in self.upstreams else {})
            for name, pool in pools.items()
        }
        self._keys = dict(keys or {})
        self._settings = {name: str(value) for name, value in settings.items()}
        self.server = EmbeddedServer(directory / "nats")
        self.server.start()
        self.process = self.start()
        self.url = self._address()

    @property
    def log(self) -> Path:
        return self.directory / "router.log"

    def environment(self) -> dict[str, str]:
        nats = self.server.settings
        own = {
            "RUN__NAME": "front",
            "NATS__URL": nats.url,
            "NATS__USER": nats.user,
            "NATS__PASSWORD": nats.password.get_secret_value(),
            "ROUTER__PORT": "0",
            "ROUTER__DIRECTORY": str(self.directory / "router"),
            "ROUTER__POOLS": json.dumps(self._pools),
            "ROUTER__KEYS": json.dumps(self._keys),
            "ROUTER__EXPLORATION": "0",
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
        return clean | self.secrets | {f"TAILRACE_{name}": value for name, value in (own | self._settings).items()}

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "router"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                start_new_session=True,
            )

    def events(self, event: str) -> list[dict[str, Any]]:
        """Log lines of one event."""
        lines = self.log.read_text(errors="replace").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [line for line in found if line["event"] == event]

    def _address(self) -> str:
        self.until(lambda: self.events("ready") or self.process.poll() is not None, "it is ready", READY_SECONDS)
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        (address,) = re.findall(r"http://\S+", self.events("ready")[-1]["detail"])
        return str(address)

    def until(self, condition: Any, what: str, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{self.log.read_text()[-3000:]}"
            time.sleep(0.02)

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        """OpenAI's client as it is, but that it says at once what went wrong."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30.0)

    def stop_upstream(self, name: str) -> None:
        """Its connections are cut, and nobody listens at its address any more."""
        self._thread.run(self.upstreams[name].stop())

    def start_upstream(self, name: str) -> None:
        self._thread.run(self.upstreams[name].start())

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        for upstream in self.upstreams.values():
            self._thread.run(upstream.stop())
        self._thread.close()
        self.server.stop()
