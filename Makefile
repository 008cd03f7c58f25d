# Two commands for a new user: `make demo` and `make test`. Each makes .venv if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_ARGS ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test check bench torture clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=23.1"
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

demo: $(STAMP)  ## save, load, compress and damage a scaled OpenLLaMA-3B (DEMO_ARGS="--from FILE": your own), then a small six-way comparison
	@$(BIN)/holdfast demo $(DEMO_ARGS)
	@$(BIN)/holdfast bench checkpoint --experiment six-way --model openllama-3b:scale=0.01:layers=2:float16 --runs 3 \
		--out bench-demo --overwrite

test: $(STAMP)  ## every test but the slow ones (a few minutes)
	$(BIN)/pytest -n 2 -m "not slow"

check: $(STAMP)  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)  ## the speed that README states, as ratios against peers measured in the same run
	$(BIN)/python benchmarks/ratios.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/training_saves.py $(BENCH_ARGS)

torture: $(STAMP)  ## every test, the exhaustive ones too (tens of minutes)
	$(BIN)/pytest -n 2

clean:  ## remove the environment and what the tools left
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
