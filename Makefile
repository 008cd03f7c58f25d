# Two commands for a new user: `make demo` and `make test`. Each makes .venv if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Three workers for two cores, as some tests wait; one thread of torch each, as more would compete for the cores. The
# tests of a class or module share fixtures, so that one worker runs them; the files run in their order, so that long
# ones at the end do not leave a worker idle. Compiled Python is cached even where the environment forbids it: the tests
# start hundreds of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadscope --no-loadscope-reorder
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

demo: $(STAMP)  ## train a small GPT, kill it, resume it exactly; then save its checkpoint in six ways (a few minutes)
	@rm -rf demo-run
	@$(BIN)/tensorkeep demo --training --out demo-run $(DEMO_ARGS)
	@$(BIN)/tensorkeep bench checkpoint --experiment six-way --from demo-run/checkpoints/step-001200 --runs 3 \
		--out bench-demo --overwrite

test: $(STAMP)  ## all tests but the exhaustive ones (about five minutes on 2 cores)
	$(PYTEST) -m "not slow"

check: $(STAMP)  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)  ## the speed that README states, as ratios against peers measured in the same run (tens of minutes)
	@mkdir -p bench-results; missed=0; for each in ratios training_saves plain_training; do \
		$(BIN)/python benchmarks/$$each.py --out bench-results/$$each.json $(BENCH_ARGS) || missed=1; \
	done; exit $$missed

torture: $(STAMP)  ## the exhaustive tests: every operation killed, every byte flipped (tens of minutes)
	$(PYTEST) -m slow --timeout 900

clean:  ## remove the environment and what the tools left
	rm -rf $(VENV) demo-run bench-demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
