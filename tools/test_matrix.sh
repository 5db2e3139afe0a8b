#!/usr/bin/env bash
# The core of the suite against every supported Megatron-Core, and the kernels against the oldest and
# the newest torch with the Triton that each brings; all in environments of their own.
#
#   tools/test_matrix.sh                               .venv-0.17.1, .venv-torch-2.7.1 and so on
#   VERSIONS="0.18.2" TORCHES="" tools/test_matrix.sh  some of them
#   TESTS="tests/mcore" tools/test_matrix.sh           some of the tests of Megatron-Core
#
# Prints one line a version and ends with 1 if any of them failed. What a version is too old for is
# skipped with the reason, and listed.
set -euo pipefail
cd "$(dirname "$0")/.."
versions=${VERSIONS-0.17.1 0.18.2 0.19.2}
torches=${TORCHES-2.7.1 2.15.0} # the least that pyproject.toml allows, the newest there is
tests=${TESTS:-tests/ops tests/mcore tests/cpu tests/distributed tests/conversion tests/training}
base=${VENV:-.venv}
if [ ! -x "$base/bin/uv" ]; then
  echo "error: no $base/bin/uv: run \`make setup\` first" >&2
  exit 2
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

make_environment() { # NAME REQUIREMENT LINES: the pins of constraints.txt but for these lines
  local venv=.venv-$1 want
  want=$(cat pyproject.toml constraints.txt tools/test_matrix.sh | sha256sum)
  if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.made" 2>/dev/null)" = "$want" ]; then
    return
  fi
  echo "Setting up $venv"
  "$base/bin/uv" venv --quiet --clear --python "$base/bin/python" "$venv"
  grep -vE "^($3)" constraints.txt >"$logs/constraints.txt"
  VIRTUAL_ENV=$PWD/$venv "$base/bin/uv" pip install --quiet \
    --constraint "$logs/constraints.txt" --editable '.[megatron,dev]' "$2"
  printf '%s' "$want" >"$venv/.made"
}

check() { # NAME TESTS...
  echo "== $1"
  if ! ".venv-$1/bin/python" -m pytest -q "${@:2}" 2>&1 | tee "$logs/$1"; then
    status=1
  fi
}

status=0
for version in $versions; do
  make_environment "$version" "megatron-core==$version" 'megatron-core=='
  # shellcheck disable=SC2086  # several paths
  check "$version" $tests
done
for version in $torches; do
  make_environment "torch-$version" "torch==$version" 'torch==|triton==|nvidia-|cuda-|setuptools=='
  # counts of registers are those of the pinned Triton
  check "torch-$version" tests/ops tests/kernels -k 'not cross_compile and not roofline and not hopper'
done

echo
for log in "$logs"/*[0-9]; do
  echo "$(basename "$log"): $(tail -n 1 "$log")"
done
exit "$status"
