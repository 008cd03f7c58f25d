# Two commands for a new user: `make demo` and `make test`. Each makes .venv if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One stamp for each use: `make demo` takes half of what `make test` needs, which adds the rest.
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
# In the order in which they import each other.
PACKAGES := tensorkeep tensorkeep-formats chatgot tensorkeep-bench
$(DOCS): WITH := --group docs
$(DEV): EXTRA_tensorkeep := [cloud]
$(DEV): EXTRA_chatgot := [tables]
$(DEV): WITH := --group dev
# torchtitan without most of what it needs, which the part that is tested does not import.
$(DEV): ALONE := torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 torchdata==0.11.0 typeguard==4.6.1
# Three workers for two cores, as some tests wait: two took 7% more time and 4% less CPU time. One thread of torch each.
# One worker runs the tests of a file, which share fixtures, or of a group (`xdist_group`). Compiled Python is cached even
# where the environment forbids it: the tests start hundreds of processes. Where a worker ends, the run does, too: xdist
# may wait for ever for another one.
TESTING := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1
WORKERS := -n 3 --dist loadgroup --max-worker-restart 0
PYTEST := $(TESTING) $(BIN)/pytest $(WORKERS)
# Seconds that an exhaustive test may take, and after which its process is ended.
LONG := --timeout 900 -o faulthandler_timeout=960
DEMO_ARGS ?=
BENCH_ARGS ?=
FUZZ_MINUTES ?= 10
# The interpreters that try the wheels; by default that of .venv. Those of pyenv: ~/.pyenv/versions/3.*/bin/python
PYTHONS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-unit test-ci check docs bench bench-ranks bench-stores torture torture-stores sanitized wheel clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# The installation compiles the coder where a C compiler is, again after a change of its source.
$(VENV)/.installed-%: pyproject.toml constraints.txt $(PACKAGES:%=packages/%/pyproject.toml) packages/tensorkeep/setup.py $(wildcard packages/tensorkeep/src/coder/*)
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing the packages for $* into $(VENV) ..."
	@$(BIN)/pip install -qq --upgrade "pip>=25.1"
	@$(BIN)/pip install -qq -c constraints.txt $(foreach each,$(PACKAGES),-e "packages/$(each)$(EXTRA_$(each))") $(WITH)
	@test -z "$(ALONE)" || $(BIN)/pip install -qq --no-deps $(ALONE)
	@$(BIN)/python -c "from tensorkeep.codecs import coder; print('coder:', coder.describe())"
	@touch $@

demo: $(DEMO)  ## saves, loads, a flipped bit, kills and a resumed training run, beside other tools (two minutes)
	@$(BIN)/tensorkeep demo $(DEMO_ARGS)

test: $(DEV)  ## all tests but the exhaustive ones (five and a half minutes on 2 cores)
	$(PYTEST) -m "not exhaustive"

test-unit: $(DEV)  ## the unit tests, which start no process, server, compiler or rank
	$(PYTEST) -m "not integration and not exhaustive"

# A test that fails runs once more there, alone. The coder in Python runs the tests that depend on the coder.
test-ci: $(DEV)  ## what CI runs: all of `test`, and today's share of the exhaustive tests
	TENSORKEEP_CODER=compiled $(TESTING) $(BIN)/python .ci/run_tests.py $(WORKERS) $(LONG)
	TENSORKEEP_CODER=python $(PYTEST) -m "coder and not exhaustive" packages/tensorkeep/tests/codecs packages/tensorkeep/tests/formats packages/tensorkeep/tests/golden

check: $(DEV)  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Without what an earlier build left, so that every page is read and every warning seen.
docs: $(DOCS)  ## the site in build/site, with every link checked; a warning is an error
	@rm -rf build/site build/doctrees
	@$(BIN)/python -m sphinx -q -W --keep-going -j auto -c docs/site -d build/doctrees docs build/site
	@$(BIN)/python docs/site/links.py build/site
	@echo "open build/site/index.html"

bench: $(DEV)  ## the speed that README states, as ratios against peers measured in the same run (tens of minutes)
	@mkdir -p bench-results; missed=0; for each in ratios lossless first_loads training_saves plain_training; do \
		$(BIN)/python packages/tensorkeep-bench/benchmarks/$$each.py --out bench-results/$$each.json $(BENCH_ARGS) || missed=1; \
	done; exit $$missed

bench-ranks: $(DEV)  ## saves and loads by several ranks, beside DCP's storage (half an hour)
	@mkdir -p bench-results
	$(BIN)/python packages/tensorkeep-bench/benchmarks/ranks.py --out bench-results/ranks.json $(BENCH_ARGS)

bench-stores: $(DEV)  ## saves and loads in an object store on this machine, beside obstore alone (a quarter of an hour)
	@mkdir -p bench-results
	$(BIN)/python packages/tensorkeep-bench/benchmarks/stores.py --out bench-results/stores.json $(BENCH_ARGS)

torture: $(DEV)  ## the exhaustive tests: every operation killed, every byte flipped, the coder fuzzed (tens of minutes)
	$(PYTEST) -m exhaustive $(LONG) --store-server ministack
	$(PYTEST) -m "integration and not exhaustive" --store-server ministack packages/tensorkeep/tests/storage/objects packages/tensorkeep/tests/formats packages/tensorkeep/tests/checkpoint packages/tensorkeep/tests/faults/stores
	$(PYTEST) -m hypothesis --hypothesis-profile thorough $(LONG)
	$(MAKE) sanitized

sanitized: $(DEV)  ## the coder with sanitizers, fuzzed for FUZZ_MINUTES
	$(BIN)/python packages/tensorkeep/tests/coder/sanitized.py $(FUZZ_MINUTES)

torture-stores: $(DEV)  ## every request of every call on an object store failed in every way; torture does a sixth (an hour)
	STORE_FAULTS=all $(PYTEST) -m exhaustive --timeout 3600 -o faulthandler_timeout=3660 --store-server ministack packages/tensorkeep/tests/faults/stores

wheel: $(DEV)  ## build all packages in dist/, as wheels and sources; try each alone in an empty environment (PYTHONS)
	@$(BIN)/python tests/wheels.py dist $(PYTHONS)

clean:  ## remove the environment and what the tools left
	rm -rf $(VENV) build dist docs/reference/api docs/reference/commands packages/*/build packages/*/src/*.egg-info demo-run tensorkeep-demo.html .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f packages/tensorkeep/src/tensorkeep/codecs/_coder.abi3.so
