"""The contract of logprob.backward, found by asking: the gradient of synthetic logits through the live loss, and the entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from rlmismatch.contract import Evidence, Reading, not_applicable, read, unknown
from rlmismatch.engines import megatron_backward, megatron_trials
from rlmismatch.engines.logprob_knobs import trial_targets
from rlmismatch.engines.megatron_backward import pinned
from rlmismatch.engines.megatron_evidence import Fields, fill
from rlmismatch.engines.megatron_trials import LossBehaviour
from rlmismatch.transforms import Chain, parse_texts

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine

# Of the largest |dlogits|. A float32 gradient is good to 1e-6, one that was rounded to bfloat16 to 2^-8; a wrong formula is off by 1e-1.
_TOLERANCE: Final = 2.0**-7
_SAME_NATS: Final = 1e-4
_NAMES: Final = ("dlogits", "entropy_reduction", "grad_downcast_at", "autograd_path")


def logprob_backward(engine: MegatronEngine, forward: LossBehaviour) -> Fields:
    """The fields of logprob.backward. forward: how the same loss treats logits, which its gradient must fit. Collective."""
    chain = engine.native_settings.chain
    if not chain.elementwise:
        return fill(not_applicable("a distribution that is cut off is only scored: no gradient is taken of it"), *_NAMES)
    logits_TV = megatron_trials.synthetic_logits(engine.shard)
    targets_T = trial_targets(logits_TV[:, : engine.shard.vocab_size], chain)
    weights_T = megatron_backward.row_weights(len(targets_T))
    logits_TV, targets_T, weights_T = (x.to(engine.device) for x in (logits_TV, targets_T, weights_T))
    if pinned(engine):
        path, source = ["kernels.logprob_backward"], "trial: synthetic logits through our backward"
        counted = engine.shard.counted(engine.native_settings.padding)
        grad_TV = megatron_backward.pinned_grad(engine, logits_TV[:, :counted], targets_T, weights_T, chain)
    else:
        source = "trial: gradient of synthetic float32 logits through compute_language_model_loss"
        live = _live_grad(engine, logits_TV, targets_T, weights_T)
        if live is None:
            return {**fill(unknown(f"{source}: the loss has none"), *_NAMES), "entropy_reduction": _entropy(engine, logits_TV)}
        grad_TV, path = live
    return {
        **_formula(engine, forward, (logits_TV, targets_T, weights_T), grad_TV, source),
        "entropy_reduction": _entropy(engine, logits_TV),
        "autograd_path": read(path, f"{source}: its functions"),
    }


def loss_that_ran(engine: MegatronEngine, backward: Fields, claimed: str) -> Reading:
    """The trainer's loss by the function that its gradient came through: what the config says is enabled need not be what ran.

    claimed: what settings and config say, and all there is where no gradient of Megatron's own loss was taken.
    """
    path = backward["autograd_path"]
    if path.evidence is not Evidence.READ or pinned(engine):
        return read(claimed, "settings of the loss that is in force; config.cross_entropy_loss_fusion is read at every call")
    names = [name for module, name in _LOSSES.items() if any(f.startswith(f"{module}.") for f in path.value)]
    return read(names[0] if len(names) == 1 else f"another loss: {', '.join(path.value)}", path.source)


# Where each of Megatron's losses has its autograd function -> its name.
_LOSSES: Final = {
    "megatron.core.tensor_parallel.cross_entropy": "mcore_unfused",
    "megatron.core.fusions.fused_cross_entropy": "mcore_native_fused",
    "transformer_engine": "mcore_te_fused",
}


def _live_grad(
    engine: MegatronEngine, logits_TV: torch.Tensor, targets_T: torch.Tensor, weights_T: torch.Tensor
) -> tuple[torch.Tensor, list[str]] | None:
    """(float32 [T, V of this rank] gradient of sum(w * logp) by the loss in force, its Python autograd functions, first to last).

    None where the loss is cut off from the logits.
    """
    shard = engine.shard
    leaf_T1V = logits_TV[:, None, shard.start : shard.start + shard.width].detach().clone().requires_grad_()
    with torch.enable_grad(), megatron_trials.native_arithmetic(engine):
        # The loss overwrites float32 logits, and a leaf must not be.
        loss_1T = engine.gpt.compute_language_model_loss(targets_T[None], leaf_T1V * 1.0)
        if not loss_1T.requires_grad:
            return None
        (grad_T1V,) = torch.autograd.grad(loss_1T, leaf_T1V, -weights_T[None])
    return grad_T1V[:, 0].float(), _functions(loss_1T)


def _functions(loss: torch.Tensor) -> list[str]:
    """Full names of the autograd functions behind `loss` that are written in Python, forward order: the rest is plain torch."""
    names: list[str] = []
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            function = type(node)._forward_cls
            names.insert(0, f"{function.__module__}.{function.__qualname__}")
        left += [parent for parent, _ in node.next_functions]
    return names or ["plain torch"]


def _formula(engine: MegatronEngine, forward: LossBehaviour, trial: tuple[torch.Tensor, ...], grad_TV: torch.Tensor, source: str) -> Fields:
    """What gradient it is, and where it was rounded, of the log-prob that the forward was found to report. Collective."""
    if Evidence.UNKNOWN in (forward.chain.evidence, forward.padding.evidence):
        return fill(unknown(f"{source}: what the forward reports is not known, so neither is its gradient"), "dlogits", "grad_downcast_at")
    shard, (logits_TV, targets_T, weights_T) = engine.shard, trial
    counted = shard.counted(forward.padding.value)
    exact_TV = _exact_grad(logits_TV, targets_T, weights_T, parse_texts(forward.chain.value), counted)
    columns = slice(shard.start, shard.start + shard.columns(shard.tp.rank, counted))
    exact_TV, grad_TV = exact_TV[:, columns], grad_TV[:, : columns.stop - columns.start]
    owns_T = (targets_T >= columns.start) & (targets_T < columns.stop)
    errors = [(grad_TV.double() - exact).abs() for exact in (exact_TV, exact_TV * owns_T[:, None])]
    rounded = torch.equal(grad_TV, grad_TV.bfloat16().float())
    own_4 = torch.tensor([*(float(e.max()) if e.numel() else 0.0 for e in errors), float(exact_TV.abs().sum()), float(not rounded)])
    everywhere, owners_only, _, full = (float(x) for x in torch.stack(shard.tp.gathered(own_4.to(engine.device))).amax(dim=0))
    scale = float(weights_T.abs().max())  # of a gradient: |onehot - p| is at most 1
    if not min(everywhere, owners_only) <= _TOLERANCE * scale:
        why = f"{source}: off by {min(everywhere, owners_only):.2g} from the gradient of the log-prob that is reported"
        return fill(unknown(why), "dlogits", "grad_downcast_at")
    dtype = "float32" if full else "bfloat16"
    zero = ", zero where another rank owns the target" if owners_only < everywhere else ""
    return {
        "dlogits": read(f"softmax minus one-hot{zero}, {dtype}", source),
        "grad_downcast_at": read("final_write" if full else "hard_bf16", source),
    }


def _exact_grad(logits_TV: torch.Tensor, targets_T: torch.Tensor, weights_T: torch.Tensor, chain: Chain, counted: int) -> torch.Tensor:
    """float64 [T, counted]: gradient of sum(w * logp) over the first `counted` columns."""
    leaf_TV = logits_TV[:, :counted].double().requires_grad_()
    with torch.enable_grad():
        logp_T = chain.apply(leaf_TV).log_softmax(-1).gather(1, targets_T[:, None])[:, 0]
        (grad_TV,) = torch.autograd.grad(logp_T, leaf_TV, weights_T.double())
    return grad_TV


def _entropy(engine: MegatronEngine, logits_TV: torch.Tensor) -> Reading:
    """Which distribution the entropy is of, from synthetic logits. Collective."""
    source, width = "trial: entropy of synthetic logits", engine.shard.vocab_size
    chain = engine.native_settings.chain
    order = megatron_backward.entropy_order(engine)
    live_T = megatron_backward.entropy(engine, logits_TV, width).double()
    for words, candidate in (("after", chain), ("before", chain.without("temperature"))):
        logp_TV = candidate.apply(logits_TV[:, :width].double()).log_softmax(-1)
        if float((live_T + (logp_TV.exp() * logp_TV).sum(dim=1)).abs().max()) <= _SAME_NATS:
            return read(f"{order}, {words} temperature", source)
    return unknown(f"{source}: it is the entropy of no known distribution")
