# make demo    train, evaluate and use a small potential on bundled data (about 3 minutes)
# make test    format, lint, types, import rules and all tests
# make parity  compare with mace-torch, in an environment of its own
# Only Python >= 3.11 and make are needed; everything goes into .venv.

.DELETE_ON_ERROR:
.PHONY: demo test format lint types imports tests parity clean

VENV := .venv
BIN := $(VENV)/bin
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
	@$(INSTALL) -e ".[molecules]"
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

# One thread a test process: the workers of pytest-xdist share the cores.
tests: $(VENV)/.test-ready
	@OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
		--durations 20 --durations-min 10

parity: $(VENV)/.test-ready
	@$(BIN)/python tools/parity_mace.py

clean:
	rm -rf $(VENV) .venv-parity $(DEMO_OUT)
