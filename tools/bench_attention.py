"""Time attention beside what it replaces, in one run on one GPU: ``python tools/bench_attention.py [--json FILE] [--only NAME]``.

As bench_kernels.py, whose clock it uses; decode by CUDA-graph replays. Bits that must be equal are held against each other first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from bench_kernels import BF16, HEAD_DIM, HEADS, KV_HEADS, Case, main, randn
from torch.nn import functional

from rlmismatch.kernels import attention, attention_backward


@dataclass(frozen=True, kw_only=True)
class _Sequences:
    """`batch` sequences of `tokens` tokens, packed, with Qwen3-8B's heads."""

    batch: int
    tokens: int

    @property
    def bounds(self) -> list[int]:
        return list(range(0, self.batch * self.tokens + 1, self.tokens))

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.tokens} x {HEADS}/{KV_HEADS} x {HEAD_DIM}"

    @property
    def products(self) -> float:
        """Floating-point operations of one causal product, q k or weights v: half of 2 H D T^2."""
        return float(self.batch * HEADS * HEAD_DIM * self.tokens * self.tokens)

    def heads(self, heads: int) -> torch.Tensor:
        return randn(self.batch * self.tokens, heads, HEAD_DIM)

    def by_head(self, x_THD: torch.Tensor) -> torch.Tensor:
        """[batch, H, tokens, D], a view."""
        return x_THD.view(self.batch, self.tokens, -1, HEAD_DIM).transpose(1, 2)


def _installed(name: str, module: str) -> ModuleType | None:
    """The module, or None and a line on stderr that says what is not timed."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        print(f"{name} is not timed: {missing}", file=sys.stderr)
        return None


def _te_attention(form: _Sequences, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    te = _installed("Transformer Engine's attention", "transformer_engine.pytorch")
    if te is None:
        return None
    module = te.DotProductAttention(
        HEADS, HEAD_DIM, num_gqa_groups=KV_HEADS, attn_mask_type="causal", qkv_format="bshd", attention_dropout=0.0
    )
    q4, k4, v4 = (x.view(form.batch, form.tokens, -1, HEAD_DIM) for x in (q, k, v))
    return partial(module, q4, k4, v4)


def _forward_baselines(form: _Sequences, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "SDPA", partial(functional.scaled_dot_product_attention, *(form.by_head(x) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    if flash := _installed("FlashAttention 3", "vllm.vllm_flash_attn"):
        starts = torch.tensor(form.bounds, dtype=torch.int32, device="cuda")
        for name, splits in (("FlashAttention 3", 0), ("FlashAttention 3, one split", 1)):
            yield name, partial(
                flash.flash_attn_varlen_func, q, k, v, form.tokens, starts, form.tokens, cu_seqlens_k=starts,
                softmax_scale=HEAD_DIM**-0.5, causal=True, fa_version=3, num_splits=splits,
            )  # fmt: skip
    if te := _te_attention(form, q, k, v):
        yield "TE", te


def _attention() -> Iterator[Case]:
    for form in (
        _Sequences(batch=1, tokens=512),
        _Sequences(batch=1, tokens=4096),
        _Sequences(batch=1, tokens=16384),
        _Sequences(batch=64, tokens=4096),
    ):
        q, k, v = form.heads(HEADS), form.heads(KV_HEADS), form.heads(KV_HEADS)
        for baseline, theirs in _forward_baselines(form, q, k, v):
            yield Case(
                kernel="attention.causal",
                shape=form.name,
                ours=partial(attention.causal, q, k, v, form.bounds, scale=HEAD_DIM**-0.5, impl="triton"),
                baseline=baseline,
                theirs=theirs,
                work=2 * form.products,
                unit="TFLOP/s",
            )


def _attention_decode() -> Iterator[Case]:
    """One query a sequence. Before anything is timed, the last row of a prefill is held against its decode."""
    block_size = 16
    for form in (
        _Sequences(batch=1, tokens=4096),
        _Sequences(batch=1, tokens=16384),
        _Sequences(batch=64, tokens=4096),
        _Sequences(batch=64, tokens=16384),
    ):
        blocks = form.batch * form.tokens // block_size
        k, v = form.heads(KV_HEADS), form.heads(KV_HEADS)
        table = torch.randperm(blocks, device="cuda").to(torch.int32).view(form.batch, -1)
        k_cache, v_cache = (torch.empty(blocks, block_size, KV_HEADS, HEAD_DIM, device="cuda", dtype=BF16) for _ in "kv")
        k_cache[table.flatten().long()] = k.view(blocks, block_size, KV_HEADS, HEAD_DIM)
        v_cache[table.flatten().long()] = v.view(blocks, block_size, KV_HEADS, HEAD_DIM)
        q = randn(form.batch, HEADS, HEAD_DIM)
        lengths = [form.tokens] * form.batch
        ours = partial(
            attention.paged,
            q,
            k_cache,
            v_cache,
            table,
            range(form.batch + 1),
            lengths,
            scale=HEAD_DIM**-0.5,
            impl="triton",
            table_checked=True,
        )
        _require_the_bits_of_prefill(form, ours(), q, k, v)
        for baseline, theirs in _decode_baselines(form, q, k, v, k_cache, v_cache, table):
            yield Case(
                kernel="attention.paged, decode",
                shape=f"{form.name}, block {block_size}",
                ours=ours,
                baseline=baseline,
                theirs=theirs,
                work=4.0 * form.batch * form.tokens * KV_HEADS * HEAD_DIM,
                unit="GB/s",
                graphed=True,
            )


def _decode_baselines(
    form: _Sequences, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "SDPA, dense", partial(functional.scaled_dot_product_attention, q[:, :, None], form.by_head(k), form.by_head(v), enable_gqa=True)
    if flash := _installed("FlashAttention 3", "vllm.vllm_flash_attn"):
        starts = torch.arange(form.batch + 1, dtype=torch.int32, device="cuda")
        lengths = torch.full((form.batch,), form.tokens, dtype=torch.int32, device="cuda")
        for name, splits in (("FlashAttention 3", 0), ("FlashAttention 3, one split", 1)):
            yield name, partial(
                flash.flash_attn_varlen_func, q, k_cache, v_cache, 1, starts, form.tokens, seqused_k=lengths, block_table=table,
                softmax_scale=HEAD_DIM**-0.5, causal=True, fa_version=3, num_splits=splits,
            )  # fmt: skip


def _require_the_bits_of_prefill(
    form: _Sequences, decoded: attention.AttentionOut, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    rows = slice(form.tokens - 1, None, form.tokens)
    whole_q = form.heads(HEADS)
    whole_q[rows] = q
    prefilled = attention.causal(whole_q, k, v, form.bounds, scale=HEAD_DIM**-0.5, impl="triton")
    if not (torch.equal(prefilled.out_THD[rows], decoded.out_THD) and torch.equal(prefilled.lse_HT[:, rows], decoded.lse_HT)):
        sys.exit(f"attention, {form.name}: decode and prefill differ")


def _attention_backward() -> Iterator[Case]:
    for form in (_Sequences(batch=1, tokens=4096), _Sequences(batch=1, tokens=16384)):
        q, k, v, dout = form.heads(HEADS), form.heads(KV_HEADS), form.heads(KV_HEADS), form.heads(HEADS)
        out, lse = attention.causal(q, k, v, form.bounds, scale=HEAD_DIM**-0.5, impl="triton")
        ours = partial(attention_backward.causal_backward, q, k, v, out, lse, dout, form.bounds, scale=HEAD_DIM**-0.5, impl="triton")
        if not all(torch.equal(a, b) for a, b in zip(ours()[:3], ours()[:3], strict=True)):
            sys.exit(f"attention_backward, {form.name}: two runs differ")
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        sdpa = functional.scaled_dot_product_attention(*(form.by_head(x) for x in leaves), is_causal=True, enable_gqa=True)
        baselines = [("SDPA", sdpa, form.by_head(dout))]
        if te := _te_attention(form, *leaves):
            baselines.append(("TE", te(), dout.view(form.batch, form.tokens, -1)))
        for baseline, y, dy in baselines:
            yield Case(
                kernel="attention_backward.causal_backward",
                shape=form.name,
                ours=ours,
                baseline=baseline,
                theirs=partial(torch.autograd.grad, y, leaves, dy, retain_graph=True),
                work=5 * form.products,
                unit="TFLOP/s",
            )


def _flashinfer() -> Iterator[Case]:
    """Apart from the others: FlashInfer compiles its kernels when they are first called."""
    flashinfer = _installed("FlashInfer", "flashinfer")
    for tokens in (4096, 16384) if flashinfer else ():
        form = _Sequences(batch=1, tokens=tokens)
        q, k, v = form.heads(HEADS), form.heads(KV_HEADS), form.heads(KV_HEADS)
        yield Case(
            kernel="attention.causal",
            shape=form.name,
            ours=partial(attention.causal, q, k, v, form.bounds, scale=HEAD_DIM**-0.5, impl="triton"),
            baseline="FlashInfer",
            theirs=partial(flashinfer.single_prefill_with_kv_cache, q, k, v, causal=True),
            work=2 * form.products,
            unit="TFLOP/s",
        )


SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "forward": _attention,
    "decode": _attention_decode,
    "backward": _attention_backward,
    "flashinfer": _flashinfer,
}

if __name__ == "__main__":
    main(SUITES)
