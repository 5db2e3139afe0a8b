#!/usr/bin/env bash
# An environment with Megatron-Bridge and Transformer Engine, and the tests that need them.
#
#   tools/bridge_environment.sh                 makes .venv-bridge, runs tests/bridge in it
#   TE_WHEEL=/path/to.whl tools/bridge_environment.sh   with a torch extension that is built already
#
# Needs no GPU. Building Transformer Engine's torch extension needs g++ and the CUDA toolkit's
# headers ($CUDA_HOME, else /usr/local/cuda), 2 GB of memory for each of MAX_JOBS (1) and some
# twenty minutes of one core. Python 3.12 only: Megatron-Bridge 0.6 takes no other.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-bridge
base=${VENV:-.venv}
te=${TE_VERSION:-2.20.2}
if [ ! -x "$base/bin/uv" ]; then
  echo "error: no $base/bin/uv: run \`make setup\` first" >&2
  exit 2
fi
if ! "$base/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
  echo "error: $base is not Python 3.12, which Megatron-Bridge 0.6 needs: set PYTHON and remake it" >&2
  exit 2
fi

want=$(cat pyproject.toml tools/bridge_environment.sh | sha256sum)
if [ "$(cat "$venv/.made" 2>/dev/null)" != "$want" ]; then
  echo "Setting up $venv"
  "$base/bin/uv" venv --quiet --clear --python "$base/bin/python" "$venv"
  export VIRTUAL_ENV=$PWD/$venv
  install() { "$base/bin/uv" pip install --quiet "$@"; }
  install pip torch==2.11.0 "transformer-engine-cu13==$te" nvidia-cudnn-frontend \
    ninja pybind11 cmake setuptools wheel packaging pydantic onnx onnxscript einops
  if [ -z "${TE_WHEEL:-}" ]; then
    cuda=${CUDA_HOME:-/usr/local/cuda}
    wheels=$PWD/$venv/wheels
    echo "Building the torch extension of Transformer Engine $te (log: $venv/build.log)"
    PATH=$VIRTUAL_ENV/bin:$PATH CPATH=$cuda/include/cccl:$cuda/include MAX_JOBS=${MAX_JOBS:-1} \
      NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 "$venv/bin/python" -m pip wheel \
      --no-deps --no-build-isolation -w "$wheels" "transformer-engine-torch==$te" \
      >"$venv/build.log" 2>&1
    TE_WHEEL=$(ls "$wheels"/transformer_engine_torch-*.whl)
  fi
  install --no-deps "transformer-engine==$te" "$TE_WHEEL"
  # not its own list, which pins nvidia-resiliency-ext to wheels for glibc 2.39 and newer: here are
  # the packages that importing it and converting need
  install --no-deps megatron-bridge==0.6.2
  install torch==2.11.0 'transformers==5.12.1' megatron-core==0.19.2 accelerate 'datasets>=2.20' \
    diffusers filelock 'hydra-core>=1.3.4,<1.4' 'megatron-energon>=7,<8' mistral-common \
    nvidia-modelopt 'omegaconf>=2.3' peft pyyaml wandb==0.29.0 --editable '.[dev]'
  printf '%s' "$want" >"$venv/.made"
fi
exec "$venv/bin/python" -m pytest -q "${@:-tests/bridge}"
