# Everything happens in .venv, which the first target that needs it creates. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NEWEST := .venv-newest
NEWEST_INSTALLED := $(NEWEST)/.installed
ARGS ?=

# The suite must not depend on a hub, and tokenizers warns about every fork without the second. Tiny models gain nothing
# from several threads; two processes of one thread each are faster, and do not suffer from other work on the machine.
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
WORKERS ?= 2
DOCTESTS := --doctest-modules src/verkv/estimators src/verkv/sketches
TESTS := $(DOCTESTS) tests
# What the working loop does without, beside tests marked slow: it is to take less than three minutes on two cores.
SLOW_PARTS := matrix lifecycle cuda codecs bench evaluation report experiments segments test_adapters.py \
    test_quantised_models.py estimators/test_output_bound.py
# What needs no KVPress. Files and cells that do (all presses, hybrid models) are here to be listed as skipped, with the
# reason.
NEWEST_TESTS := $(DOCTESTS) tests/estimators tests/sketches tests/cuda tests/matrix tests/lifecycle tests/presses \
    $(patsubst %,tests/test_%.py, \
    adapters attention cache context hybrid kvfetch members package quantised_models replay rotary stats tiers window)

.DEFAULT_GOAL := help
.PHONY: help setup model kvpress-tests demo test test-fast test-newest test-gpu lint format wheel clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) model  ## create .venv, install VerKV with its tools, fetch the demo model

demo: setup  ## run the demo; options in ARGS="..."
	$(BIN)/verkv demo $(ARGS)

test: setup lint kvpress-tests  ## lint, then run all tests that the machine can run; pytest options in ARGS="..."
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS) $(ARGS)

test-fast: $(INSTALLED)  ## the core's quick tests, for the working loop; the parts left out by path
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS) -m "not slow and not real_model" \
	    $(patsubst %,--ignore=tests/%,$(SLOW_PARTS)) $(ARGS)

test-newest: $(NEWEST_INSTALLED)  ## what needs no KVPress, on the newest transformers, in .venv-newest
	$(TEST_ENV) $(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(NEWEST_TESTS) $(ARGS)

test-gpu: $(INSTALLED)  ## run only the tests that need a CUDA device
	$(TEST_ENV) $(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(INSTALLED)  ## check style and format, change nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(INSTALLED)  ## sort imports, fix what ruff can fix, format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(INSTALLED)  ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

clean:  ## remove both environments, builds and caches, but not the demo model in the user's cache
	rm -rf $(VENV) $(NEWEST) .cache .pytest_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The two below ask their script each time: it returns at once when there is nothing to do.
model: $(INSTALLED)
	@$(BIN)/python -m verkv.demo_model

kvpress-tests: $(INSTALLED)
	@$(BIN)/python scripts/fetch_kvpress_tests.py

define create_environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "VerKV needs Python 3.10 or newer: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot create environments (venv or ensurepip is missing)."; \
	      echo "On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || \
	    { echo "Creating $(1)"; $(PYTHON) -m venv --clear $(1); }
endef

# The stamp is written last, so an interrupted installation is taken up again.
$(INSTALLED): pyproject.toml constraints.txt
	$(call create_environment,$(VENV))
	@echo "Installing VerKV and its tools into $(VENV), once: 1 to 10 minutes and about 2 GB with a CPU build of torch,"
	@echo "several GB more where pip's torch brings CUDA (Linux). Versions: constraints.txt"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# The newest of everything but torch, whose builds are large, and no KVPress. It stays as it is until `make clean`.
$(NEWEST_INSTALLED): pyproject.toml constraints.txt
	$(call create_environment,$(NEWEST))
	@echo "Installing VerKV with the newest transformers into $(NEWEST), once; torch as in constraints.txt"
	grep '^torch==' constraints.txt >$(NEWEST)/torch.txt
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check -c $(NEWEST)/torch.txt --upgrade \
	    torch transformers numpy tqdm hypothesis pytest pytest-xdist scipy
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	@touch $@
