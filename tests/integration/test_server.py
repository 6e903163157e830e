"""The embedded server as a child process: credentials, restart with the same store, and its end."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contracts.subjects import KV_BUCKET
from infra.bootstrap import bucket_config, ensure_stream
from infra.bus import Bus
from infra.errors import UserError
from infra.server import EmbeddedServer


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.fixture
def own_server(tmp_path: Path):
    server = EmbeddedServer(tmp_path)
    server.start()
    yield server
    server.kill()


def test_credentials_are_readable_by_the_owner_only_and_printed_nowhere(own_server: EmbeddedServer) -> None:
    password = own_server.settings.password.get_secret_value()
    config = own_server.directory / "nats-server.conf"
    assert password in config.read_text()
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert password not in (own_server.directory / "nats-server.log").read_text()
    assert password not in repr(own_server.settings)
    assert EmbeddedServer(own_server.directory).settings.password != own_server.settings.password


async def test_a_killed_server_starts_again_with_port_credentials_and_content(own_server: EmbeddedServer) -> None:
    before = own_server.settings
    bus = await Bus.connect(before, "test")
    await ensure_stream(bus, bucket_config(KV_BUCKET), create=True)
    await bus.put("key", b"value")
    first = own_server.pid
    own_server.kill()
    assert not own_server.running
    own_server.start()
    assert own_server.settings == before and own_server.pid != first
    assert (await bus.get("key") or (b"", 0))[0] == b"value"
    await bus.close()


def test_start_twice_and_stop_twice(own_server: EmbeddedServer) -> None:
    pid = own_server.pid
    own_server.start()
    assert own_server.pid == pid
    own_server.stop()
    own_server.stop()
    assert not alive(pid)


def test_it_has_a_session_of_its_own(own_server: EmbeddedServer) -> None:
    assert os.getsid(own_server.pid) != os.getsid(0)


def test_a_port_in_use_is_a_sentence_with_the_servers_own_words(own_server: EmbeddedServer, tmp_path: Path) -> None:
    port = int(own_server.settings.url.rsplit(":", 1)[1])
    other = EmbeddedServer(tmp_path / "other", port=port)
    with pytest.raises(UserError, match=r"ended with exit code 1.*address already in use"):
        other.start()
    assert not other.running


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tie a child to its parent")
def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom infra.server import EmbeddedServer\n"
        "server = EmbeddedServer(Path(sys.argv[1]))\nserver.start()\nprint(server.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    assert until_gone(child)
