"""The FlashAttention that vLLM ships, as a candidate of `attention_candidates`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlmismatch.attention_policies import Operands
from rlmismatch.engines.attention_candidates import PAGE, Candidate, Form, pages, version_of


def candidate() -> Candidate:
    """FlashAttention 3 on Hopper, 2 elsewhere. Raises ImportError where this vLLM has none."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    version = 3 if torch.cuda.get_device_capability()[0] == 9 else 2

    def attend(form: Form, given: Sequence[Operands]) -> list[torch.Tensor]:
        rows, keys = len(given[0].q_THD), len(given[0].k_THD)
        q = torch.cat([x.q_THD for x in given])
        starts = {n: torch.arange(len(given) + 1, dtype=torch.int32, device=q.device) * n for n in (rows, keys)}
        shared: dict[str, Any] = {
            "max_seqlen_q": rows,
            "cu_seqlens_q": starts[rows],
            "max_seqlen_k": keys,
            "softmax_scale": given[0].scale,
            "causal": True,
            "fa_version": version,
        }
        if form == "paged":
            k_cache, v_cache, table = pages(given, PAGE)
            used = torch.full((len(given),), keys, dtype=torch.int32, device=q.device)
            out = flash_attn_varlen_func(q, k_cache, v_cache, seqused_k=used, block_table=table, **shared)
        else:
            k, v = (torch.cat([getattr(x, name) for x in given]) for name in ("k_THD", "v_THD"))
            out = flash_attn_varlen_func(q, k, v, cu_seqlens_k=starts[keys], **shared)
        return list(out.split(rows))

    return Candidate(name="flash_attn", version=f"FlashAttention {version} of vllm {version_of('vllm')}", attend=attend)
