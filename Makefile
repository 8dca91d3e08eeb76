# SPDX-License-Identifier: Apache-2.0
# Each target makes the virtual environment that it needs. BUILD=cuda takes the CUDA build of vLLM.

BUILD ?= cpu
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
# The demo runs two ranks: on GPUs where there are two, or else one on each of two CPU cores.
DEMO_BUILD ?= $(if $(filter-out 0 1,$(GPUS)),cuda,cpu)

VENV_cpu := .venv
VENV_cuda := .venv-cuda
VENV := $(VENV_$(BUILD))

# A stamp is named after the content that it stands for. The package is installed once for each of
# its top folders, so a new one asks for a new install.
REQUIREMENTS := tools/venv.sh tools/requirements-dev.txt tools/cpu_trial/requirements.txt
PACKAGES := pyproject.toml $(wildcard tools/cpu_trial/*.toml tools/cpu_trial/*/*.py)
FOLDERS := $(sort $(dir $(shell find vllm -path '*/pcp/__init__.py')))
checksum = $(firstword $(shell (cat $(1); echo $(2)) | cksum))
VLLM := .vllm-$(call checksum,$(REQUIREMENTS),$(PYTHON))
READY := .ready-$(call checksum,$(REQUIREMENTS) $(PACKAGES),$(PYTHON) $(FOLDERS))

.PHONY: help venv demo test lint types pytest wheel clean

help:
	@echo 'make demo    one model, one prompt, P = 1 and P = 2: the same answer, and how fast'
	@echo 'make test    lint, types, tests'
	@echo 'make venv    the virtual environment that the others use'
	@echo 'make lint | types | pytest ARGS="-k layout" | wheel | clean'

venv: $(VENV)/$(READY)

%/$(VLLM):
	@tools/venv.sh $(if $(filter $(VENV_cuda),$*),cuda,cpu) $*
	@touch $@

%/$(READY): %/$(VLLM)
	@echo 'Installing this package, editable'
	@$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps --no-build-isolation --force-reinstall \
	    $(if $(filter $(VENV_cpu),$*),./tools/cpu_trial) --editable .
	@rm -f $*/.ready-*
	@touch $@

.PRECIOUS: %/$(VLLM)

demo: $(VENV_$(DEMO_BUILD))/$(READY)
	@$(VENV_$(DEMO_BUILD))/bin/python examples/demo/demo.py $(ARGS)

test: lint types pytest

lint: $(VENV)/$(READY)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

types: $(VENV)/$(READY)
	$(VENV)/bin/mypy

pytest: $(VENV)/$(READY)
	$(VENV)/bin/python -m pytest $(ARGS)

wheel: $(VENV)/$(READY)
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info tools/cpu_trial/build tools/cpu_trial/*.egg-info
