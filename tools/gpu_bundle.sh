#!/usr/bin/env bash
# Packs what `tools/gpu.py` needs on a GPU machine that reaches no network.
#
#   tools/gpu_bundle.sh OUT                   OUT/kha-gpu.tar.xz: this commit, its wheel, its dependencies
#   TE=1 tools/gpu_bundle.sh OUT              Transformer Engine as well
#   ARCH=90 tools/gpu_bundle.sh OUT           Transformer Engine and an NCCL that places several ranks
#                                             on one GPU, both with code for compute capability 9.0 only
#   THERE=freeze.txt tools/gpu_bundle.sh OUT  without what that machine has, by its `pip freeze`
#
# Needs no GPU. PyTorch, Triton and the CUDA libraries are never packed: they belong to that machine
# and its driver. Neither is Ray, which NeMo-Run requires but does not import for local runs.
#
# TE=1 builds Transformer Engine's torch extension against PyTorch $TORCH (2.11.0), which must be that
# machine's too. It needs g++, the CUDA toolkit's headers ($CUDA_HOME, else /usr/local/cuda), about
# twenty minutes of one core, and 2 GB of memory for each of MAX_JOBS (1). With TE_WHEELS, the wheels
# that an earlier TE=1 left in that directory are used again. ARCH needs readelf and strip (binutils),
# zip and unzip.
#
# On the GPU machine, with its own Python 3.12, PyTorch and pip:
#
#   tar xf kha-gpu.tar.xz && cd kha-gpu && ./install.sh && . ./environment
#   python tools/gpu.py run --output results
set -euo pipefail
if [ $# -ne 1 ]; then
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd)
there=${THERE:+$(realpath "$THERE")}
arch=${ARCH:-}
te_wheels=${TE_WHEELS:-$out/te-wheels}
cd "$(dirname "$0")/.."
root=$PWD
uv=$PWD/${VENV:-.venv}/bin/uv
if [ ! -x "$uv" ]; then
  echo "error: no $uv: run \`make setup\` first" >&2
  exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/kha-gpu
mkdir -p "$tree/wheelhouse"

echo "Writing this commit: $(git describe --always --dirty), its changes that are not committed left out"
git archive HEAD | tar -x -C "$tree"
git describe --always >"$tree/COMMIT"
"$uv" build --quiet --wheel --out-dir "$tree/wheelhouse" "$tree"

echo "Collecting the wheels of its dependencies"
echo "ray ; sys_platform == 'none'" >"$work/without-ray.txt"
"$uv" pip compile --quiet --no-header --no-annotate --python-version 3.12 \
  --constraint constraints.txt --override "$work/without-ray.txt" \
  --extra megatron --extra launch --extra plots --extra test pyproject.toml >"$work/all.txt"
names() { sed -n 's/^\([A-Za-z0-9._-]*\).*/\1/p' "$1" | tr 'A-Z_.' 'a-z--' | sort -u; }
grep -vE '^(torch==|triton==|nvidia-|cuda-|transformer-engine)' "$work/all.txt" >"$tree/requirements.txt"
if [ -n "$there" ]; then
  names "$there" | sed 's/.*/^&==/' >"$work/there"
  grep -v -f "$work/there" "$tree/requirements.txt" >"$work/rest" || true
  mv "$work/rest" "$tree/requirements.txt"
fi
"$uv" venv --quiet --python "$("$uv" python find 3.12)" "$work/venv"
export VIRTUAL_ENV=$work/venv
"$uv" pip install --quiet pip
# `pip wheel`, not `pip download`: some come as source only
"$work/venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$tree/wheelhouse" \
  --requirement "$tree/requirements.txt"

build_te() {
  local te=${TE_VERSION:-2.20.2} cuda=${CUDA_HOME:-/usr/local/cuda}
  echo "Building Transformer Engine $te (log: $out/transformer-engine.log)"
  mkdir -p "$te_wheels"
  grep -vE '^(torch|triton|nvidia|cuda|transformer-engine|setuptools)' constraints.txt >"$work/constraints.txt"
  "$uv" pip install --quiet --constraint "$work/constraints.txt" "torch==${TORCH:-2.11.0}" "transformer-engine-cu13==$te" \
    nvidia-cudnn-frontend ninja pybind11 cmake setuptools wheel packaging pydantic onnx onnxscript \
    einops
  PATH=$work/venv/bin:$PATH CPATH=$cuda/include/cccl:$cuda/include MAX_JOBS=${MAX_JOBS:-1} \
    NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 "$work/venv/bin/python" -m pip \
    wheel --no-deps --no-build-isolation --wheel-dir "$te_wheels" \
    "transformer-engine-torch==$te" >"$out/transformer-engine.log" 2>&1
  "$work/venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$te_wheels" \
    "transformer-engine==$te" "transformer-engine-cu13==$te" $("$uv" pip freeze |
      grep -E '^(onnx|onnxscript|onnx-ir|ml-dtypes|einops|pydantic|pydantic-core|annotated-types|typing-inspection)==')
}

if [ -n "${TE:-}$arch" ]; then
  if [ -z "$(ls "$te_wheels"/transformer_engine_torch-*.whl 2>/dev/null)" ]; then
    build_te
  fi
  for wheel in "$te_wheels"/*.whl; do
    name=$(basename "$wheel" | cut -d- -f1 | tr 'A-Z_.' 'a-z--')
    if [ -z "$there" ] || ! grep -qxF "^$name==" "$work/there"; then
      cp "$wheel" "$tree/wheelhouse"
    fi
  done
fi

prune() { # only libraries with GPU code
  if [[ $(readelf -SW "$1") == *.nv_fatbin* ]]; then
    python3 "$root/tools/prune_cuda.py" "$1" "$arch"
    strip --strip-all "$1"
  fi
}

if [ -n "$arch" ]; then
  echo "Adding an NCCL that places several ranks on one GPU"
  "$work/venv/bin/python" -m pip download --quiet --no-deps --dest "$work" \
    "nvidia-nccl-cu13==${NCCL_VERSION:-2.32.3}"
  unzip -q "$work"/nvidia_nccl_cu13-*.whl -d "$work/nccl"
  mkdir "$tree/nccl"
  cp "$work/nccl/nvidia/nccl/lib/libnccl.so.2" "$tree/nccl"
  prune "$tree/nccl/libnccl.so.2"
fi
# stored without compression, since the archive is compressed
for wheel in "$tree"/wheelhouse/*.whl; do
  unzip -q "$wheel" -d "$work/unpacked"
  if [ -n "$arch" ]; then
    find "$work/unpacked" -name '*.so*' -size +4M | while read -r library; do prune "$library"; done
    rm -rf "$work/unpacked/transformer_engine/jax"
  fi
  rm "$wheel"
  (cd "$work/unpacked" && zip -0 -q -r "$wheel" .)
  rm -rf "$work/unpacked"
done

cat >"$tree/install.sh" <<'INSTALL'
#!/usr/bin/env bash
# Unpacks the wheels beside this file, into site/: the machine's own Python stays as it is.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
"$python" - <<'CHECK'
import sys

if sys.version_info[:2] != (3, 12):
    sys.exit(f"error: this is Python {sys.version.split()[0]}, and the wheels are for 3.12: set PYTHON")
try:
    import torch
except ImportError as error:
    sys.exit(f"error: {sys.executable} has no PyTorch ({error}): set PYTHON to one that has")
print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, devices: {torch.cuda.device_count()}")
CHECK
"$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target site \
  wheelhouse/*.whl
cat >environment <<VARIABLES
export PYTHONPATH='$PWD/site'"\${PYTHONPATH:+:\$PYTHONPATH}" PATH='$PWD/site/bin':"\$PATH"
VARIABLES
if [ -f nccl/libnccl.so.2 ]; then
  echo "export KHA_NCCL='$PWD/nccl/libnccl.so.2'" >>environment
fi
echo "now: . ./environment && python tools/gpu.py run --output results"
INSTALL
chmod +x "$tree/install.sh"
tar -C "$work" -c kha-gpu | xz -T2 -9 >"$out/kha-gpu.tar.xz"
ls -sh "$out/kha-gpu.tar.xz"
