#!/usr/bin/env bash
# Packs the CUDA build of vLLM, megatron-core and what they need, for a GPU host without a network: x86-64, Python 3.12,
# torch 2.11.0+cu130 and triton 3.6 already there. Parts of at most 48 MB.   tools/gpu/build_site.sh [OUT=.gpu]
# On the host, all parts in one folder P:   mkdir -p site && cat P/part.* | tar xJf - -C site && export PYTHONPATH=$PWD/site
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-.gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

platforms=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
for n in 5 12 17 24 26 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" -d "$work/wheels" -r "$here/wheels.txt"
mkdir "$work/site"
for wheel in "$work"/wheels/*.whl; do (cd "$work/site" && unzip -q -o "$wheel"); done

cd "$work/site"
# Not needed to serve a dense text model in bf16 on Hopper: FlashAttention 2, MoE and Blackwell kernels, the Rust front end.
rm -rf vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/_moe_C_stable_libtorch.abi3.so vllm/vllm-rs vllm/_qutlass_C.abi3.so \
  vllm/third_party/fmha_sm100 vllm/third_party/deep_gemm/include vllm/third_party/deep_gemm/_C.cpython-31[0134]*
# What an installer would move out of a wheel's .data folder.
for data in *.data; do
  for part in purelib platlib; do
    if [[ -d $data/$part ]]; then cp -r "$data/$part/." .; fi
  done
done

cd "$out"
rm -f part.*
tar cf - -C "$work/site" . | xz -T2 -6 | split -b 48000000 -d - part.
ls -l part.*
