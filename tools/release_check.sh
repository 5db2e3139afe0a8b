#!/usr/bin/env bash
# Build a wheel and a source distribution, install each into a new environment and use it there.
#
#   tools/release_check.sh                    the Python of .venv
#   PYTHONS="3.12 3.13" tools/release_check.sh
#   KEEP=/tmp/release tools/release_check.sh  everything stays in that folder
#
# Prints one line per step and exits with 1 at the first failure.
set -euo pipefail
cd "$(dirname "$0")/.."
source=$PWD
base=$source/${VENV:-.venv}
if [ ! -x "$base/bin/uv" ]; then
  echo "error: no $base/bin/uv: run \`make setup\` first" >&2
  exit 2
fi
work=${KEEP:-$(mktemp -d)}
mkdir -p "$work"
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
unset PYTHONPATH VIRTUAL_ENV

step() { # NAME COMMAND...: its output is shown only where it fails
  local started=$EPOCHREALTIME log=$work/log
  "${@:2}" >"$log" 2>&1 & # in a shell of its own, where the first command that fails ends it
  if ! wait "$!"; then
    tail -n 40 "$log" >&2
    echo "FAILED: $1" >&2
    exit 1
  fi
  awk -v a="$started" -v b="$EPOCHREALTIME" -v what="$1" 'BEGIN {printf "%6.1f s  %s\n", b - a, what}'
}

install() { # ENVIRONMENT PYTHON WHAT...
  "$base/bin/uv" venv --quiet --clear --python "$2" "$1"
  "$base/bin/uv" pip install --quiet --python "$1/bin/python" "${@:3}"
}

same_modules() { # the wheel holds each file of the package that git knows
  git -C "$source" ls-files kha_megatron | sort >"$work/ours"
  "$base/bin/python" -m zipfile --list "$1" | awk '/^kha_megatron\// {print $1}' | sort >"$work/theirs"
  diff "$work/ours" "$work/theirs"
}

from_source() { # what pip makes of the source distribution is the wheel's package, file for file
  "$base/bin/python" -m venv --clear "$work/env-source"
  "$work/env-source/bin/pip" install --quiet --no-deps "$1"
  cd "$work/elsewhere" # not where the source is
  "$work/env-source/bin/python" -c 'import kha_megatron; print(kha_megatron.HeadsConfig.from_preset("kha_mlp"))'
  diff -r --exclude=__pycache__ "$work"/env-source/lib/python3.*/site-packages/kha_megatron \
    "$work/env/lib"/python3.*/site-packages/kha_megatron
}

spec() { # Megatron returns None for a spec that it cannot import
  (cd "$work/elsewhere" && "$work/env/bin/python" -c '
from megatron.core.transformer.spec_utils import import_module
assert import_module(("kha_megatron.mcore.specs", "kha_mlp_hybrid")) is not None')
}

kha() { (cd "$work/elsewhere" && "$work/env/bin/kha-megatron" "$@"); }

step "wheel and source distribution are built" \
  "$base/bin/python" -m hatchling build --directory "$work/dist"
wheel=$(echo "$work"/dist/*.whl)
sdist=$(echo "$work"/dist/*.tar.gz)
echo "          $(basename "$wheel") $(stat -c %s "$wheel") bytes, $(basename "$sdist") $(stat -c %s "$sdist")"
step "the wheel has the whole package" same_modules "$wheel"

for python in ${PYTHONS:-$base/bin/python}; do
  rm -rf "$work/elsewhere"
  mkdir "$work/elsewhere"
  step "Python $python: the wheel is installed, with its extras, from the package index" \
    install "$work/env" "$python" --constraint "$source/constraints.txt" "$wheel[megatron,launch,plots]"
  echo "          $("$work/env/bin/python" -V), $(kha --version)"
  step "doctor finds nothing that is missing" kha doctor
  step "quickstart: text, training, conversion, pictures, sample" \
    kha quickstart -- --train-iters "${ITERATIONS:-60}"
  step "what it made is verified, folder against checkpoint" \
    kha verify quickstart/run/checkpoints quickstart/hf
  step "Megatron's own --spec lookup finds a spec" spec
  step "pip makes the same package of the source distribution" from_source "$sdist"
done
echo "kha-megatron $(kha --version) can be released"
