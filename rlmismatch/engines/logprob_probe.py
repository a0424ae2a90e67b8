"""What a side's own head and log-softmax make of one set of hidden rows and logits: the capture that the log-prob measures start from.

Both adapters fill a `ProbeSite`; what is run on it is the same for both. Everything lands in an arm's tensors, by name:

    hidden [N, H]  logits [N, V, padding included where the engine has it]  targets [N]  recorded [N]     the scored rows
    reduce/WAY [N]      the log-probs by each way to join shards, of these logits, by the side's own ranks
    head/DTYPE [N]      float64 log-probs of the logits that the side's own GEMM gives in that dtype; ``head/exact`` from float64
    rows/M [N]          the same in the native dtype at M rows a GEMM: ``rows/1``, ``rows/padded``, ``rows/full``
    linear/BxC [N]      a fused linear loss of blocks of B columns and chunks of C rows, from the hidden rows (trainer)
    impl/NAME [N]       each loss that the side can run, on these logits (trainer)
    backward/NAME [...] see `logprob_backward` (trainer)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from rlmismatch import float64
from rlmismatch.pins.logprob_ways import REDUCES, Reduce, blocks
from rlmismatch.transforms import Chain

MAX_ROWS: Final = 64  # of logits kept: 64 x 151936 in bfloat16 are 19 MB


@dataclass(frozen=True, kw_only=True)
class ProbeSite:
    """One side's scored rows, and its own operations on them. Every callable is collective.

    head: hidden rows [M, H], dtype (None: native) -> logits [M, V] of all ranks, by the side's own GEMM; None for a dtype it has not.
    joined: logits of all ranks, targets, way -> log-probs [N] by that way, over the real vocabulary, under the side's chain.
    """

    hidden_NH: torch.Tensor
    logits_NV: torch.Tensor
    targets_N: torch.Tensor
    recorded_N: torch.Tensor
    weight_VH: torch.Tensor  # of all ranks, real rows
    vocab_size: int
    chain: Chain
    head: Callable[[torch.Tensor, torch.dtype | None], torch.Tensor | None]
    joined: Callable[[torch.Tensor, torch.Tensor, Reduce], torch.Tensor | None]
    more: Callable[[], Mapping[str, torch.Tensor]] = dict


def tensors(site: ProbeSite) -> dict[str, torch.Tensor]:
    """Every tensor of the module's table that this side can give, on the CPU. Collective."""
    out = {
        "hidden": site.hidden_NH,
        "logits": site.logits_NV,
        "targets": site.targets_N,
        "recorded": site.recorded_N,
        "head/exact": exact_logprob(float64.matmul(site.hidden_NH.double(), site.weight_VH.double().T), site),
    }
    for reduce in REDUCES:
        joined = site.joined(site.logits_NV, site.targets_N, reduce)
        if joined is not None:
            out[f"reduce/{reduce}"] = joined
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        logits = site.head(site.hidden_NH, dtype)
        if logits is not None:
            out[f"head/{name}"] = exact_logprob(logits, site)
    for name, rows in (("1", 1), ("padded", _bucket(len(site.hidden_NH))), ("full", len(site.hidden_NH))):
        out[f"rows/{name}"] = exact_logprob(_by_rows(site, rows), site)
    out |= site.more()
    return {name: tensor.detach().cpu().contiguous() for name, tensor in out.items()}


def exact_logprob(logits_NV: torch.Tensor, site: ProbeSite) -> torch.Tensor:
    """float64 [N]: the targets' log-probs over the real vocabulary, under the side's chain."""
    x_NV = site.chain.apply(logits_NV[:, : site.vocab_size].double())
    return float64.log_softmax(x_NV).gather(1, site.targets_N[:, None])[:, 0]


def _by_rows(site: ProbeSite, rows: int) -> torch.Tensor:
    """The native head's logits of all rows, `rows` a GEMM; a last GEMM with fewer is filled up with zeros, as a captured graph is."""
    out = []
    for part_MH in blocks(site.hidden_NH, rows):
        padded = torch.nn.functional.pad(part_MH, (0, 0, 0, rows - len(part_MH)))
        logits = site.head(padded, None)
        assert logits is not None
        out.append(logits[: len(part_MH)])
    return torch.cat(out)


def _bucket(rows: int) -> int:
    """The next power of two: how captured graphs pad a batch."""
    return 1 << (rows - 1).bit_length()
