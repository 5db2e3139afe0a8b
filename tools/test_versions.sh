#!/usr/bin/env bash
# Run the tests marked `versions` with the newest and the oldest dependencies that pyproject.toml allows.
#
#   tools/test_versions.sh                   both, one after the other
#   tools/test_versions.sh newest            as `pip install '.[megatron,launch,plots]'` installs them
#   tools/test_versions.sh oldest --durations=9
#
# constraints.txt is not used. The environments .venv-newest and .venv-oldest are kept, and the next run
# updates them. After the newest one, releases beyond the bounds of pyproject.toml are listed.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${VENV:-.venv}
if [ ! -x "$base/bin/uv" ]; then
  echo "error: no $base/bin/uv: run \`make setup\` first" >&2
  exit 2
fi
unset PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

uv() { # COMMAND...
  if ! "$base/bin/uv" "$@" 2>"$work/log"; then
    cat "$work/log" >&2
    if grep -qiE 'failed to fetch|request failed|network was disabled' "$work/log"; then
      echo "error: the package index is out of reach. Try again later." >&2
    fi
    exit 1
  fi
}

build() { # KIND RESOLUTION
  local venv=.venv-$1 versions=$work/$1.txt python=$base/bin/python
  if [ "$1" = oldest ]; then # the oldest numpy and matplotlib have no wheels for Python 3.13
    python=$(uv python find 3.12)
  fi
  echo "Setting up $venv with the $1 versions that pyproject.toml allows"
  uv pip compile --quiet --no-header --no-annotate --python "$python" --resolution "$2" \
    --extra megatron --extra launch --extra plots --extra test pyproject.toml >"$versions"
  if [ ! -x "$venv/bin/python" ]; then
    uv venv --quiet --clear --python "$python" "$venv"
  fi
  uv pip sync --quiet --python "$venv/bin/python" "$versions"
  uv pip install --quiet --python "$venv/bin/python" --no-deps --reinstall .
  grep -E '^(torch|transformers|megatron-core|nemo-run)==' "$versions" | paste -sd' '
}

kinds=()
while [[ ${1:-} = newest || ${1:-} = oldest ]]; do
  kinds+=("$1")
  shift
done
marked=$(grep -rl 'mark\.versions' tests --include='test_*.py') # the other files take a minute to collect
for kind in ${kinds[*]:-newest oldest}; do
  case $kind in
    newest) build newest highest ;;
    oldest) build oldest lowest-direct ;;
  esac
  # shellcheck disable=SC2086  # several files
  ".venv-$kind/bin/python" -m pytest --whole -m versions --numprocesses "${WORKERS:-2}" \
    --dist loadfile --no-loadscope-reorder $marked "$@"
  if [ "$kind" = newest ]; then
    # also of the extras that are not in .venv-newest, e.g. vllm
    names=$("$base/bin/python" tools/newer_releases.py --names)
    releases=$(uv pip compile --quiet --no-header --no-annotate --no-deps --no-build \
      --python .venv-newest/bin/python - <<<"$names")
    "$base/bin/python" tools/newer_releases.py <<<"$releases"
  fi
done
