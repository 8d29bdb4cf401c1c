# make demo and make test need Python 3.11+ and make; the rest comes into .venv. With an NVIDIA driver they take the CUDA
# builds of JAX and PyTorch and use the GPU; ACCEL=cpu leaves the GPU alone.

PYTHON ?= python3
VENV ?= .venv
ifndef ACCEL
ACCEL := $(shell $(PYTHON) tests/accelerator.py)
endif
WORKERS ?= 4
ARGS ?=

# The one place that pins what the tests run on without a GPU. The triton that belongs to this torch is $(TRITON).
TORCH := 2.13.0
TRITON := 3.7.1
# Those of `make test-versions`, each Triton with a PyTorch: the lowest that pyproject.toml allows, and the newest.
TRITON_LOWEST := 3.6.0
TRITON_NEWEST := 3.9.0
TORCH_LOWEST := 2.10.0

# PyPI's torch brings gigabytes of CUDA, PyTorch's own index has the CPU build; where that cannot be reached, pip's
# configured index decides. Installed first: what depends on torch later finds it there.
define install_cpu_torch
$(1)/bin/pip install -q --no-deps --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu torch==$(2) \
	|| echo "no CPU build from download.pytorch.org: taking torch from the configured index"
$(1)/bin/pip install -q torch==$(2) triton==$(3)
endef

ifeq ($(ACCEL),cpu)
export CUDA_VISIBLE_DEVICES =
SECOND_RUN := compile_only
else
COMMA := ,
WITH_CUDA := $(COMMA)$(ACCEL)
WITH_TORCH := $(COMMA)torch-$(ACCEL)
SECOND_RUN := interpret
endif

DEMO := $(VENV)/.installed-demo-$(ACCEL)
TEST := $(VENV)/.installed-test-$(ACCEL)
LATEST = $(VENV)-latest-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PYTEST := -m pytest -n logical --maxprocesses $(WORKERS) $(ARGS)

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxrnn needs Python 3.11+; name one: make PYTHON=python3.12 ...")'

.PHONY: help demo test test-all wheel stress lint format types docs test-versions test-latest resolve clean
.DEFAULT_GOAL := help

help:
	@echo "make demo           train a recurrent PPO agent, print a table, draw its learning curve (DEMO_ARGS=\"...\")"
	@echo "make test           run the quick tests, some minutes: every cell, time loop and front once (ARGS=\"-k gru\")"
	@echo "make test-all       run these and all other tests, some 40 minutes"
	@echo "make lint           ruff: lint and format, check only"
	@echo "make format         ruff: fix and format"
	@echo "make types          mypy"
	@echo "make docs           build the site of the documentation into outputs/site; a broken link is an error"
	@echo "make wheel          build a wheel into dist, with the native launch for the versions of jaxlib in tools/jaxlib.txt"
	@echo "make stress         run the tests that load a GPU for minutes: launches, threads, streams, failures"
	@echo "make test-versions  run the tests on triton $(TRITON_LOWEST) with torch $(TORCH_LOWEST), and on triton $(TRITON_NEWEST)"
	@echo "make test-latest    run the tests that need no torch on the newest JAX and Flax for PYTHON=$(PYTHON), 3.12 or newer"
	@echo "make resolve        ask pip whether the CUDA extras resolve in one environment"
	@echo "make clean          remove $(VENV) and those beside it, dist and caches; outputs stays"
	@echo "this machine: ACCEL=$(ACCEL)"

demo: $(DEMO)
	$(VENV)/bin/python examples/recurrent_ppo.py $(DEMO_ARGS)

# Triton compiles or interprets for a whole process, so the tests that need the other way run in a second one.
define run_part
$(VENV)/bin/python $(PYTEST) --part $(1) $(if $(ARGS),|| [ $$? -eq 5 ]) # 5: ARGS chose none of them
$(VENV)/bin/python $(PYTEST) --part $(1) -m $(SECOND_RUN) $(if $(ARGS),|| [ $$? -eq 5 ])
endef

test: $(TEST)
	$(call run_part,quick)

test-all: test
	$(call run_part,rest)

lint: $(TEST)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(TEST)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(TEST)
	$(VENV)/bin/mypy

docs: $(TEST)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo "open outputs/site/index.html, or run $(VENV)/bin/mkdocs serve"

# The handler has the binary interface of this machine's C library, which the wheel's tag names.
wheel: $(TEST)
	$(VENV)/bin/python tools/prebuild_launch.py
	rm -rf dist
	$(VENV)/bin/hatchling build -t wheel
	$(VENV)/bin/wheel tags --remove --platform-tag $$($(VENV)/bin/python -c \
		'import platform; print("manylinux_%s_%s" % (platform.libc_ver()[1].replace(".", "_"), platform.machine()))') dist/*.whl
	rm -r jaxrnn/_bridge/native/prebuilt

stress: $(TEST)
	$(VENV)/bin/python -m pytest -m stress $(ARGS)

test-versions: $(VENV)-triton-$(TRITON_LOWEST)/.installed $(VENV)-triton-$(TRITON_NEWEST)/.installed
	for version in $(TRITON_LOWEST) $(TRITON_NEWEST); do \
		echo "triton $$version"; \
		CUDA_VISIBLE_DEVICES= $(VENV)-triton-$$version/bin/python $(PYTEST) || exit 1; \
		CUDA_VISIBLE_DEVICES= $(VENV)-triton-$$version/bin/python $(PYTEST) -m compile_only || exit 1; \
	done

# Without PyTorch and Triton. Each Python has its own environment, and each run takes what is newest then.
test-latest:
	@$(CHECK_PYTHON)
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 12) and print("Python 3.11 ends at JAX 0.10, which is what this run takes.", \
		"For the newest name a newer one: make test-latest PYTHON=python3.12")'
	$(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/pip install -q --upgrade pip
	$(LATEST)/bin/pip install -q --upgrade --upgrade-strategy eager -e '.[test]'
	CUDA_VISIBLE_DEVICES= $(LATEST)/bin/python $(PYTEST)

resolve: $(VENV)/bin/pip
	$(VENV)/bin/python tests/resolve_extras.py

clean:
	rm -rf $(VENV) $(VENV)-triton-* $(VENV)-latest-* .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/pip:
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --upgrade pip

$(DEMO): pyproject.toml | $(VENV)/bin/pip
	@echo "Installing jaxrnn for $(ACCEL) into $(VENV)"
	$(VENV)/bin/pip install -q -e '.[examples$(WITH_CUDA)]'
	touch $@

$(TEST): pyproject.toml Makefile | $(VENV)/bin/pip
	@echo "Installing jaxrnn and its tests for $(ACCEL) into $(VENV)"
ifeq ($(ACCEL),cpu)
	$(call install_cpu_torch,$(VENV),$(TORCH),$(TRITON))
endif
	$(VENV)/bin/pip install -q -e '.[dev$(WITH_TORCH)]'
	touch $@

# NumPy 2.4 turned what Triton 3.6's interpreter does with loop bounds into an error.
$(VENV)-triton-%/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)-triton-$*
	$(VENV)-triton-$*/bin/pip install -q --upgrade pip
	$(call install_cpu_torch,$(VENV)-triton-$*,$(if $(filter $(TRITON_LOWEST),$*),$(TORCH_LOWEST),$(TORCH)),$*)
	$(VENV)-triton-$*/bin/pip install -q -e '.[test-torch]' $(if $(filter 3.6.%,$*),'numpy<2.4')
	touch $@
