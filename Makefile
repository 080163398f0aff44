# `make` alone lists the targets. Nothing here needs root, a GPU, clang, cmake or Docker (but for test-container).

HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
MODEL_REPO ?=
MODEL ?=
TRITONSERVER ?=
PREFIX ?= build/backends
PYTHON ?= python3
IMAGE ?=
TESTS ?= tests
NAME ?= sentiment
PERF ?= --concurrency-range 1:4
ROUNDS ?= 5
SECONDS ?= 2

PY := .venv/bin/python
BENCH_PY := .venv-bench/bin/python
BENCH_DEPS := .venv-bench/.requirements-installed
DEPS := .venv/.requirements-installed
TARGET := $(or $(CARGO_TARGET_DIR),target)
LIBRARY := libtriton_rust.so
# The name that Triton looks for, beside the backend.
BATCHER := batchstrategy.so
# Only models with a model.onnx open it.
ONNXRUNTIME := libonnxruntime.so
CARGO ?= cargo
export HTTP_PORT GRPC_PORT METRICS_PORT TRITONSERVER

# Any failing line of a recipe ends it; recipes that run a server must not be run in parallel.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

heading = @printf '\n==== %s ====\n' '$(1)'

.PHONY: help
help: ## Show this list
	@printf 'Targets:\n'
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  %-14s %s\n", $$1, $$2 }'
	@printf '\nVariables (make serve HTTP_PORT=9000):\n'
	@printf '  %-14s %s\n' \
	    HTTP_PORT     'port for HTTP on 127.0.0.1 ($(HTTP_PORT))' \
	    GRPC_PORT     'port for gRPC on 127.0.0.1 ($(GRPC_PORT))' \
	    METRICS_PORT  'port for metrics on 127.0.0.1 ($(METRICS_PORT))' \
	    MODEL         'a Hugging Face directory to serve instead of the examples' \
	    MODEL_REPO    'a Triton model repository to serve instead of the examples' \
	    TRITONSERVER  'a tritonserver binary (default: the one in .venv)' \
	    PREFIX        'where install lays rust/ ($(PREFIX))' \
	    IMAGE         'the image of test-container, nvcr.io/nvidia/tritonserver:<yy.mm>-py3' \
	    TESTS         'what test-served runs ($(TESTS))' \
	    NAME          'of perf: the model ($(NAME))' \
	    PERF          'of perf: arguments of perf_analyzer ($(PERF))' \
	    ROUNDS        'of bench-served: how often everybody is measured ($(ROUNDS))' \
	    SECONDS       'of bench-served: how long each time ($(SECONDS))'

.PHONY: deps
deps: $(DEPS) ## Set up .venv with what building and testing needs (pinned)

$(DEPS): requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo 'python3 is needed (3.10 to 3.12, with venv)' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 12) or sys.exit("Python 3.10 to 3.12 is needed, this is %d.%d: make PYTHON=python3.12" % v)'
	@test -x $(PY) || { echo 'Creating .venv'; $(PYTHON) -m venv .venv; }
	@echo 'Installing requirements.txt into .venv (about 300 MB to download the first time)'
	@$(PY) -m pip install --disable-pip-version-check --progress-bar off --no-deps -r requirements.txt \
	    | sed -n 's/^Collecting /  /p'
	@touch $@

.PHONY: build
build: deps ## Compile the backend and its batching library, release profile
	$(CARGO) build --release --locked -p triton-rust -p batchstrategy

.PHONY: install
install: build ## Lay PREFIX/rust/, for --backend-directory=PREFIX or /opt/tritonserver/backends
	@install -D -m 755 $(TARGET)/release/$(LIBRARY) $(PREFIX)/rust/$(LIBRARY)
	@install -D -m 755 $(TARGET)/release/libbatchstrategy.so $(PREFIX)/rust/$(BATCHER)
	@install -D -m 755 .venv/lib/python3*/site-packages/onnxruntime/capi/libonnxruntime.so.* $(PREFIX)/rust/$(ONNXRUNTIME)
	@echo 'Installed $(PREFIX)/rust/$(LIBRARY), $(BATCHER) and $(ONNXRUNTIME)'

.PHONY: models
models: deps ## Assemble the example model repository in build/model_repo
	@$(PY) scripts/assemble_models.py --out build/model_repo

# With MODEL= or MODEL_REPO= the examples are not needed.
.PHONY: serve
serve: install $(if $(MODEL)$(MODEL_REPO),,models) ## Serve the models on 127.0.0.1; Ctrl-C stops
	@$(PY) scripts/serve.py --backends $(PREFIX) \
	    $(if $(MODEL),--model '$(MODEL)',--model-repo '$(or $(MODEL_REPO),build/model_repo)')

.PHONY: demo
demo: deps ## Send a few texts to the server that `make serve` runs in another terminal
	@$(PY) scripts/demo.py

# All that perf_analyzer takes: make perf NAME=windows_stream PERF='-i grpc --streaming'
.PHONY: perf
perf: deps ## NVIDIA's perf_analyzer on the running server (NAME=sentiment PERF='--concurrency-range 1:4')
	@$(PY) scripts/perf_analyzer.py -m '$(NAME)' $(PERF)

.PHONY: check
check: deps ## Formatting, lints and documentation, warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS='-D warnings -A rustdoc::private-intra-doc-links' $(CARGO) doc --workspace --no-deps --document-private-items --locked

.PHONY: test-rust
test-rust: deps ## The tests that need no server
	$(CARGO) test --workspace --locked
	@$(MAKE) --no-print-directory check-kernels

.PHONY: check-kernels
check-kernels: deps ## The CUDA kernels' registers, shared memory and occupancy; spilled registers are an error
	$(CARGO) test --locked --test cuda_kernel_code -- --nocapture

.PHONY: test-cuda
test-cuda: install ## What tests the CUDA engine, alone, on a software device: no GPU is needed
	$(CARGO) test --locked -p cuda-device
	$(CARGO) test --locked --test cuda_kernels --test cuda_engine
	@$(MAKE) --no-print-directory check-kernels
	@BACKENDS='$(PREFIX)' $(PY) -m pytest -q tests/served/test_software_device.py tests/served/test_cuda.py tests/cuda/test_gpu_bundle.py

.PHONY: test-served
test-served: install models ## The Python tests, in the real tritonserver (TESTS=tests/served/test_errors.py)
	@BACKENDS='$(PREFIX)' $(PY) -m pytest -q --durations=10 $(TESTS)

.PHONY: test
test: ## Everything, from a clean clone
	$(call heading,Dependencies)
	@$(MAKE) --no-print-directory deps
	$(call heading,Formatting and lints)
	@$(MAKE) --no-print-directory check
	$(call heading,Rust tests)
	@$(MAKE) --no-print-directory test-rust
	$(call heading,Release build)
	@$(MAKE) --no-print-directory install
	$(call heading,Tests in the real tritonserver)
	@$(MAKE) --no-print-directory test-served
	$(call heading,All passed)

# Needs Docker and the image, so it does not run in this project's CI, and has not been run there.
.PHONY: test-container
test-container: install models ## The served tests against IMAGE=nvcr.io/nvidia/tritonserver:<yy.mm>-py3 (needs Docker)
	@scripts/test_container.sh '$(IMAGE)' '$(PREFIX)' '$(PY)'

.PHONY: bench
bench: ## The engine alone, then served beside its rivals (about 15 minutes; wants an idle machine)
	$(call heading,Engine alone)
	@$(MAKE) --no-print-directory bench-engine
	$(call heading,Served)
	@$(MAKE) --no-print-directory bench-served

.PHONY: bench-engine
bench-engine: deps ## Tokens/s of the engine alone, and the share of the measured peak
	$(CARGO) bench --locked --bench engine

# The rivals run in a Python of their own, beside the packages that build and test.
$(BENCH_DEPS): benches/requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 12) or sys.exit("The rivals need Python 3.11 or 3.12, this is %d.%d: make PYTHON=python3.12" % v)'
	@test -x $(BENCH_PY) || { echo 'Creating .venv-bench'; $(PYTHON) -m venv .venv-bench; }
	@echo 'Installing benches/requirements.txt into .venv-bench (about 200 MB to download the first time)'
	@$(BENCH_PY) -m pip install --disable-pip-version-check --progress-bar off --no-deps -r benches/requirements.txt \
	    | sed -n 's/^Collecting /  /p'
	@touch $@

.PHONY: bench-served
bench-served: install $(BENCH_DEPS) ## Our backend and six rivals in one tritonserver (ROUNDS=5 SECONDS=2, about 11 minutes)
	$(CARGO) build --release --locked -p load
	@$(BENCH_PY) benches/served.py --backends '$(PREFIX)' --load $(TARGET)/release/load \
	    --rounds $(ROUNDS) --seconds $(SECONDS)

# The kernels' and the engine's tests, and a benchmark, for a machine with a GPU: see benches/README.md.
GPU_BUNDLE := build/gpu-bundle

.PHONY: gpu-bundle
gpu-bundle: install ## Lay build/gpu-bundle: GPU tests and benchmark for a machine without Rust or a network
	@$(PY) scripts/gpu_bundle.py --out $(GPU_BUNDLE) --libraries '$(PREFIX)/rust' --portable

.PHONY: need-gpu
need-gpu: deps
	@$(PY) scripts/gpu_bundle.py --need-gpu

.PHONY: test-gpu
test-gpu: need-gpu install ## The GPU tests on this machine's GPU (PYTHON=... has torch, for the oracle)
	@$(PY) scripts/gpu_bundle.py --out $(GPU_BUNDLE) --libraries '$(PREFIX)/rust'
	@PYTHON='$(PYTHON)' SCRATCH='$(CURDIR)/build/gpu-scratch' $(GPU_BUNDLE)/run.sh test

.PHONY: bench-gpu
bench-gpu: need-gpu install ## BERT-base, BERT-large and MiniLM on this machine's GPU, beside PyTorch (PYTHON=... has torch)
	@$(PY) scripts/gpu_bundle.py --out $(GPU_BUNDLE) --libraries '$(PREFIX)/rust'
	@PYTHON='$(PYTHON)' SCRATCH='$(CURDIR)/build/gpu-scratch' RESULTS='$(CURDIR)/benches/results' $(GPU_BUNDLE)/run.sh bench

.PHONY: clean
clean: ## Remove what was built (keeps .venv and .venv-bench)
	$(CARGO) clean
	rm -rf build
