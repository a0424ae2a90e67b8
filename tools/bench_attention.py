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
    except (ImportError, OSError) as missing:  # OSError: a library that the module loads is not there, or is another version's
        print(f"{name} is not timed: {missing}", file=sys.stderr)
        return None


# Before torch has loaded its own cuDNN: the two need not be the same release.
_TE = _installed("Transformer Engine's attention", "transformer_engine.pytorch")


def _te_attention(form: _Sequences, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    if _TE is None:
        return None
    module = _TE.DotProductAttention(
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
                graphed=form.batch == 1 and baseline != "TE",  # 64 sequences take long enough as they are
            )


Pages = tuple[torch.Tensor, torch.Tensor]  # K and V, [blocks, B, Hkv, D]


@dataclass(frozen=True, kw_only=True)
class _Decode:
    """One query a sequence over shuffled pages of 16 tokens, and the dense K and V that they hold."""

    form: _Sequences
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    caches: Pages
    table: torch.Tensor

    @classmethod
    def of(cls, form: _Sequences) -> _Decode:
        blocks = form.batch * form.tokens // 16
        k, v = form.heads(KV_HEADS), form.heads(KV_HEADS)
        table = torch.randperm(blocks, device="cuda").to(torch.int32).view(form.batch, -1)
        caches = []
        for x in (k, v):
            caches.append(torch.empty(blocks, 16, KV_HEADS, HEAD_DIM, device="cuda", dtype=BF16))
            caches[-1][table.flatten().long()] = x.view(blocks, 16, KV_HEADS, HEAD_DIM)
        return cls(form=form, q=randn(form.batch, HEADS, HEAD_DIM), k=k, v=v, caches=(caches[0], caches[1]), table=table)

    def ours(self) -> attention.AttentionOut:
        bounds, lengths = range(self.form.batch + 1), [self.form.tokens] * self.form.batch
        return attention.paged(
            self.q, *self.caches, self.table, bounds, lengths, scale=HEAD_DIM**-0.5, impl="triton", table_checked=True
        )  # fmt: skip

    def beside(self, baseline: str, theirs: Callable[[], object]) -> Case:
        return Case(
            kernel="attention.paged, decode",
            shape=f"{self.form.name}, block 16",
            ours=self.ours,
            baseline=baseline,
            theirs=theirs,
            work=4.0 * self.form.batch * self.form.tokens * KV_HEADS * HEAD_DIM,
            unit="GB/s",
            graphed=True,
        )


def _attention_decode() -> Iterator[Case]:
    """Before anything is timed, the last row of a prefill is held against its decode."""
    for batch, tokens in ((1, 4096), (1, 16384), (64, 4096), (64, 16384)):
        decode = _Decode.of(_Sequences(batch=batch, tokens=tokens))
        _require_the_bits_of_prefill(decode.form, decode.ours(), decode.q, decode.k, decode.v)
        for baseline, theirs in _decode_baselines(decode):
            yield decode.beside(baseline, theirs)


def _decode_baselines(decode: _Decode) -> Iterator[tuple[str, Callable[[], object]]]:
    form, q = decode.form, decode.q
    k, v = form.by_head(decode.k), form.by_head(decode.v)
    yield "SDPA, dense", partial(functional.scaled_dot_product_attention, q[:, :, None], k, v, enable_gqa=True)
    if flash := _installed("FlashAttention 3", "vllm.vllm_flash_attn"):
        starts = torch.arange(form.batch + 1, dtype=torch.int32, device="cuda")
        lengths = torch.full((form.batch,), form.tokens, dtype=torch.int32, device="cuda")
        for name, splits in (("FlashAttention 3", 0), ("FlashAttention 3, one split", 1)):
            yield name, partial(
                flash.flash_attn_varlen_func, q, *decode.caches, 1, starts, form.tokens, seqused_k=lengths, block_table=decode.table,
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
    for form in (_Sequences(batch=1, tokens=4096), _Sequences(batch=1, tokens=16384), _Sequences(batch=64, tokens=4096)):
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
    if flashinfer is None:
        return
    for form in (_Sequences(batch=1, tokens=4096), _Sequences(batch=1, tokens=16384)):
        q, k, v = form.heads(HEADS), form.heads(KV_HEADS), form.heads(KV_HEADS)
        yield Case(
            kernel="attention.causal",
            shape=form.name,
            ours=partial(attention.causal, q, k, v, form.bounds, scale=HEAD_DIM**-0.5, impl="triton"),
            baseline="FlashInfer",
            theirs=partial(flashinfer.single_prefill_with_kv_cache, q, k, v, causal=True),
            work=2 * form.products,
            unit="TFLOP/s",
            graphed=True,
        )
    for form in (_Sequences(batch=1, tokens=4096), _Sequences(batch=64, tokens=4096)):
        decode = _Decode.of(form)
        yield decode.beside("FlashInfer", _flashinfer_decode(flashinfer, decode.q, decode.caches, decode.table))


def _flashinfer_decode(flashinfer: ModuleType, q: torch.Tensor, caches: Pages, table: torch.Tensor) -> Callable[[], object]:
    """Planned once, as an engine plans once for all layers of a step."""
    sequences, pages = table.shape
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        torch.arange(0, sequences * pages + 1, pages, dtype=torch.int32, device="cuda"),
        table.flatten(),
        torch.full((sequences,), caches[0].shape[1], dtype=torch.int32, device="cuda"),
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        caches[0].shape[1],
        q_data_type=BF16,
    )
    return partial(wrapper.run, q, caches)


SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "forward": _attention,
    "decode": _attention_decode,
    "backward": _attention_backward,
    "flashinfer": _flashinfer,
}

if __name__ == "__main__":
    main(SUITES)
