# On a new machine, run `make quickstart` and `make test`.
VENV ?= .venv
PYTHON_IN_VENV = $(VENV)/bin/python
export VENV
# Containers often set this variable. Every process would then recompile torch and Megatron, which takes 8 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart test test-fast test-all test-versions test-slurm test-serving test-bridge test-automodel test-upstream release-check gpu-run gpu-check gpu-bench docs lint

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s:

setup: ## Create .venv with pinned versions, if they changed
	@tools/bootstrap.sh

quickstart: setup ## Train, convert and inspect a small model on the CPU (ARGS="--variant ...")
	@$(VENV)/bin/kha-megatron quickstart $(ARGS)

# Run two test files at a time. A test starts up to four ranks of its own.
PYTEST = $(PYTHON_IN_VENV) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
WORKERS ?= 2

test: setup lint ## Run the tests that need no GPU (ARGS="tests/mcore -k split")
	@$(PYTEST) $(ARGS)

test-fast: setup lint ## Run one test per claim, 3 minutes
	@$(PYTEST) -m fast $(ARGS)

test-all: setup lint ## Run all test cases and write the tables of benchmarks/
	@$(PYTEST) --whole --parallelism-table=benchmarks/parallelism.md --faults-table=benchmarks/faults.md $(ARGS)

test-versions: setup ## Test the newest and the oldest versions of dependencies (ARGS=newest)
	@tools/test_versions.sh $(ARGS)

test-slurm: setup ## Train on three Slurm nodes on this machine, which fail (root, Debian)
	@tools/test_slurm.sh --nodes-table=benchmarks/faults.md $(ARGS)

test-serving: setup ## Serve exported models with vLLM, installed into .venv-serving
	@tools/test_serving.sh

test-upstream: setup ## Test a source tree of Megatron-LM (MEGATRON=~/Megatron-LM), 20 minutes
	@$(if $(MEGATRON),,$(error Set MEGATRON to a source tree of Megatron-LM))$(PYTHON_IN_VENV) tools/upstream.py $(MEGATRON)
	@PYTHONPATH=$(MEGATRON) $(PYTEST) $(or $(ARGS),tests/mcore tests/distributed tests/training/test_engine.py)

test-bridge: setup ## Test Megatron-Bridge with our models, in .venv-bridge
	@tools/test_bridge.sh

test-automodel: setup ## Fine-tune our models with NeMo AutoModel, in .venv-automodel
	@tools/test_automodel.sh

release-check: setup ## Install and use the wheel and the source distribution in new environments
	@tools/release_check.sh

# These do not depend on `setup`: they use the active environment, or PYTHON, which should be the one that trains.
PYTHON ?= python3
GPU = $(PYTHON) -c 'from importlib.util import find_spec; \
	missing = [name for name in ("torch", "megatron", "pytest") if not find_spec(name)]; \
	missing and exit(f"error: $(PYTHON) lacks {missing}. Activate the environment that trains or set PYTHON.")' \
	&& PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) tools/gpu.py

gpu-run: ## Answer the open questions on a GPU, 13 minutes; start it again to continue (ARGS=--dry-run)
	@$(GPU) run $(ARGS)

gpu-check: ## Run all other tests that need a GPU, 15 minutes
	@$(GPU) check $(ARGS)

gpu-bench: ## Measure the tables of benchmarks/ on a GPU, 25 minutes
	@$(GPU) bench $(ARGS)

docs: setup ## Build the documentation into build/docs; warnings are errors
	@$(PYTHON_IN_VENV) -W ignore -m sphinx --quiet --fail-on-warning --keep-going -c docs -d build/doctrees . build/docs
	@echo "open build/docs/index.html"

lint: setup ## Check style, formatting and types
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
