# Everything a user or a developer needs, each from a fresh clone with Python 3.11+, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DIST := dist
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ./client --editable

.PHONY: demo test test-slow test-system test-engines soak lint types bench dist clean compiled
.DELETE_ON_ERROR:

demo: $(DEMO_READY)
	$(BIN)/roundhouse demo

# The tests start hundreds of our processes. Where Python writes no bytecode by itself, each would compile all of ours.
compiled: $(READY)
	@$(BIN)/python -m compileall -q roundhouse service workers transport client/roundhouse_client tests bench

test: compiled
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not system" --ignore tests/system

# What takes long because a whole system is tried: several nodes, PostgreSQL restarted under load, a full disk, and the
# image's steps in a plain Debian root, which needs root and one package: apt-get install mmdebstrap. The checkers of
# chart, compose files and scripts are set up in the user's cache folder.
# The dashboard is tried in a browser, the board and the alerts in a real Prometheus: apt-get install chromium prometheus
test-system: compiled test-slow
	$(BIN)/python -m pytest -n 2 --dist loadfile -o faulthandler_timeout=0 tests/system

# What else takes over 2 s a test.
test-slow: compiled
	$(BIN)/python -m pytest -n 3 --dist worksteal -m system --ignore tests/system

# The faults of a test run a thousand times over, at random moments: some three hours. With
# SOAK="--soak-record FOLDER" kills of upgrades are kept there, and another run goes on after them; --soak-kills N is how
# many.
soak: compiled
	$(BIN)/python -m pytest --soak -s -o faulthandler_timeout=0 tests/faults/test_rings.py \
	  tests/faults/test_kills.py tests/faults/test_fences.py tests/faults/test_store.py tests/faults/test_breaking.py \
	  tests/faults/test_slow_commits.py tests/unit/transport/test_fuzzed_answers.py tests/faults/test_upgrade_kills.py \
	  tests/faults/test_upgrade_refused.py tests/faults/test_long_run.py \
	  tests/faults/test_decisions_over_kills.py tests/faults/test_many_models.py \
	  tests/properties/test_simulated_node.py tests/properties/test_jobs_as_specified.py \
	  tests/faults/test_sessions_over_kills.py $(SOAK)

# The engine suites against the real programs. They are set up in the user's cache folder, where every clone finds them;
# the first time builds llama-server and llama-cpp-python and brings vLLM for the CPU, with transformers, and LiteLLM:
# some twelve minutes on two cores.
test-engines: compiled
	engines="$$($(BIN)/python tests/engines/install.py)" && $(BIN)/python -m pytest -o faulthandler_timeout=600 tests/engines $$engines

lint: $(READY) types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/house_rules.py
	$(BIN)/python tools/citations.py

types: $(READY)
	$(BIN)/mypy

# The gates, each beside a rival or a bound: about three quarters of an hour. The output goes to bench/results.json, beside
# the commit, and from there to the pages. ONLY="--only token_path door" runs some gates or studies, ONLY=--studies all studies.
bench: $(READY)
	$(BIN)/python -m bench.all $(ONLY)
	$(BIN)/python -m bench.pages

# Both distributions as the package index takes them (docs/how-to/release.md).
dist: $(READY)
	rm -rf $(DIST)
	$(BIN)/python -m build --outdir $(DIST) client
	$(BIN)/python -m build --outdir $(DIST) .

clean:
	rm -rf $(VENV) .venv-3.13 $(DIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip uninstall --quiet --yes setuptools  # what is built brings its own

# What the demo runs with, and nothing that only developers need.
$(DEMO_READY): pyproject.toml client/pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Roundhouse and llama.cpp's engine into $(VENV): about half a minute, some 250 MB"
	@test $(READY) -nt pyproject.toml -a $(READY) -nt constraints.txt || $(INSTALL) .
	@touch $@

$(READY): pyproject.toml client/pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing all that developers need into $(VENV): one to three minutes, some 700 MB"
	@$(INSTALL) '.[dev]'
	@touch $@
