# make demo: the quick start, a CartPole job that learns through the queue. make test: every test. Both set themselves up.
SHELL := /bin/bash
VENV := .venv
PYTHON := $(VENV)/bin/python
BACKEND ?= mooncake
ROOT_ON_LINUX := $(filter Linux-0,$(shell uname -s)-$(shell id -u))
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help chaos simulate demo test check fmt generate lock clean setup e2e bench bench-smoke

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.ready ## Make .venv and what it needs

$(VENV)/.ready: requirements/dev.txt requirements/uv.txt pyproject.toml scripts/setup
	@scripts/setup

demo: setup ## Run the quick start here; BACKEND=simple does it without Mooncake
	@tq up -f examples/quickstart.yaml --backend $(BACKEND) -- $(PYTHON) examples/cartpole/job.py

test: setup ## Run every test; the cluster's too where this is root on Linux
ifeq ($(CI),true)
	@$(MAKE) --no-print-directory check
endif
ifneq ($(ROOT_ON_LINUX)$(filter true,$(CI)),)
	@$(PYTHON) -m pytest $(PYTEST_ARGS)
else
	@echo "tests/cluster is left out: it needs root on Linux"
	@$(PYTHON) -m pytest --ignore=tests/cluster $(PYTEST_ARGS)
endif

check: setup ## Lint, format, types, layers, generated files
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	$(PYTHON) -m tq_operator.api.generate --check

simulate: setup ## Histories of a queue on a virtual clock; SEEDS=10000 FIRST=1
	@TQ_SEEDS=$(or $(SEEDS),10000) TQ_FIRST_SEED=$(or $(FIRST),1) $(PYTHON) -m pytest -q -s tests/simulation $(PYTEST_ARGS)

chaos: setup ## Kill servers under load; KILLS=50 times each
	@TQ_CHAOS_KILLS=$(or $(KILLS),50) $(PYTHON) -m pytest -q -s tests/chaos $(PYTEST_ARGS)

fmt: setup ## Format and mend what can be mended
	ruff format .
	ruff check --fix .

generate: setup ## Write the generated files: CRD, values schema
	$(PYTHON) -m tq_operator.api.generate

lock: setup ## Write requirements/*.txt anew from pyproject.toml; LOCK_ARGS=--upgrade moves to new versions
	$(PYTHON) scripts/lock $(LOCK_ARGS)

e2e: setup ## The quick start on a real two-node cluster of this machine
	@$(PYTHON) -m pytest tests/cluster -k e2e $(PYTEST_ARGS)

bench: setup ## Measure against the peers, in turn; writes docs/benchmarks.md (BENCH_ARGS="--only ppo": a part)
	@$(PYTHON) -m bench $(BENCH_ARGS)

bench-smoke: setup ## A minute of it: prints how many times better than the release on PyPI
	@$(PYTHON) -m bench --smoke

clean: ## Remove what was made here, but for the shared caches
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

-include tests/cluster/cluster.mk
$(foreach target,cluster cluster-status cluster-load images,$(eval $(target): | setup))
