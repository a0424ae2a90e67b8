"""The backward of each of the trainer's losses, and the entropy, on one logits tensor against float64.

The loss is sum(w * logp) with a weight of its own for every row: a kernel that drops or reuses grad_output is right for w = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from rlmismatch.engines import megatron_model
from rlmismatch.kernels import logprob, logprob_backward
from rlmismatch.pins.logprob_ways import comparable
from rlmismatch.transforms import Chain

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine

# Losses of Megatron that have a backward of their own.
_IMPLS: Final[Mapping[str, str]] = {"mcore_unfused": "none", "mcore_native_fused": "native", "mcore_te_fused": "te"}


def row_weights(rows: int) -> torch.Tensor:
    """float32 [N]: grad_output of every row; signs and sizes differ, none is 1."""
    return torch.linspace(-1.5, 2.5, rows) + 0.01


def measure(
    engine: MegatronEngine, logits_NV: torch.Tensor, targets_N: torch.Tensor, hidden_NH: torch.Tensor, head_VH: torch.Tensor
) -> dict[str, torch.Tensor]:
    """``backward/NAME`` -> float64 [6] for every loss that can run here: largest and mean |dlogits - exact|, mean |exact|, the largest
    |dlogits| where this rank does not own the target, whether every value is a bf16 number, largest relative error of dhidden; over all
    ranks. ``entropy/...`` -> [N] by the fixed merge and exact, over the real vocabulary (mask) and all rows (include). Collective.
    """
    shard = engine.shard
    wanted = engine.config.knobs.get("logprob.backward_impl")
    real_NV = logits_NV[:, : shard.vocab_size]
    weights_N = row_weights(len(targets_N)).to(engine.device)
    exact_NV = -real_NV.double().softmax(-1)
    exact_NV[torch.arange(len(targets_N)), targets_N] += 1.0
    exact_NV *= weights_N.double()[:, None]
    columns = slice(shard.start, shard.start + shard.real_width)
    out = {}
    for name, fusion in _IMPLS.items():
        if wanted == "triton" or (fusion == "te" and not megatron_model.has_te_loss(engine.gpt)):
            continue
        grad_NV = _native_grad(engine, logits_NV, targets_N, weights_N, fusion)[:, : shard.real_width]
        out[f"backward/{name}"] = _errors(engine, grad_NV, exact_NV[:, columns], targets_N, head_VH)
    if wanted != "native":
        grad_NV = pinned_grad(engine, real_NV, targets_N, weights_N, Chain())
        out["backward/pin"] = _errors(engine, grad_NV, exact_NV[:, columns], targets_N, head_VH)
    chain = engine.ops.shape.chain
    for padding, width in (("mask", shard.vocab_size), ("include", shard.padded_vocab_size)):
        logp_NV = chain.apply(logits_NV[:, :width].double()).log_softmax(-1)
        out[f"entropy/{padding}/exact"] = _entropy_of(logp_NV)
        out[f"entropy/{padding}/pin"] = entropy(engine, logits_NV, width)
    return out


def pinned(engine: MegatronEngine) -> bool:
    """Whether the gradient is our kernel's: asked for, or the loss in force is one of ours, which scores without autograd."""
    return engine.native_settings.forward_only or engine.config.knobs.get("logprob.backward_impl") == "triton"


def entropy_order(engine: MegatronEngine) -> str:
    """How the entropy is summed: Megatron's loss has none, so that both ways are ours."""
    return str(engine.config.knobs.get("logprob.entropy_reduce", "fixed_merge"))


def entropy(engine: MegatronEngine, logits_NV: torch.Tensor, width: int) -> torch.Tensor:
    """float32 [N]: entropy over the first `width` columns of the logits of all ranks, after the transforms of this run."""
    chain = engine.ops.shape.chain
    chain = chain.without("temperature") if "entropy_before_temperature" in engine.plants else chain
    x_NV = chain.apply(logits_NV[:, :width].float())
    if entropy_order(engine) == "native":
        return _plain_entropy(x_NV)
    return logprob_backward.entropy(x_NV, vocab_size=width, impl=engine.config.impl)


def pinned_grad(
    engine: MegatronEngine, logits_NV: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor, chain: Chain
) -> torch.Tensor:
    """float32 [N, columns of `logits_NV` that this rank holds]: our backward, through `chain`, of a log-prob over all of its columns.

    With grad_downcast_at hard_bf16 it is rounded to bf16, as the fused loss does.
    """
    shard, impl, counted = engine.shard, engine.config.impl, logits_NV.shape[1]
    columns = slice(shard.start, shard.start + shard.columns(shard.tp.rank, counted))
    raw_NV = logits_NV.float().requires_grad_(bool(chain.steps))
    with torch.enable_grad():
        x_NV = chain.apply(raw_NV)
    part = logprob.partials(x_NV.detach().contiguous(), targets_N, vocab_start=0, vocab_size=counted, impl=impl)
    grad_NV = logprob_backward.dlogits(
        x_NV.detach()[:, columns].contiguous(),
        targets_N,
        weights_N,
        normaliser=logprob_backward.normaliser([part], vocab_size=counted, impl=impl),
        vocab_start=shard.start,
        vocab_size=counted,
        impl=impl,
    )
    if chain.steps:
        (whole_NV,) = torch.autograd.grad(x_NV[:, columns], raw_NV, grad_NV)
        grad_NV = whole_NV[:, columns]
    return grad_NV.bfloat16().float() if engine.config.knobs.get("logprob.grad_downcast_at") == "hard_bf16" else grad_NV


def _plain_entropy(x_NV: torch.Tensor) -> torch.Tensor:
    """float32 [N]: entropy in one pass of torch over the whole row."""
    return _entropy_of(x_NV.log_softmax(-1))


def _entropy_of(logp_NV: torch.Tensor) -> torch.Tensor:
    """[N]: a token that a transform cut off has probability 0 and adds 0; 0 times -inf is not a number."""
    return -(logp_NV.exp() * comparable(logp_NV)).sum(dim=1)


def _native_grad(
    engine: MegatronEngine, logits_NV: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor, fusion: str
) -> torch.Tensor:
    """float32 [N, V of this rank]: gradient of sum(w * logp) by Megatron's own loss, padding masked, from float32 logits."""
    shard = engine.shard
    own_NV = logits_NV[:, shard.start : shard.start + shard.width].float()
    own_NV[:, shard.real_width :] = torch.finfo(own_NV.dtype).min  # as megatron_logprob does, and for its reason
    leaf_N1V = own_NV[:, None].detach().requires_grad_()
    with torch.enable_grad(), megatron_model.fused_loss(engine.gpt.config, fusion):
        loss_1N = engine.gpt.compute_language_model_loss(
            targets_N[None], leaf_N1V * 1.0
        )  # the loss overwrites float32 logits, and a leaf must not be
        (grad,) = torch.autograd.grad(loss_1N, leaf_N1V, -weights_N[None])
    return grad[:, 0].float()


def _errors(
    engine: MegatronEngine, grad_NV: torch.Tensor, exact_NV: torch.Tensor, targets_N: torch.Tensor, head_VH: torch.Tensor
) -> torch.Tensor:
    shard = engine.shard
    error_NV = (grad_NV.double() - exact_NV).abs()
    foreign_N = (targets_N < shard.start) | (targets_N >= shard.start + shard.real_width)
    foreign = grad_NV[foreign_N].abs().max() if bool(foreign_N.any()) and grad_NV.shape[1] else grad_NV.new_tensor(torch.nan)
    own_VH = head_VH[: shard.real_width].double()
    hidden = torch.stack([g @ own_VH for g in (grad_NV.double(), exact_NV)])
    dhidden, exact_dhidden = torch.stack(shard.tp.gathered(hidden)).sum(dim=0)
    rounded = torch.equal(grad_NV, grad_NV.bfloat16().float())
    own = torch.stack(
        [
            error_NV.max() if error_NV.numel() else error_NV.new_zeros(()),
            error_NV.sum(),
            exact_NV.abs().sum(),
            foreign.double(),
            error_NV.new_tensor(float(rounded)),
            error_NV.new_tensor(float(error_NV.numel())),
        ]
    )
    ranks_R6 = torch.stack(shard.tp.gathered(own))
    count = ranks_R6[:, 5].sum()
    scale = exact_dhidden.abs().max()
    return torch.stack(
        [
            ranks_R6[:, 0].max(),
            ranks_R6[:, 1].sum() / count,
            ranks_R6[:, 2].sum() / count,
            ranks_R6[:, 3].nan_to_num(torch.inf).amin(),
            ranks_R6[:, 4].amin(),
            (dhidden - exact_dhidden).abs().max() / scale,
        ]
    )
