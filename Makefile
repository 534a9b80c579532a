# make demo | test | test-short | test-full | accelerators-test | lint | bench | accelerators | readme | dist | docs |
# docs-links: each sets up a virtual environment on its first call and reuses it: .venv for `python3`, .venv-3.13 for
# `make test PYTHON=python3.13`.
ifneq ($(filter undefined file,$(origin PYTHON)),)
PYTHON := python3
VENV := .venv
else
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
endif
BIN := $(VENV)/bin
# JAX 0.10 is the newest for Python 3.11.
CONSTRAINTS := constraints/jax-$(shell $(PYTHON) -c 'import sys; print("0.10" if sys.version_info < (3, 12) else "0.12")').txt
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: demo test test-short test-full accelerators-test lint bench accelerators readme dist dist-test docs docs-links clean

demo: $(VENV)/ready
	$(BIN)/python examples/digits.py

test: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# For another series of JAX: the parts that know most of JAX, and one row of each method.
test-short: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not full and not accelerators and not long" \
		tests/moments tests/training tests/clients tests/gossip tests/package/test_hlo.py tests/laws/test_laws.py

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

# Wheel and source distribution, in dist/.
dist: $(VENV)/ready
	rm -rf dist
	$(BIN)/python -m build --no-isolation .

# The wheel, alone in an empty environment.
dist-test: dist
	rm -rf dist/venv
	$(PYTHON) -m venv dist/venv
	dist/venv/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) dist/*.whl
	cd dist && venv/bin/python -m gcjax selfcheck --devices 4

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
	$(PIP) -e '.[docs]'
	touch $@

$(VENV)/ready: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "gcjax needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[examples,test,dev]'
	touch $@

clean:
	rm -rf .venv .venv-* demo dist docs/_build docs/api/generated
