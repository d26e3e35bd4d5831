# Each target sets up .venv itself; python3 and make are all a machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A test run starts several torch processes; one thread each keeps two cores from being fought over.
# Tests are dealt in two halves, so that files stay whole; a worker that is done takes tests from the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: install quickstart quickstart-sweep study test test-slow lint format docs deploy-docs dist wheel clean

install: $(VENV)/.installed

# uv picks the build of torch that fits the machine (CUDA's where a driver answers, else the CPU's). Where the index it takes
# that from cannot be reached, pip takes whatever build the configured index has.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "finch needs Python 3.11 to 3.13; name one: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt uv
	$(BIN)/python -m uv pip install -q --python $(BIN)/python --torch-backend=auto $(shell grep '^torch==' constraints.txt) 2>/dev/null || true
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

quickstart: install
	$(BIN)/python -m examples.quickstart

quickstart-sweep: install
	$(BIN)/python -m examples.quickstart.sweep

# The study of studies/smollm2_tofu; STUDY=quick is its small form. STUDY_OPTIONS="--jobs 13 --data-root DATA" and others: run.py --help.
study: install
	$(BIN)/python -m studies.smollm2_tofu.run $(if $(filter quick,$(STUDY)),--quick) $(STUDY_OPTIONS)

test: install
	$(PYTEST) -m 'not slow'

test-slow: install
	$(PYTEST) -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, into out/site; a dead link is an error. `.venv/bin/mkdocs serve` shows it while pages are written.
docs: export NO_MKDOCS_2_WARNING = 1
docs: install
	$(BIN)/python -m mkdocs build --quiet

# One folder per version on the branch gh-pages, pushed: TAG=v0.1.2 is 0.1 and latest, no TAG is dev. PUSH= only commits.
TAG ?=
PUSH ?= --push
deploy-docs: install
	$(BIN)/mike deploy $(PUSH) --update-aliases $(if $(TAG),$(basename $(TAG:v%=%)) latest,dev)
	$(BIN)/mike set-default $(PUSH) $(if $(TAG),latest,$(shell git cat-file -e gh-pages:latest 2>/dev/null && echo latest || echo dev))

# What a release uploads, checked as PyPI would.
dist: install
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

wheel: install
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) dist build out .pytest_cache .mypy_cache .ruff_cache
