# make demo: the quick start, a CartPole job that learns through the queue. make test: every test. Both set themselves up.
SHELL := /bin/bash
VENV := .venv
PYTHON := $(VENV)/bin/python
BACKEND ?= mooncake
# Tests run in three processes, as they wait a third of the time on two cores. A failed test runs once more by itself, which tells a
# flaky test from a broken one. Both fail the run.
run_tests = $(PYTHON) -m pytest -n 3 --no-loadscope-reorder --rerun-failed $(1) $(PYTEST_ARGS)
CORES := tests/unit/control tests/unit/sampler tests/unit/columns tests/unit/fabric tests/unit/operator tests/simulation
# The tests of the pure cores and units, and one integration test of each kind.
FAST := tests/unit tests/simulation tests/integration/test_roundtrip.py tests/integration/test_tq_commands.py \
  tests/integration/mooncake/test_blocks.py tests/integration/storage/test_packaged.py tests/integration/operator/test_namespaced.py
# CI measures too: before the tests, as that needs the machine alone. They run whatever it finds, and both have to pass.
ifeq ($(CI),true)
  measure = $(PYTHON) -m bench --smoke; measured=$$?;
  and_measured = && { [ $$measured = 0 ] || { echo "bench-smoke failed: see above, before the tests" >&2; exit 1; }; }
endif
ROOT_ON_LINUX := $(filter Linux-0,$(shell uname -s)-$(shell id -u))
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Some environments set it. Without compiled files, each process that imports torch spends five seconds more on its start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast compat coverage mutants fresh-machine check fmt generate lock clean setup docs pictures release-dry-run e2e rdma-test chaos simulate fuzz operator-scale bench bench-smoke bench-full soak scale

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/; s/\$$\$$/$$/g' | expand -t 16

setup: $(VENV)/.ready ## Make .venv and what it needs

$(VENV)/.ready: requirements/dev.txt requirements/uv.txt pyproject.toml scripts/setup
	@scripts/setup

demo: setup ## Run the quick start here; BACKEND=simple does it without Mooncake
	@tq up -f examples/quickstart.yaml --backend $(BACKEND) -- $(PYTHON) examples/cartpole/job.py

test: setup ## Run every test, including those of the cluster as root on Linux; PATHS="FILE ..." runs only these
ifneq ($(PATHS),)
	@$(PYTHON) -m pytest $(PATHS) $(PYTEST_ARGS)
else
ifeq ($(CI),true)
	@$(MAKE) --no-print-directory check
endif
	@$(PYTHON) -m tests.cluster build >/dev/null  # the first time 10 minutes: with its progress, and within no test's time
ifneq ($(ROOT_ON_LINUX)$(filter true,$(CI)),)
	@$(measure) $(call run_tests,) $(and_measured)
else
	@echo "tests/cluster and tests/rdma are left out: they need root on Linux"
	@$(measure) $(call run_tests,--ignore=tests/cluster --ignore=tests/rdma) $(and_measured)
endif
endif

test-fast: setup ## Run the tests of the pure cores and units, and one integration test of each kind, in 90 seconds
	@$(PYTHON) -m tests.cluster build >/dev/null
	@$(PYTHON) -m pytest -n 2 --no-loadscope-reorder -q $(FAST) $(PYTEST_ARGS)

compat: setup ## Run a client's own tests with this library and with 0.1.11; CLIENT=verl SNAPSHOT=path
	@$(PYTHON) -m tests.compat.suites $(CLIENT) $(SNAPSHOT) $(COMPAT_ARGS)

coverage: setup ## Measure the branch coverage of the pure cores by their own tests
	@$(PYTHON) -m coverage run -m pytest -q --timeout 1800 $(CORES) $(PYTEST_ARGS)  # measured, the slowest takes minutes
	@$(PYTHON) -m coverage report

mutants: setup ## Measure how many of COUNT=100 mutants of the pure cores, drawn with SEED=1, their tests kill
	@$(PYTHON) scripts/mutants $(or $(COUNT),100) $(or $(SEED),1)

check: setup ## Lint, format, types, layers, generated files
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	$(PYTHON) -m tq_operator.api.generate --check
	$(PYTHON) -m transfer_queue.runtime.metrics_page --check docs/metrics.md
	$(PYTHON) -m tests.features --check docs/architecture.md
	$(PYTHON) scripts/tutorials --check

fresh-machine: ## Run the demo in a new Debian system, as an ordinary user and as root; SUITE=trixie (Python 3.13)
	@scripts/fresh-machine $(or $(SUITE),trixie)

simulate: setup ## Histories of a queue on a virtual clock; SEEDS=10000 FIRST=1
	@TQ_SEEDS=$(or $(SEEDS),10000) TQ_FIRST_SEED=$(or $(FIRST),1) $(PYTHON) -m pytest -q -s tests/simulation $(PYTEST_ARGS)

chaos: setup ## All faults to all parts under load, in an order drawn from SEED=1; then servers are killed KILLS=50 times
	@TQ_CHAOS_ALL=1 TQ_CHAOS_SEED=$(SEED) TQ_CHAOS_ROWS=64 TQ_CHAOS_KILLS=$(or $(KILLS),5) $(PYTHON) -m pytest -q -s tests/chaos $(PYTEST_ARGS)

fmt: setup ## Format, and correct what ruff can correct
	ruff format .
	ruff check --fix .

generate: setup ## Write the generated files: CRD, values schema, list of metrics, tutorials' pages
	$(PYTHON) -m tq_operator.api.generate
	$(PYTHON) -m transfer_queue.runtime.metrics_page docs/metrics.md
	$(PYTHON) -m tests.features docs/architecture.md
	$(PYTHON) scripts/tutorials

docs: setup ## Build the documentation into site/; any warning fails
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

release-dry-run: setup ## Build wheel, source archive and the chart's package into dist/ and check them
	$(PYTHON) scripts/release

pictures: setup ## Take the pictures of the docs again, from real runs
	TQ_KEEP_PICTURES=1 $(PYTHON) -m pytest tests/integration/observability $(PYTEST_ARGS)
	PYTHONPATH=. $(PYTHON) scripts/demo_picture docs/pictures/demo.png

fuzz: setup ## Send FRAMES (default 1000000) wrong frames to real servers; they must live and stay flat
	TQ_FUZZ_FRAMES=$(or $(FRAMES),1000000) $(PYTHON) -m pytest -q -s tests/integration/security/test_fuzz_bulk.py $(PYTEST_ARGS)
	$(PYTHON) -m pytest -q tests/integration/security/test_fuzz.py $(PYTEST_ARGS)

lock: setup ## Write requirements/*.txt again from pyproject.toml; LOCK_ARGS=--upgrade moves to new versions
	$(PYTHON) scripts/lock $(LOCK_ARGS)

operator-scale: setup ## 1,000 queues and 10,000 pods against an apiserver (an hour); SCALE_ARGS="--queues 100 --pods 1000"
	@PYTHONPATH=.:operator $(PYTHON) scripts/operator_scale.py $(SCALE_ARGS)

e2e: setup ## The quick start on a real two-node cluster of this machine
	@$(PYTHON) -m pytest tests/cluster -k e2e $(PYTEST_ARGS)

rdma-test: setup ## Mooncake over real RDMA verbs, in a virtual machine with soft-RoCE devices
	@$(PYTHON) -m pytest tests/rdma $(PYTEST_ARGS)

bench: setup ## Measure against the peers, in turn; writes docs/benchmarks.md (BENCH_ARGS="--only ppo": a part)
	@$(PYTHON) -m bench $(BENCH_ARGS)

bench-full: setup ## The same with up to 8192 clients, which needs many cores and a limit of 20,000 open files
	@$(PYTHON) -m bench --long $(BENCH_ARGS)

soak: setup ## Full rate with clears, overwrites and slow readers: no wrong byte, flat memory; MINUTES=10 (SHARE=0.2: of one core)
	@$(PYTHON) -m bench.soak --minutes $(or $(MINUTES),10) --share $(or $(SHARE),0)

scale: setup ## The controller's core with 8192 virtual clients at the size of 64 nodes and 1024 GPUs
	@$(PYTHON) -m bench.scale

bench-smoke: setup ## A minute of it; fails where a ratio to the release on PyPI is below half of the recorded one
	@$(PYTHON) -m bench --smoke

clean: ## Remove what was made here, but for the shared caches
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

-include tests/cluster/cluster.mk
$(foreach target,cluster cluster-status cluster-load images,$(eval $(target): | setup))
