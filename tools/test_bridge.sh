#!/usr/bin/env bash
# tests/bridge: Megatron-Bridge, its AutoBridge and its providers, in .venv-bridge, whose Python also
# runs examples/bridge_round_trip.py. Transformer Engine, which Bridge imports, is the test double of
# tests/transformer_engine, so neither a compiler nor a GPU is needed. Python 3.12 only, like Bridge 0.6.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${VENV:-.venv}
venv=.venv-bridge
if ! "$base/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
  echo "error: $base is not Python 3.12, which Megatron-Bridge 0.6 needs: set PYTHON and remake it" >&2
  exit 2
fi

want=$(cat pyproject.toml tools/test_bridge.sh | sha256sum)
if [ "$(cat "$venv/made-of" 2>/dev/null)" != "$want" ]; then
  echo "Setting up $venv"
  "$base/bin/uv" venv --quiet --clear --python "$base/bin/python" "$venv"
  install() { "$base/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }
  # not its own list, which pins nvidia-resiliency-ext to wheels for glibc 2.39 and newer: here are
  # the packages that importing it and converting need
  install --no-deps megatron-bridge==0.6.2
  install --compile-bytecode torch==2.11.0 'transformers==5.12.1' megatron-core==0.19.2 accelerate \
    'datasets>=2.20' diffusers filelock 'hydra-core>=1.3.4,<1.4' 'megatron-energon>=7,<8' \
    mistral-common nvidia-modelopt 'omegaconf>=2.3' peft pyyaml wandb==0.29.0 \
    --editable '.[dev]'
  printf '%s' "$want" >"$venv/made-of"
fi
exec "$venv/bin/python" -m pytest tests/bridge "$@"
