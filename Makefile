# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
VENV ?= .venv
PYTHON_IN_VENV = $(VENV)/bin/python
export VENV

.PHONY: help setup quickstart test lint

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s:

setup: ## Make .venv with the pinned versions (skipped when nothing changed)
	@tools/bootstrap.sh

quickstart: setup ## Text to trained model to Hugging Face to pictures, on this machine's CPU
	@$(VENV)/bin/kha-megatron quickstart

test: setup lint ## Everything that needs no GPU
	@$(PYTHON_IN_VENV) -m pytest

lint: setup ## Style and formatting
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
