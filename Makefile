# make demo       train, evaluate and use small models on bundled data (about 4 minutes)
# make check      format, lint, types, import rules and the tests of what changed since BASE (main)
# make test       format, lint, types, import rules and all tests
# make test-long  all tests in random order, with ten times the examples, drawn anew (SEED=...)
# make test-gpu   all tests that this machine's GPU can run; PYTHON=... takes an interpreter as it
#                 is, with torch and the test tools in it: no .venv, no pip, no network
# make test-lowest  all tests with the lowest versions of all dependencies, in .venv-lowest
# make parity     compare with mace-torch, in an environment of its own
# Only Python >= 3.11 and make are needed; everything goes into .venv.

.DELETE_ON_ERROR:
.PHONY: demo check test test-long test-gpu test-lowest format lint types imports tests parity clean

VENV := .venv
BIN := $(VENV)/bin
BASE ?= main
SEED ?= $(shell date +%s)
GPU_PYTHON := $(BIN)/python
GPU_READY := $(VENV)/.test-ready
ifneq ($(filter command environment,$(firstword $(origin PYTHON))),)
GPU_PYTHON = $(PYTHON)
GPU_READY :=
endif
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
DEMO_OUT ?= demo-run
JOBS ?= $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())' 2>/dev/null || echo 2)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "bevatron needs Python 3.11 or newer; none was found (set PYTHON=...)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "creating $(VENV) failed; on Debian and Ubuntu 'apt install python3-venv' helps"; exit 1; }

$(VENV)/.run-ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing bevatron into $(VENV) ..."
	@$(INSTALL) -e ".[molecules,proteins]"
	@touch $@

$(VENV)/.test-ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing bevatron and its test tools into $(VENV) ..."
	@$(INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.run-ready

demo: $(VENV)/.run-ready
	@$(BIN)/bevatron demo $(DEMO_OUT)

test: format lint types imports tests

format: $(VENV)/.test-ready
	@$(BIN)/ruff format --check .

lint: $(VENV)/.test-ready
	@$(BIN)/ruff check .
	@$(BIN)/codespell src tests benchmarks tools examples docs *.md

types: $(VENV)/.test-ready
	@$(BIN)/mypy

imports: $(VENV)/.test-ready
	@$(BIN)/lint-imports

# One thread a test process: the workers of pytest-xdist share the cores. Compiled sources are kept,
# also where the user's shell says otherwise: hundreds of processes import the package.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest
PARALLEL = -n $(JOBS) --dist worksteal --durations 20 --durations-min 10

tests: $(VENV)/.test-ready
	@$(PYTEST) $(PARALLEL)

check: format lint types imports
	@files=$$($(BIN)/python tools/changed_tests.py $(BASE)); \
	if [ -z "$$files" ]; then echo "no test belongs to what changed since $(BASE)"; \
	else $(PYTEST) $(PARALLEL) -q -m "not slow" $$files; fi

test-long: $(VENV)/.test-ready
	@echo "SEED=$(SEED)"
	@$(PYTEST) $(PARALLEL) --timeout 1800 --shuffle $(SEED) \
		--hypothesis-profile random --hypothesis-seed $(SEED)

test-gpu: $(GPU_READY)
	@$(GPU_PYTHON) -c 'import sys, torch; \
		sys.exit(None if torch.cuda.is_available() else "make test-gpu needs a CUDA device")'
	@PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}" PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MPLBACKEND=Agg \
		$(GPU_PYTHON) -m pytest $(PARALLEL)

# pip always takes the newest version, uv can take the lowest that pyproject.toml allows.
.venv-lowest/.test-ready: pyproject.toml
	@$(PYTHON) -m venv .venv-lowest
	@.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	@.venv-lowest/bin/uv pip install --quiet --python .venv-lowest --resolution lowest-direct -e ".[test]"
	@touch $@

test-lowest: BIN := .venv-lowest/bin
test-lowest: .venv-lowest/.test-ready
	@$(PYTEST) $(PARALLEL)

parity: $(VENV)/.test-ready
	@$(BIN)/python tools/parity_mace.py

clean:
	rm -rf $(VENV) .venv-lowest .venv-parity $(DEMO_OUT)
