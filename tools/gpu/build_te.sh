#!/usr/bin/env bash
# Packs Transformer Engine 2.11.0 for the same host as build_site.sh. Parts of at most 48 MB.   tools/gpu/build_te.sh WHEEL [OUT=.gpu]
# WHEEL is transformer_engine_torch-2.11.0-*.whl: PyPI has only its source, so it must be compiled once on a machine with nvcc and
# the host's own Python, torch and CUDA.
# On the host, beside the parts of build_site.sh:   cat P/te.* | tar xJf - -C site
set -euo pipefail
if (($# < 1)) || [[ ! -f $1 ]]; then
  echo "usage: tools/gpu/build_te.sh transformer_engine_torch-2.11.0-*.whl [OUT]" >&2
  exit 2
fi
wheel=$(realpath "$1")
out=${2:-.gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
  -d "$work" transformer-engine==2.11.0 transformer-engine-cu13==2.11.0 nvdlfw-inspect==0.2.2
mkdir "$work/site"
for file in "$work"/*.whl "$wheel"; do (cd "$work/site" && unzip -q -o "$file"); done
rm -rf "$work/site/transformer_engine/jax"

cd "$out"
rm -f te.*
tar cf - -C "$work/site" . | xz -T2 -4 | split -b 48000000 -d - te.
ls -l te.*
