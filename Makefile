SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= $(shell nproc)
TORCH := torch==2.13.0
# What is tested without all that it asks for: that would pull another torch, or what no test needs.
ALONE := torchtitan==0.3.0 tyro docstring-parser typeguard
BIN := .venv/bin

PACKAGE := $(shell find datastates providers adapters native/include native/src native/bindings \
             \( -name __pycache__ -o -name '*.so' \) -prune -o -print)
HEADERS := $(shell find native -name '*.hpp')
SOURCES := $(shell find native benchmarks -name '*.cpp')
TIDY := $(patsubst native/src/%.cpp,build/tidy/%.ok,$(filter native/src/%,$(SOURCES)))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

.PHONY: test
test: lint native-test sanitize python-test ## Everything that must pass: lint, C++ plain and sanitized, Python

.PHONY: demo
demo: .venv/installed ## Train, be killed in the middle of a checkpoint, and resume bit for bit
	$(BIN)/python docs/examples/gpt.py

# --- set-up ------------------------------------------------------------------------------------------------

# torch first and alone: a requirement further down must not choose another one.
.venv/base: Makefile .ci/setup-system
	.ci/setup-system $(PYTHON)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet 'setuptools>=77.0.3' 'pybind11>=2.12'
	touch $@

# A regular install, for the tests and mypy see what a user gets. Folders are among PACKAGE: their time changes
# when a file goes. What is compiled stays in build/.
.venv/installed: .venv/base pyproject.toml setup.py $(PACKAGE)
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-build-isolation '.[dev]'
	$(BIN)/pip install --quiet --no-deps $(ALONE)
	touch $@

# --- checks ------------------------------------------------------------------------------------------------

.PHONY: lint
lint: .venv/installed ## ruff, clang-format, clang-tidy, mypy, stubtest; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(HEADERS) $(SOURCES)
	$(MAKE) --no-print-directory --keep-going --output-sync -j$(JOBS) $(TIDY)
# From a folder of its own, where the installed package is not hidden by the source folder of its name.
	mkdir -p build/mypy
	cd build/mypy && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p datastates
	cd build/mypy && ../../$(BIN)/stubtest --mypy-config-file ../../pyproject.toml \
	    --allowlist ../../.ci/stubtest-allowlist datastates._native
	cd benchmarks && MYPYPATH=. ../$(BIN)/mypy --cache-dir ../build/mypy/benchmarks --config-file ../pyproject.toml \
	    run.py report.py suite.py deepspeed_loop.py megatron_loop.py peers/*.py

build/tidy/%.ok: native/src/%.cpp $(HEADERS) .clang-tidy build/plain/compile_commands.json
	$(BIN)/clang-tidy --quiet -p build/plain $<
	mkdir -p $(@D) && touch $@

.PHONY: format
format: .venv/installed ## Format Python and C++ in place
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(HEADERS) $(SOURCES)

# Three parts that take equally long, at once: all of them wait at times, for processes to start or to end.
PART_1 := $(wildcard $(addprefix tests/,crash deepspeed))
PART_2 := $(wildcard $(addprefix tests/,dcp lightning megatron torchtitan transformers))

.PHONY: python-test python-test-1 python-test-2 python-test-rest
python-test: .venv/installed ## The Python tests, against the installed package
	$(MAKE) --no-print-directory --output-sync=target -j3 python-test-1 python-test-2 python-test-rest

python-test-1: .venv/installed
	$(BIN)/pytest $(PART_1)

python-test-2: .venv/installed
	$(BIN)/pytest $(PART_2)

python-test-rest: .venv/installed
	$(BIN)/pytest $(addprefix --ignore=,$(PART_1) $(PART_2))

.PHONY: native-test
native-test: ctest-plain ## The C++ tests

.PHONY: sanitize
sanitize: ctest-asan ctest-tsan ## The C++ tests under AddressSanitizer with UBSan, and under ThreadSanitizer

SANITIZE_asan := address;undefined
SANITIZE_tsan := thread
# The sanitizers of older compilers cannot place their shadow memory under every kernel's randomization.
FIXED_ADDRESSES := $(shell setarch "$$(uname -m)" -R true 2>/dev/null && echo 'setarch $(shell uname -m) -R')

.PHONY: ctest-plain ctest-asan ctest-tsan
ctest-plain ctest-asan ctest-tsan: ctest-%: build/%/compile_commands.json
	$(BIN)/cmake --build build/$*
	$(FIXED_ADDRESSES) $(BIN)/ctest --test-dir build/$* --output-on-failure -j$(JOBS)

build/%/compile_commands.json: native/CMakeLists.txt | .venv/installed
	$(BIN)/cmake -S native -B build/$* -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DDATASTATES_SANITIZE='$(SANITIZE_$*)'
	touch $@

# --- benchmarks --------------------------------------------------------------------------------------------

# The archive where there is one, so that the program runs on a machine without liburing.
URING = $(or $(filter /%,$(shell $(CXX) -print-file-name=liburing.a)),-luring)

build/raw_io: benchmarks/raw_io.cpp
	.ci/setup-system $(PYTHON)
	mkdir -p $(@D)
	$(CXX) -std=c++20 -O2 -Wall -Wextra -Wpedantic -Werror -D_GNU_SOURCE -o $@ $< $(URING) -pthread

.PHONY: bench
bench: .venv/installed build/raw_io ## Measure saving and restoring beside every peer; makes docs/benchmarks.md
	mkdir -p docs/benchmarks
	$(BIN)/python benchmarks/run.py cpu --json docs/benchmarks/cpu.json
	$(BIN)/python benchmarks/report.py docs/benchmarks

.PHONY: bench-gpu
bench-gpu: .venv/installed build/raw_io ## The same with a GPU
	mkdir -p docs/benchmarks
	$(BIN)/python benchmarks/run.py gpu --json docs/benchmarks/gpu.json
	$(BIN)/python benchmarks/report.py docs/benchmarks

.PHONY: bench-scale
bench-scale: .venv/installed ## Measure and simulate 16,384 ranks; makes docs/scale.md
	mkdir -p docs/benchmarks
	$(BIN)/python benchmarks/run.py scale --repeat 3 --json docs/benchmarks/scale.json
	$(BIN)/python benchmarks/report.py docs/benchmarks

# --- packaging ---------------------------------------------------------------------------------------------

.PHONY: wheel
wheel: ## Build dist/*.whl for PYTHON (default python3), self-contained
	.ci/build-wheel $(PYTHON)

.PHONY: clean
clean: ## Remove all that make made
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
