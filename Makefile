# Everything that a user or a developer runs. `make help` lists it.
#
#   PYTHON        the interpreter that makes the virtual environment (3.11 or newer)
#   VENV          where that environment lives
#   CUDA          JAX's CUDA wheels for `make mnist`: cuda12, cuda13, or empty for none;
#                 found by asking the driver
#   MNIST_FLAGS   more flags for examples/mnist/train.py: make mnist MNIST_FLAGS=--epochs=1
#   PYTEST_FLAGS  more flags for pytest:  make test PYTEST_FLAGS="-m 'not slow' -x"
#   BENCH         which benchmarks to run

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\(1[23]\)\..*/cuda\1/p')
BENCH ?= $(filter-out %/__init__.py %/gpu_check.py,$(wildcard benchmarks/*.py))

comma := ,
MNIST_EXTRAS := examples$(if $(strip $(CUDA)),$(comma)$(strip $(CUDA)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help mnist test lint lint-code lint-format lint-types format bench dev clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

mnist: $(VENV)/.installed-$(MNIST_EXTRAS)  ## train MNIST on every local device and print the test accuracy
	$(BIN)/python examples/mnist/train.py --strategy=mirrored $(MNIST_FLAGS)

test: $(VENV)/.installed-test  ## run the whole test suite
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: lint-code lint-format lint-types  ## check code, format and types

lint-code: $(VENV)/.installed-lint
	$(BIN)/ruff check

lint-format: $(VENV)/.installed-lint
	$(BIN)/ruff format --check

lint-types: $(VENV)/.installed-lint
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-lint  ## repair what ruff can repair
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.installed-test  ## run the benchmarks
	@set -e; for script in $(BENCH); do echo "== $$script"; $(BIN)/python "$$script"; done

dev: $(VENV)/.installed-dev  ## install every tool and the pre-commit hooks
	$(BIN)/pre-commit install

clean:  ## remove the virtual environment, caches and build products
	rm -rf "$(VENV)" build dist .pytest_cache .ruff_cache .hypothesis
	find distrib examples tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# One stamp for each set of extras: a changed pyproject.toml installs again.
$(VENV)/.installed-%: pyproject.toml $(VENV)/.created
	@echo "Installing distrib[$*] into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch "$@"

# The stamp comes last, so that an environment whose making was interrupted is made again.
$(VENV)/.created:
	@$(PYTHON) -c "" 2>/dev/null || \
	  { echo "distrib needs Python 3.11 or newer, and '$(PYTHON)' does not run: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "distrib needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv "$(VENV)"
	@touch "$@"
