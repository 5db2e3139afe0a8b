#!/usr/bin/env bash
# Makes .venv with everything that the README's two commands need, or says plainly what is missing.
#
#   tools/bootstrap.sh            the pinned versions of constraints.txt, with all CPU extras
#
# Python 3.12 or newer is looked for in $PYTHON, on the PATH, among pyenv's versions and uv's own.
# A second run returns at once unless pyproject.toml or constraints.txt has changed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
stamp=$venv/.bootstrapped

want=$(cat pyproject.toml constraints.txt tools/bootstrap.sh | sha256sum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
  exit 0
fi

new_enough() {
  "$1" -c 'import sys; sys.exit(not ((3, 12) <= sys.version_info < (3, 14)))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
    if new_enough "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  command -v uv >/dev/null && uv python find '>=3.12,<3.14' 2>/dev/null
}

if ! python=$(find_python) || [ -z "$python" ]; then
  cat >&2 <<'EOF'
error: no Python 3.12 or 3.13 found: Megatron-Core 0.19 needs one.
  Looked in $PYTHON, on the PATH (python3.12, python3.13, python3), in pyenv's versions and in uv's.
  Remedy: `pyenv install 3.12`, or `uv python install 3.12`, or PYTHON=/path/to/python3.12 make quickstart
EOF
  exit 2
fi

echo "Setting up $venv with $python ($("$python" -V))"
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
VIRTUAL_ENV=$PWD/$venv "$venv/bin/uv" pip install --quiet \
  --constraint constraints.txt --editable '.[megatron,launch,plots,docs,dev]'
printf '%s' "$want" >"$stamp"
