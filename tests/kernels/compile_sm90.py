"""Compile every kernel for Hopper (sm_90) on a machine without a GPU, and print what came out, one JSON object a kernel.

A script of its own: it must run where TRITON_INTERPRET was never set. The launch code is the real one; only the launch is left out.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rlmismatch.kernels.attention import triton as attention
from rlmismatch.kernels.attention.order import Scores
from rlmismatch.kernels.attention_backward import triton as attention_backward
from rlmismatch.kernels.gemm import triton as gemm
from rlmismatch.kernels.logprob import triton as logprob
from rlmismatch.kernels.logprob_backward import triton as logprob_backward
from rlmismatch.kernels.norm import triton as norm
from rlmismatch.kernels.reduce import triton as reduce
from rlmismatch.kernels.rope import triton as rope
from rlmismatch.kernels.swiglu import triton as swiglu

BF16 = torch.bfloat16


class _HopperOnPaper:
    """As much of a Triton driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _compile_instead_of_launching() -> None:
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        ptx = kernel.asm["ptx"]
        print(json.dumps({"kernel": self.fn.__name__, "shared_bytes": kernel.metadata.shared, "ptx": ptx}), flush=True)
        return kernel

    driver.set_active(_HopperOnPaper())
    JITFunction.run = compile_only


def main() -> None:
    _compile_instead_of_launching()
    weight = torch.zeros(512, 1024, dtype=BF16)
    for rows, columns in (
        (1, 512),
        (17, 512),
        (40, 6144),
        (64, 512),
        (64, 6144),
        (64, 24576),
        (256, 4096),
        (256, 6144),
        (256, 24576),
        (1024, 4096),
    ):
        gemm.linear(torch.zeros(rows, 1024, dtype=BF16), torch.zeros(columns, 1024, dtype=BF16), torch.zeros(columns), out_dtype=BF16)
    gemm.linear(torch.zeros(1024, 1024, dtype=BF16), torch.zeros(4096, 1024, dtype=BF16), None, out_dtype=torch.float32)
    for rows, columns in ((256, 4096), (256, 6144), (1024, 4096), (1024, 24576)):  # each tile of `one_sum`
        gemm.linear(torch.zeros(rows, 1024, dtype=BF16), torch.zeros(columns, 1024, dtype=BF16), None, out_dtype=BF16)
    for rows in (1, 17, 64, 256, 512):
        gemm.row_partial(torch.zeros(rows, 8192, dtype=BF16), torch.zeros(512, 8192, dtype=BF16), chunks=8)
    gemm.row_partial(torch.zeros(512, 8192, dtype=BF16), torch.zeros(8192, 4096, dtype=BF16).T, chunks=2, out_dtype=BF16)
    for bias in (None, torch.zeros(1024)):
        gemm.linear(torch.zeros(256, 512, dtype=BF16), weight.T, bias, out_dtype=BF16)
    gemm.grad_weight(torch.zeros(256, 512, dtype=BF16), torch.zeros(256, 1024, dtype=BF16), out_dtype=torch.float32)
    for rows in (1, 64, 256):
        gemm.linear(torch.zeros(rows, 1023, dtype=BF16), torch.zeros(64, 1023, dtype=BF16), None, out_dtype=BF16)
    gemm.row_partial(torch.zeros(1, 576), torch.zeros(64, 576), chunks=8)
    reduce.fold([torch.zeros(2, 3, dtype=BF16)] * 2, out_dtype=BF16)
    norm.rms_norm(torch.zeros(4, 8, 128, dtype=BF16), torch.zeros(128), 1e-6)
    norm.add_rms_norm(torch.zeros(4, 576, dtype=BF16), torch.zeros(4, 576, dtype=BF16), torch.zeros(576), 1e-6)
    rope.rotary(torch.zeros(4, 8, 128, dtype=BF16), torch.zeros(4, dtype=torch.int64), torch.zeros(64), scale=1.0)
    swiglu.swiglu(torch.zeros(4, 1536, dtype=BF16), torch.zeros(4, 1536, dtype=BF16))
    logits, rows = torch.zeros(2, 151936, dtype=BF16), torch.zeros(2, dtype=torch.int64)
    normaliser = logprob.normaliser(*logprob.tiles(logits, columns=151936, temperature=0.7))
    logprob.gather(logits, rows, rows == 0, temperature=0.7)
    logprob.log_softmax(logits, *normaliser, columns=151936, temperature=0.7)
    for temperature in (0.7, 1.0):
        logprob.rows(logits, rows, columns=151936, temperature=temperature)
        logprob.fused_rows(logits, rows, torch.zeros(2), columns=151936, temperature=temperature)
    logprob_backward.dlogits(logits, rows, torch.zeros(2), *normaliser, columns=151936, temperature=0.7, out_dtype=BF16)
    logprob_backward.fold_entropy(*logprob_backward.entropy_tiles(logits, columns=151936, temperature=0.7))
    for tokens in (1, 64, 512):
        q, k = torch.zeros(tokens, 16, 128, dtype=BF16), torch.zeros(tokens, 8, 128, dtype=BF16)
        attention.causal(q, k, k, (0, tokens), scale=0.1)
        cache = torch.zeros(8, 64, 8, 128, dtype=BF16)
        attention.paged(q, cache, cache, torch.zeros(1, 8, dtype=torch.int32), (0, tokens), (tokens,), scale=0.1)
    q, cache = torch.zeros(2, 16, 128, dtype=BF16), torch.zeros(64, 64, 8, 128, dtype=BF16)
    attention.paged(q, cache, cache, torch.zeros(2, 32, dtype=torch.int32), (0, 1, 2), (2000, 900), scale=0.1)
    q = torch.zeros(70, 3, 64)
    attention.causal(q, q, q, (0, 70), scale=0.1)
    q, k = torch.zeros(70, 6, 64, dtype=BF16), torch.zeros(70, 3, 64, dtype=BF16)
    attention.causal(q, k, k, (0, 70), scale=0.1)
    scores, lse = Scores(scale=0.1, window=100, soft_cap=30.0), torch.zeros(16, 512)
    q, k = torch.zeros(512, 16, 128, dtype=BF16), torch.zeros(512, 8, 128, dtype=BF16)
    attention_backward.causal_backward(q, k, k, q, lse, q, (0, 512), scores=scores, sinks_H=torch.zeros(16))
    q, lse = torch.zeros(512, 32, 128, dtype=BF16), torch.zeros(32, 512)
    for scores in (Scores(scale=0.1), Scores(scale=0.1, window=100)):
        attention_backward.causal_backward(q, k, k, q, lse, q, (0, 512), scores=scores)


if __name__ == "__main__":
    main()
