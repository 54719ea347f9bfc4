# Everything a user or a developer needs, each from a fresh clone with Python 3.11+, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test soak lint bench clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/roundhouse demo

test: $(READY)
	$(BIN)/python -m pytest

# The faults of a test run a thousand times over, at random moments: some twenty minutes.
soak: $(READY)
	$(BIN)/python -m pytest --soak -s tests/faults/test_rings.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/house_rules.py

bench: $(READY)
	$(BIN)/python bench/token_path.py

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
