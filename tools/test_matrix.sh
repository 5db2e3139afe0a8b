#!/usr/bin/env bash
# The core of the suite against every supported Megatron-Core, each in an environment of its own.
#
#   tools/test_matrix.sh                       all versions, .venv-0.17.1 and so on
#   VERSIONS="0.18.2" tools/test_matrix.sh     some of them
#   TESTS="tests/mcore" tools/test_matrix.sh   some of the tests
#
# Prints one line a version and ends with 1 if any of them failed. What a version is too old for is
# skipped with the reason, and listed.
set -euo pipefail
cd "$(dirname "$0")/.."
versions=${VERSIONS:-0.17.1 0.18.2 0.19.2}
tests=${TESTS:-tests/ops tests/mcore tests/cpu tests/distributed tests/conversion tests/training}
base=${VENV:-.venv}
if [ ! -x "$base/bin/uv" ]; then
  echo "error: no $base/bin/uv: run \`make setup\` first" >&2
  exit 2
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

make_environment() { # VERSION: the same pins as constraints.txt but for Megatron's own
  local venv=.venv-$1 want
  want=$(cat pyproject.toml constraints.txt tools/test_matrix.sh | sha256sum)
  if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.made" 2>/dev/null)" = "$want" ]; then
    return
  fi
  echo "Setting up $venv"
  "$base/bin/uv" venv --quiet --clear --python "$base/bin/python" "$venv"
  grep -v '^megatron-core==' constraints.txt >"$logs/constraints.txt"
  VIRTUAL_ENV=$PWD/$venv "$base/bin/uv" pip install --quiet \
    --constraint "$logs/constraints.txt" --editable '.[dev]' "megatron-core==$1"
  printf '%s' "$want" >"$venv/.made"
}

status=0
for version in $versions; do
  make_environment "$version"
  echo "== Megatron-Core $version"
  # shellcheck disable=SC2086  # several paths
  if ! ".venv-$version/bin/python" -m pytest -q $tests 2>&1 | tee "$logs/$version"; then
    status=1
  fi
done

echo
for version in $versions; do
  echo "Megatron-Core $version: $(tail -n 1 "$logs/$version")"
done
exit "$status"
