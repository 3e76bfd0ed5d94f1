# Two commands: `make demo` and `make test`. Everything they need is made in .venv/ and in the cache
# ($XDG_CACHE_HOME/kvguard, ~/.cache/kvguard by default); nothing is made twice.
#
# Another interpreter: make PYTHON=/path/to/python3.12 …

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvguard-setup

# An environment that was moved with its clone, or whose Python is gone, is made anew.
ifneq ($(wildcard $(STAMP)),)
ifneq ($(shell $(BIN)/python -c 'print(open("$(STAMP)").read().strip())' 2>/dev/null),$(CURDIR))
$(shell rm -rf $(VENV))
endif
endif

.DELETE_ON_ERROR:
.PHONY: help setup engine tools demo serve test test-long bench lint clean

help:
	@echo "make demo       set up the CPU engine and the model, then show the main job on a checkpoint with a trap"
	@echo "make serve      the same, and leave it running on port 8000"
	@echo "make test       linters, types and all tests, those on a real engine included"
	@echo "make test-long  the tests that need longer, in full"
	@echo "make bench      what the hop and what shadow probes cost clients, as ratios in one run each"
	@echo "make lint       linters and types only"
	@echo "make setup      kvguard's own environment, .venv"
	@echo "make engine     the CPU engines (vLLM 0.32.0 and 0.27.1), the model and its variants, in the cache"
	@echo "make tools      helm, kubectl, Prometheus, Alertmanager and hadolint for the tests of what is deployed, in the cache"
	@echo "make clean      remove .venv and what tools left in the tree; the cache stays"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvguard needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments (no ensurepip): on Debian or Ubuntu, apt install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@echo '$(CURDIR)' > $@

engine: setup
	@$(BIN)/kvguard demo setup --if-supported
	@$(BIN)/kvguard demo setup --if-supported --engine-version 0.27.1

tools: setup
	@$(BIN)/python tests/deploy/toolbox.py

demo: setup
	@$(BIN)/kvguard demo setup
	@$(BIN)/kvguard demo run

serve: setup
	@$(BIN)/kvguard demo setup
	@$(BIN)/kvguard demo serve

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python deploy/generate --check

test: lint engine tools
	$(BIN)/pytest -m 'not long' -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term

test-long: engine
	$(BIN)/pytest -m long

bench: engine
	$(BIN)/python tests/bench/data_plane.py
	$(BIN)/python tests/bench/real_engine.py
	$(BIN)/python tests/bench/shadow_impact.py
	@$(BIN)/python tests/bench/musts.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
