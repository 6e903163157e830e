"""`tailrace bench gateway`: what the gateway adds to an answer, beside LiteLLM's proxy, before the same upstream.

Upstream, gateways and clients are processes; the clients ask without pause, straight and through each gateway in turn,
round after round, so that what the machine does besides falls on all three. Ours decides between two pools, keeps its
ledger and publishes every decision and outcome to a real server; LiteLLM passes one model on, with one worker, as ours
has one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from infra.benchmarks.report import Chart, JsonFile, PlotFile, Report, progress, publish
from infra.errors import UserError
from infra.server import EmbeddedServer
from infra.settings import PREFIX

CLIENTS = (1, 16, 64)
WAYS = ("plain", "stream")
WARM_SECONDS = 2.0
START_SECONDS = 180.0
STOP_SECONDS = 10.0
HOME = Path(".venv-litellm")
PACKAGE = "litellm[proxy]>=1.100,<2"
POOLS = {"compact": ("compact", 0.2), "strong": ("strong", 10.0)}


def gateway_benchmark(
    seconds: Annotated[float, typer.Option(help="Seconds of load per case and round.", min=1)] = 4.0,
    rounds: Annotated[int, typer.Option(help="Rounds; the figures are those of all rounds together.", min=1)] = 3,
    litellm: Annotated[
        Path, typer.Option(help="LiteLLM's command; where it is missing it is installed into .venv-litellm.")
    ] = HOME / "bin" / "litellm",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """What the gateway adds to latency, and its throughput, beside LiteLLM's proxy."""
    command = _installed(litellm)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-bench-")))
        upstream = stack.enter_context(_upstream())
        gateways = {
            "tailrace": stack.enter_context(_tailrace(folder, upstream)),
            "litellm": stack.enter_context(_litellm(folder, upstream, command)),
        }
        latencies = _measure({"straight": (upstream, "bench", 0), **gateways}, seconds, rounds)
        memory = {name: _memory(pid) for name, (_, _, pid) in gateways.items()}
    publish(report(latencies, seconds * rounds, memory), json_file=json_file, plot_file=plot_file)


Case = tuple[str, int]  # plain or stream, clients


def _measure(
    targets: dict[str, tuple[str, str, int]], seconds: float, rounds: int
) -> dict[str, dict[Case, list[float]]]:
    """Latencies in seconds by target and case."""
    for url, model, _ in targets.values():
        for way in WAYS:
            _load(url, model, max(CLIENTS), WARM_SECONDS, way)
    cases = [(way, clients) for way in WAYS for clients in CLIENTS]
    found: dict[str, dict[Case, list[float]]] = {name: {case: [] for case in cases} for name in targets}
    for number in range(rounds):
        for way, clients in cases:
            progress(f"round {number + 1} of {rounds}: {way}, {clients} clients")
            for name, (url, model, _) in targets.items():
                found[name][way, clients] += _load(url, model, clients, seconds, way)
    return found


def _load(url: str, model: str, clients: int, seconds: float, way: str) -> list[float]:
    command = [sys.executable, "-m", "router.benchmarks.load", url, model, str(clients), str(seconds), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + START_SECONDS)
    if done.returncode:
        raise UserError(f"the clients of {url} failed: {done.stderr.strip().splitlines()[-1]}")
    result = json.loads(done.stdout)
    if result["failures"]:
        raise UserError(f"{url} gave {result['failures']} wrong answers of {len(result['latencies'])}")
    return list(result["latencies"])


# -- what is measured --------------------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def report(found: dict[str, dict[Case, list[float]]], seconds: float, memory: dict[str, int]) -> Report:
    """Figures and table: `seconds` of load per case; ratios compare the same case, the worst case counts."""
    cases: dict[str, Any] = {}
    rows = []
    for case in found["straight"]:
        way, clients = case
        straight = found["straight"][case]
        figures: dict[str, Any] = {"straight_rps": len(straight) / seconds}
        for name in ("tailrace", "litellm"):
            times = found[name][case]
            figures[name] = {
                "rps": len(times) / seconds,
                "added_p50_ms": 1000 * (quantile(times, 0.5) - quantile(straight, 0.5)),
                "added_p99_ms": 1000 * (quantile(times, 0.99) - quantile(straight, 0.99)),
            }
        ours, theirs = figures["tailrace"], figures["litellm"]
        figures["throughput_ratio"] = ours["rps"] / theirs["rps"]
        figures["added_p99_ratio"] = ours["added_p99_ms"] / theirs["added_p99_ms"]
        cases[f"{way}_{clients}"] = figures
        rows.append(
            [
                way,
                str(clients),
                f"{figures['straight_rps']:.0f}",
                *(f"{each['rps']:.0f}" for each in (ours, theirs)),
                *(f"{each[f'added_p{share}_ms']:.1f}" for share in (50, 99) for each in (ours, theirs)),
                f"{figures['throughput_ratio']:.1f}",
                f"{figures['added_p99_ratio']:.2f}",
            ]
        )
    throughput = min(each["throughput_ratio"] for each in cases.values())
    added = max(each["added_p99_ratio"] for each in cases.values())
    mib = {name: size / 2**20 for name, size in memory.items()}
    return Report(
        {"throughput_ratio": throughput, "added_p99_ratio": added, "memory_mib": mib, "cases": cases},
        [
            "answers", "clients", "straight/s", "ours/s", "LiteLLM/s",
            "ours +p50 ms", "LiteLLM +p50 ms", "ours +p99 ms", "LiteLLM +p99 ms", "throughput ×", "added p99 ×",
        ],
        rows,
        [
            f"Worst of six cases: throughput × {throughput:.1f} (target 3), added p99 × {added:.2f} (target .5).",
            f"Memory after the load: ours {mib['tailrace']:.0f} MiB, LiteLLM {mib['litellm']:.0f} MiB.",
            "One worker each; clients and upstream take their share of the same cores.",
        ],
        Chart(
            "Answers per second", "", "answers per second", [f"{way}, {clients}" for way, clients in found["straight"]],
            {
                "ours": [each["tailrace"]["rps"] for each in cases.values()],
                "LiteLLM": [each["litellm"]["rps"] for each in cases.values()],
            },
        ),
    )  # fmt: skip


# -- the processes -----------------------------------------------------------------------------------------------------


def _installed(command: Path) -> Path:
    """LiteLLM's command, after installing it where it is missing from its own place."""
    if not command.exists():
        if command.parent.parent != HOME:
            raise UserError(f"--litellm: there is no {command}; give the path of LiteLLM's command")
        progress(f"installing {PACKAGE} into {HOME}")
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
        subprocess.run([str(HOME / "bin" / "pip"), "install", "--quiet", PACKAGE], check=True)
    return command.absolute()


@contextmanager
def _process(
    command: Sequence[str | Path], log: Path, environment: dict[str, str], folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=folder)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _upstream() -> Iterator[str]:
    command = [sys.executable, "-m", "router.benchmarks.upstream"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        process.terminate()


@contextmanager
def _tailrace(folder: Path, upstream: str) -> Iterator[tuple[str, str, int]]:
    server, port, config = EmbeddedServer(folder / "nats"), _free_port(), folder / "router.toml"
    lines = ["[router]", f"port = {port}", f'directory = "{folder / "router"}"']
    for name, (tier, price) in POOLS.items():
        lines += [f"[router.pools.{name}]", f'tier = "{tier}"', f'url = "{upstream}"', 'model = "bench"']
        lines += [f"price_in = {price}", f"price_out = {price}", "window = 32768", "concurrency = 256"]
    config.write_text("\n".join(lines))
    server.start()
    try:
        nats = server.settings
        environment = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)} | {
            f"{PREFIX}NATS__URL": nats.url,
            f"{PREFIX}NATS__USER": nats.user,
            f"{PREFIX}NATS__PASSWORD": nats.password.get_secret_value(),
            f"{PREFIX}TELEMETRY__LOG_LEVEL": "warning",
        }
        command = [sys.executable, "-m", "router", "--config", str(config)]
        with _process(command, folder / "router.log", environment) as process:
            url = f"http://127.0.0.1:{port}"
            _wait(f"{url}/readyz", process, folder / "router.log")
            yield f"{url}/v1", "auto", process.pid
    finally:
        server.stop()


@contextmanager
def _litellm(folder: Path, upstream: str, command: Path) -> Iterator[tuple[str, str, int]]:
    port, config = _free_port(), folder / "litellm.json"
    model = {"model": "openai/bench", "api_base": upstream, "api_key": "bench"}
    config.write_text(json.dumps({"model_list": [{"model_name": "bench", "litellm_params": model}]}))
    environment = {**os.environ, "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "HOME": str(folder)}
    environment["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # ours is asked without a key, too
    start: list[str | Path] = [
        command,
        "--config",
        config,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--num_workers",
        "1",
    ]
    with _process([*start, "--telemetry", "False"], folder / "litellm.log", environment, folder) as process:
        url = f"http://127.0.0.1:{port}"
        _wait(f"{url}/health/readiness", process, folder / "litellm.log")
        yield f"{url}/v1", "bench", process.pid


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise UserError(f"{url} does not answer; its last words: {log.read_text(errors='replace')[-2000:]}")


def _memory(pid: int) -> int:
    """Bytes that a process and its children hold."""
    process = psutil.Process(pid)
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
