# Two commands for a fresh machine with python3 (3.11+), make and a package index: `make run` and `make test`.
# Everything is installed into .venv; the system Python is left alone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test shuffled portable fuzz lint format bench paper clean

run: $(VENV)/.run
	$(BIN)/kme-dist run configs/digits.yaml

# Files of tests run side by side, one process per core, at most four.
test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadfile

# The same tests in an order drawn anew, whose seed the first lines give; SEED=... draws that order again.
shuffled: $(VENV)/.test
	$(BIN)/python -m pytest --random-order $(if $(SEED),--random-order-seed=$(SEED))

# The tests of numbers as other processors compute them, with 1, 2 and 4 threads (FULL=1: every combination).
portable: $(VENV)/.test
	$(BIN)/python tests/portable.py $(if $(FULL),--full)

# Damaged files of every format, for MINUTES (10): only errors of ours, nothing run, bounded memory.
fuzz: $(VENV)/.test
	KME_FUZZ_MINUTES=$(or $(MINUTES),10) $(BIN)/python -m pytest -m slow --timeout=0 tests/data/test_fuzzed_readers.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Speed is claimed only as ratios measured in one run; torch is the yardstick of the gradient benchmark.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# The published figures (minutes to hours; needs the shared data sets, see README).
paper: $(VENV)/.test
	$(BIN)/python -m pytest -m paper

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(f"kme-dist needs Python 3.11 or newer, this is {sys.version.split()[0]}; set PYTHON=python3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[test]'
	touch $@ $(VENV)/.run

$(VENV)/.bench: $(VENV)/.test
	$(PIP) --editable '.[test,bench]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
