"""What a person got wrong is one sentence that names cause and place, exit code 2, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY = """
[run]
name = "wrong"
environment = "{environment}"
[learner]
model = "{model}"
precision = "fp32"
[generator]
precision = "fp32"
{more}
"""


def tailrace(*arguments: str, cwd: Path, seconds: float = 120.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command as a person runs it, in a folder of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    command = [str(Path(sys.executable).parent / "tailrace"), *arguments]
    return subprocess.run(command, cwd=cwd, env=clean | variables, capture_output=True, text=True, timeout=seconds)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "no/such/folder"}, ("no/such/folder",)),
        ({"environment": "jsonl:questions.jsonl"}, ("questions.jsonl", "line 2", "JSON")),
        ({"environment": "jsonl:missing.jsonl"}, ("missing.jsonl",)),
        ({"environment": "chess"}, ("chess", "quick-facts")),
        ({"environment": "gym:no_such_task"}, ("no_such_task",)),
        ({"more": "[learner.optimizer]\nlearning_rat = 1.0"}, ("learning_rat", "no such setting", "wrong.toml")),
        ({"more": "max_requests = 2"}, ("gave nothing to train on", "group of 8")),
        ({"more": "[nats]\nurl = 'nats://127.0.0.1:9'\nconnect_timeout = 2"}, ("nats://127.0.0.1:9", "nats.url")),
    ],
    ids=lambda value: next(iter(value.values()))[:24].split("\n")[0] if isinstance(value, dict) else None,
)
def test_run(tmp_path, change, words):
    (tmp_path / "questions.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": \n')
    fields = {"environment": "reverse-text", "model": "tiny", "more": ""} | change
    (tmp_path / "wrong.toml").write_text(TINY.format(**fields))
    done = tailrace("run", "wrong.toml", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    said = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stdout + done.stderr
    assert all(word in said[-1] for word in words), said


@pytest.mark.parametrize("service", ["generator", "learner"])
def test_a_service_without_a_server(tmp_path, service):
    variables = {"TAILRACE_NATS__URL": "nats://127.0.0.1:9", "TAILRACE_NATS__CONNECT_TIMEOUT": "1"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    done = subprocess.run(
        [sys.executable, "-m", service], cwd=tmp_path, env=clean | variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    sentences = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(sentences) == 1
    assert sentences[0].startswith(f"tailrace {service}: NATS server nats://127.0.0.1:9 cannot be reached")
