# Two commands for a fresh machine with python3 (3.11+), make and a package index: `make run` and `make test`.
# Everything is installed into .venv; the system Python is left alone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test chaos shuffled portable fuzz mutants lint format bench paper docs docs-test manifests deploy-test release-test oldest newest pythons sbom clean

run: $(VENV)/.run
	$(BIN)/kme-dist run configs/digits.yaml

# Files of tests run side by side, at most four (tests/conftest.py). Each computes with one thread: processes whose threads
# share the cores wait for each other, which made some files three times slower.
test: export OPENBLAS_NUM_THREADS = 1
test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadfile

# Faults in real processes, slow ones too, see docs/reliability.md (REPEAT=20: as often; stops at the first failure).
chaos: export OPENBLAS_NUM_THREADS = 1
chaos: $(VENV)/.test
	for turn in $$(seq $(or $(REPEAT),1)); do \
		$(BIN)/python -m pytest -m chaos -n auto --maxprocesses=4 --dist loadfile || exit 1; done

# The same tests in an order drawn anew, whose seed the first lines give; SEED=... draws that order again.
shuffled: $(VENV)/.test
	$(BIN)/python -m pytest --random-order $(if $(SEED),--random-order-seed=$(SEED))

# The tests of numbers as other processors compute them, with 1, 2 and 4 threads (FULL=1: every combination).
portable: $(VENV)/.test
	$(BIN)/python tests/portable.py $(if $(FULL),--full)

# For MINUTES (10) each: damaged files of every format (only errors of ours, nothing run, bounded memory), and any order of
# appends, predictions, kills and replacements of a data set, beside a model in plain Python.
fuzz: $(VENV)/.test
	KME_FUZZ_MINUTES=$(or $(MINUTES),10) $(BIN)/python -m pytest -m slow --timeout=0 -k test_for_minutes \
		tests/data/test_fuzzed_readers.py tests/run/test_state_machine.py

# Small mistakes put into a private copy of the package: do the tests notice? COUNT=50, SEED=1, MODULES="data/leases.py".
mutants: $(VENV)/.test
	$(BIN)/python tests/mutants.py --count $(or $(COUNT),200) --seed $(or $(SEED),0) $(MODULES)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# deploy/kubernetes/base is rendered from the Helm chart: run this after a change of the chart, the alerts or the settings.
manifests: $(VENV)/.test
	PYTHON=$(BIN)/python tests/deploy/install_tools --helm
	$(BIN)/python deploy/kubernetes/render

# deploy/ on the real programs: helm, a Debian root with systemd, Slurm, Prometheus, a container engine. Installs them (as
# root, on Debian), and says at the end what it ran and what it could not run.
deploy-test: $(VENV)/.test
	PYTHON=$(BIN)/python tests/deploy/install_tools --system
	$(BIN)/python tests/deploy/run_all.py

# Speed is claimed only as ratios measured in one run. Writes docs/benchmarks.md (an hour; parts that were measured are kept).
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# The published figures (minutes to hours; needs the shared data sets, see README).
paper: $(VENV)/.test
	$(BIN)/python -m pytest -m paper

# The documentation site in build/site: warnings are errors, every link and anchor is followed.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	$(BIN)/python -m docs.scripts.links build/site

# Every code block of README and docs/, and the notebooks, followed in empty folders (minutes; PAGES="docs/faq.md ...": some).
docs-test: $(VENV)/.docs
	$(BIN)/python -m docs.scripts.blocks $(PAGES)
	$(if $(PAGES),,$(BIN)/python -m docs.scripts.notebooks)

# Wheel and sdist, each installed into an empty environment, and `make run`'s job there, without the repository.
release-test: $(VENV)/.release
	$(BIN)/python tests/release.py

# The tests with the oldest versions that pyproject.toml allows (constraints-oldest.txt), with the newest, and under other
# versions of Python (FULL=1: all tests; PYTHONS="python3.12 ...").
oldest: $(VENV)/.release
	$(BIN)/python tests/versions.py oldest $(if $(FULL),--full)

newest: $(VENV)/.release
	$(BIN)/python tests/versions.py newest $(if $(FULL),--full)

PYTHONS ?= python3.12 python3.13
pythons: $(VENV)/.release
	$(BIN)/python tests/versions.py pythons $(if $(FULL),--full) $(PYTHONS)

# What an installation contains, as CycloneDX in build/sbom.json, and whether its licences allow redistribution.
sbom: $(VENV)/.release
	$(BIN)/python tests/licences.py

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

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[docs]'
	touch $@ $(VENV)/.run

$(VENV)/.release: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[release]'
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
