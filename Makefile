# make demo | test | test-full | accelerators-test | lint | bench | accelerators | readme | docs | docs-links: each sets
# up .venv on its first call and reuses it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-full accelerators-test lint bench accelerators readme docs docs-links clean

demo: $(VENV)/ready
	$(BIN)/python examples/digits.py

test: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# Every law on every row and number of workers, in shard_map and pmap. With GCJAX_TEST_OPTIMISED=1 in front, these
# targets compile as users do, which takes three times as long.
test-full: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not accelerators"

# Compiles every method for TPUs and GPUs, without having one. The first run downloads the compilers, more than 2 GB,
# into the user's cache folder; without a network the tests are skipped.
accelerators-test: $(VENV)/ready
	$(BIN)/python -m pytest -m accelerators -rs tests/accelerators

lint: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/python -m bench.step

# What the compilers for TPUs and GPUs make of training steps. Hours; continues where it stopped.
accelerators: $(VENV)/ready
	$(BIN)/python -m bench.accelerators

readme: $(VENV)/ready
	$(BIN)/python tests/support/readme_table.py

# The site, in docs/_build/html. Warnings are errors, dead links within it too. The tutorials run here, which takes some
# minutes; their output is kept in docs/_build and made again when a tutorial changes.
SPHINX = $(BIN)/python -m sphinx -W --keep-going -q docs

docs: $(VENV)/ready-docs
	rm -rf docs/api/generated
	$(SPHINX) docs/_build/html

# Whether links to other sites work: needs a network, and they may be down.
docs-links: $(VENV)/ready-docs
	$(SPHINX) docs/_build/links -b linkcheck

$(VENV)/ready-docs: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "gcjax needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,test,dev]'
	touch $@

clean:
	rm -rf $(VENV) demo docs/_build docs/api/generated
