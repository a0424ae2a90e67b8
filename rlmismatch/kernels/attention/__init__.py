"""Attention over packed sequences (`causal`) and a paged KV cache (`paged`), whole or in pieces (`partials`, `merge`): out and log-sum-exp.

One fold serves every form. Keys are cut at absolute positions into splits of `SPLIT` tokens. A split is folded from a fresh state, tile by
tile in ascending order, by an online softmax in float32; it yields a float32 partial (out, lse). Partials are merged by a left fold in
ascending order, starting from the empty one (0, -inf), or from (0, sink) where there are sinks; then one rounding to the model dtype.

Where a token's K and V lie, how many query rows are computed at once, what else is in the batch, and whether the splits of a row run
in one program or in many never enters, so a row has the same bits in full prefill, chunked prefill, paged prefill and decode, and under
context parallelism. A tile or split that a row does not see leaves its state as it was, bit for bit.

Softmax weights enter their product with V rounded to the model dtype, as in FlashAttention; their sum is that of the unrounded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rlmismatch.kernels.attention.checks import check_block_table, require_bounds, require_heads, require_lengths, require_sinks
from rlmismatch.kernels.attention.order import KV_TILE, MAX_HEAD_DIM, SPLIT, Scores, Segment, kv_tile
from rlmismatch.kernels.common.dispatch import Impl, implementation

__all__ = [
    "KV_TILE",
    "MAX_HEAD_DIM",
    "SPLIT",
    "AttentionOut",
    "Impl",
    "Partials",
    "causal",
    "check_block_table",
    "kv_tile",
    "merge",
    "paged",
    "partials",
]


class AttentionOut(NamedTuple):
    """out_THD: contiguous [T, Hq, D] in q's dtype. lse_HT: float32 [Hq, T], natural log of the sum of exp(score), sink included.

    A row that sees no key has out 0 and lse -inf (with a sink: the sink).
    """

    out_THD: torch.Tensor
    lse_HT: torch.Tensor


class Partials(NamedTuple):
    """Attention over J splits apart, ascending by position: out_JTHD float32 [J, T, Hq, D], lse_JHT float32 [J, Hq, T], without sinks."""

    out_JTHD: torch.Tensor
    lse_JHT: torch.Tensor


def causal(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cu_seqlens: Sequence[int],
    *,
    scale: float,
    impl: Impl,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> AttentionOut:
    """Causal self-attention of each of the packed sequences ``[cu_seqlens[s], cu_seqlens[s + 1])``.

    q_THD: [T, Hq, D]; k_THD, v_THD: [T, Hkv, D], same dtype, any strides. Query head h reads KV head ``h // (Hq // Hkv)``.
    cu_seqlens: 0 = first <= ... <= last = T. scale > 0 multiplies ``q @ k`` in the accumulator. window: keys that a row sees, its own
    counted. soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``. sinks_H: [Hq], one more score per head with value 0.
    Raises ValueError for shapes, dtypes, bounds, a window or a head dim that it cannot take.
    """
    scores = Scores(scale=scale, window=window, soft_cap=soft_cap)
    require_heads(q_THD, k_THD, v_THD)
    require_sinks(q_THD, sinks_H)
    tokens = q_THD.shape[0]
    require_bounds("cu_seqlens", cu_seqlens)
    if cu_seqlens[-1] != tokens or k_THD.shape[0] != tokens:
        raise ValueError(f"cu_seqlens ends at {cu_seqlens[-1]}, but there are {tokens} query and {k_THD.shape[0]} key tokens")
    module = implementation("attention", impl, q_THD, k_THD, v_THD, sinks_H)
    return AttentionOut(
        *module.causal(q_THD, k_THD, v_THD, tuple(cu_seqlens), scale=scores.scale, window=window, soft_cap=soft_cap, sinks_H=sinks_H)
    )


def paged(
    q_THD: torch.Tensor,
    k_cache_NBHD: torch.Tensor,
    v_cache_NBHD: torch.Tensor,
    block_table_SN: torch.Tensor,
    query_start_loc: Sequence[int] | torch.Tensor,
    seq_lens: Sequence[int] | torch.Tensor,
    *,
    scale: float,
    impl: Impl,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    table_checked: bool = False,
) -> AttentionOut:
    """Causal attention of the *last* tokens of each sequence over its K and V in a paged cache; otherwise as `causal`.

    q_THD: [T, Hq, D]. k_cache_NBHD, v_cache_NBHD: [blocks, B, Hkv, D], any strides; position p of sequence s lies at
    ``[block_table_SN[s, p // B], p % B]``. query_start_loc: S + 1 row bounds in q; seq_lens: S token counts, cached ones and the
    queries together: sequence s's rows are the last ``query_start_loc[s + 1] - query_start_loc[s]`` of its ``seq_lens[s]`` tokens.
    Host sequences or CPU tensors spare a device synchronisation. Rows from ``query_start_loc[-1]`` on (padding) attend to nothing:
    out 0, lse -inf. Cache slots that no sequence owns are never read. Raises ValueError for a table that points outside the cache or
    more queries than tokens. The table of a GPU is copied to the host for that, which waits for the GPU: whoever has called
    `check_block_table` already says `table_checked`.
    """
    scores = Scores(scale=scale, window=window, soft_cap=soft_cap)
    require_heads(q_THD, k_cache_NBHD, v_cache_NBHD)
    require_sinks(q_THD, sinks_H)
    bounds, lengths = _host_ints(query_start_loc), _host_ints(seq_lens)
    require_bounds("query_start_loc", bounds)
    padding = q_THD.shape[0] - bounds[-1]
    if padding < 0:
        raise ValueError(f"query_start_loc ends at {bounds[-1]}, but there are {q_THD.shape[0]} query rows")
    require_lengths(block_table_SN, k_cache_NBHD.shape[1], bounds, lengths)
    if not table_checked:
        check_block_table(block_table_SN, lengths, blocks=k_cache_NBHD.shape[0], block_size=k_cache_NBHD.shape[1])
    module = implementation("attention", impl, q_THD, k_cache_NBHD, v_cache_NBHD, sinks_H)
    out, lse = module.paged(
        q_THD[: bounds[-1]], k_cache_NBHD, v_cache_NBHD, block_table_SN, bounds, lengths,
        scale=scores.scale, window=window, soft_cap=soft_cap, sinks_H=sinks_H,
    )  # fmt: skip
    if padding:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding))
        lse = torch.nn.functional.pad(lse, (0, padding), value=-torch.inf)
    return AttentionOut(out_THD=out, lse_HT=lse)


def partials(
    q_THD: torch.Tensor,
    k_NHD: torch.Tensor,
    v_NHD: torch.Tensor,
    *,
    q_start: int,
    kv_start: int,
    scale: float,
    impl: Impl,
    window: int | None = None,
    soft_cap: float | None = None,
    split: int = SPLIT,
) -> Partials:
    """One partial a split, of T queries at positions `q_start` on over N keys of the same sequence at positions `kv_start` on.

    Splits are cut at absolute multiples of `split` tokens (a multiple of `kv_tile`); the first and the last hold only the keys that are
    given. Concatenated in ascending order over ranges that are themselves cut at multiples of `SPLIT`, and merged, the partials give
    the bits of `causal` and `paged`. Other cuts and other values of `split` are other orders of additions, for whoever measures those.
    Raises ValueError as `causal` does, and for no keys.
    """
    scores = Scores(scale=scale, window=window, soft_cap=soft_cap)
    require_heads(q_THD, k_NHD, v_NHD)
    tile = kv_tile(q_THD.shape[-1], q_THD.dtype)
    if split < 1 or split % tile:
        raise ValueError(f"a split must be a multiple of {tile} tokens, got {split}")
    if q_start < 0 or kv_start < 0 or k_NHD.shape[0] == 0:
        raise ValueError(f"positions start at 0 and keys are needed, got q_start {q_start}, kv_start {kv_start}, {k_NHD.shape[0]} keys")
    segment = Segment(0, q_THD.shape[0], q_start, -kv_start, kv_start, kv_start + k_NHD.shape[0])
    module = implementation("attention", impl, q_THD, k_NHD, v_NHD)
    return Partials(*module.partials(q_THD, k_NHD, v_NHD, segment, scores=scores, split=split))


def merge(parts: Sequence[Partials], *, impl: Impl, out_dtype: torch.dtype, sinks_H: torch.Tensor | None = None) -> AttentionOut:
    """The left fold over all partials, in the order given, from (0, sink) or (0, -inf), and one rounding to `out_dtype`.

    parts: of the same rows and heads, in ascending order of position, from however many ranks. Raises ValueError for none.
    """
    if not parts:
        raise ValueError("a merge needs at least one partial")
    out_JTHD = parts[0].out_JTHD if len(parts) == 1 else torch.cat([p.out_JTHD for p in parts])
    lse_JHT = parts[0].lse_JHT if len(parts) == 1 else torch.cat([p.lse_JHT for p in parts])
    splits, tokens, heads, _ = out_JTHD.shape
    if lse_JHT.shape != (splits, heads, tokens) or out_JTHD.dtype != torch.float32 or lse_JHT.dtype != torch.float32:
        raise ValueError(f"partials {tuple(out_JTHD.shape)} {out_JTHD.dtype} and {tuple(lse_JHT.shape)} {lse_JHT.dtype} do not fit")
    require_sinks(out_JTHD[0], sinks_H)
    module = implementation("attention", impl, out_JTHD, lse_JHT, sinks_H)
    return AttentionOut(*module.merge(out_JTHD, lse_JHT, sinks_H, out_dtype=out_dtype))


def _host_ints(values: Sequence[int] | torch.Tensor) -> tuple[int, ...]:
    return tuple(values.tolist() if isinstance(values, torch.Tensor) else values)
