#!/usr/bin/env bash
# tests/automodel: fine-tune exported models with NeMo AutoModel on two CPU ranks, in .venv-automodel.
# Replaces AutoModel's CUDA calls, so no GPU is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${VENV:-.venv}
venv=.venv-automodel

want=$(cat pyproject.toml tools/test_automodel.sh | sha256sum)
if [ "$(cat "$venv/made-of" 2>/dev/null)" != "$want" ]; then
  echo "Setting up $venv"
  "$base/bin/uv" venv --quiet --clear --python "$base/bin/python" "$venv"
  install() { "$base/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }
  # without the list of its own requirements, which has quack-kernels, for CUDA only: here are the
  # packages that the recipe imports
  install --no-deps nemo-automodel==0.7.0 megatron-fsdp==0.5.0 flashoptim
  install --compile-bytecode torch==2.14.1 transformers==5.18.0 accelerate mistral-common pyyaml \
    sentencepiece tiktoken torchao torchdata wandb --editable '.[test]'
  printf '%s' "$want" >"$venv/made-of"
fi
exec "$venv/bin/python" -m pytest tests/automodel "$@"
