"""The trainer's part of the attention probe: core attention's live operands and output, and its backward for a fixed dout.

The backward is that of the module as it stands, plants included, run three times: what differs between them is its floor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from rlmismatch import attention_policies
from rlmismatch.contract import read
from rlmismatch.engines.attention_capture import Seen, joined, layers_kept, try_candidates
from rlmismatch.engines.attention_exports import exported
from rlmismatch.engines.attention_knobs import BACKWARD
from rlmismatch.engines.megatron_evidence import Fields, by_table, dtype_of, forward_only
from rlmismatch.engines.megatron_model import causal_mask
from rlmismatch.kernels import attention
from rlmismatch.kernels.attention import reference as attention_fp64
from rlmismatch.kernels.attention_backward import causal_backward
from rlmismatch.pins.hooks import Patch, installed

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine

REPEATS: Final = 3
GRADIENTS: Final = ("dq", "dk", "dv")
FACTS: Final = ("largest_error", "mean_error", "mean_size", "slope", "repeats")  # of one gradient, over all ranks
_TRIAL_ROWS: Final = 24
_SLOPE: Final = 2.0**-7  # of a gradient over the exact one; rounding to bfloat16 has no bias
_ERROR: Final = 2.0**-5  # mean error over mean size: far above what rounding costs, far below another formula's


@contextlib.contextmanager
def watching(engine: MegatronEngine) -> Iterator[Seen]:
    """Keeps what core attention of `layers_kept` reads and writes of the one forward made while the context is open. Collective."""
    seen = Seen()

    def hook(index: int) -> Patch:
        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                out: torch.Tensor = native(query, key, value, *args, **kwargs)
                out_SBHD = out.view(*query.shape[:2], -1, query.shape[-1])
                named = {"q": query, "k": key, "v": value, "out": out_SBHD}
                seen.keep(index, **{name: engine.ops.rows_of(x_SBHD) for name, x_SBHD in named.items()})
                return out

            return forward

        core = engine.gpt.decoder.layers[index].self_attention.core_attention
        return Patch(target=core, name="forward", make=make, pins=(), label="probe")

    with installed([hook(i) for i in layers_kept(engine.model.num_layers)]):
        yield seen


def probe(engine: MegatronEngine, seen: Seen) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of `attention_capture`, where one rank holds the whole sequence with ``backward/...``; and notes. Collective."""
    out = joined(seen.tensors, engine.tp, kv_copies=max(1, engine.tp.size // engine.model.num_kv_heads))
    if engine.cp.size == 1:
        for layer in layers_kept(engine.model.num_layers):
            out |= _backward(engine, seen, layer)
            out |= _strided(engine, seen, layer)
    scale = engine.ops.shape.softmax_scale
    if engine.cp.size == 1:
        out |= exported(seen.tensors, num_layers=engine.model.num_layers, scale=scale, impl=engine.config.impl, tp=engine.tp)
    tried, notes = try_candidates(engine.config, seen, rank=engine.tp.rank, scale=scale)
    return {**out, **tried, "window": torch.tensor(engine.model.sliding_window or 0)}, notes


def _strided(engine: MegatronEngine, seen: Seen, layer: int) -> dict[str, torch.Tensor]:
    """``layout/SOURCE/layers.I`` -> float64 [2]: elements of the output that differ between contiguous operands and views into one buffer
    that holds Q, K and V of a token side by side, as a fused projection leaves them; and all elements. SOURCE: native, pin. Collective.
    """
    core = engine.gpt.decoder.layers[layer].self_attention.core_attention
    q, k, v = plain = tuple(seen.tensors[f"layers.{layer}.{name}"].contiguous() for name in ("q", "k", "v"))
    packed, heads, kv_heads = torch.cat(plain, 1), q.shape[1], k.shape[1]
    views = (packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :])
    bounds, scale = [0, len(q)], engine.ops.shape.softmax_scale
    local = engine.config.trainer_spec == "local"
    mask = causal_mask(bounds[1], engine.device) if local else None
    mask_type = engine.gpt.decoder.layers[0].self_attention.attn_mask_type

    def native(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = core(q[:, None], k[:, None], v[:, None], mask, attn_mask_type=mask_type)
        return out

    def pin(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention.causal(q, k, v, bounds, scale=scale, impl=engine.config.impl).out_THD

    out = {}
    for source, attend in (("native", native), ("pin", pin)):
        first, second = attend(q, k, v), attend(*views)
        own = torch.tensor([float((first != second).sum()), float(first.numel())], dtype=torch.float64, device=engine.device)
        out[f"layout/{source}/layers.{layer}"] = torch.stack(engine.tp.gathered(own)).sum(0).cpu()
    return out


def _backward(engine: MegatronEngine, seen: Seen, layer: int) -> dict[str, torch.Tensor]:
    """``backward/SOURCE/layers.I.dq`` (dk, dv) -> float64 [5], its FACTS: |error| against float64, mean |exact|, slope of the gradient over
    the exact one, and whether three runs gave the same bits. Collective.

    SOURCE: ``native``; ``pin`` (our backward from our forward's out and lse); ``pin from native`` (our backward from the native forward's
    out and the float64 lse, rounded: Megatron's own attention exports none). The knob backward_backend leaves one of native and pin.
    """
    core = engine.gpt.decoder.layers[layer].self_attention.core_attention
    q, k, v, theirs = (seen.tensors[f"layers.{layer}.{name}"] for name in ("q", "k", "v", "out"))
    scale, impl, bounds = engine.ops.shape.softmax_scale, engine.config.impl, [0, len(q)]
    window = engine.model.sliding_window
    dout_THD = fixed_dout(engine, q)
    exact = exact_gradients((q, k, v), dout_THD, scale=scale, window=window)
    ours = attention.causal(q, k, v, bounds, scale=scale, window=window, impl=impl)
    lse_HT = attention_fp64.causal(q, k, v, bounds, scale=scale, window=window, out_dtype=torch.float64)[1].float()

    def pinned(out_THD: torch.Tensor, lse_HT: torch.Tensor) -> Sequence[torch.Tensor]:
        grads = causal_backward(q, k, v, out_THD, lse_HT, dout_THD, bounds, scale=scale, window=window, impl=impl)
        return grads.dq_THD, grads.dk_THD, grads.dv_THD

    sources: dict[str, Callable[[], Sequence[torch.Tensor]]] = {
        "native": lambda: _native_gradients(engine, core, (q, k, v), dout_THD),
        "pin": lambda: pinned(ours.out_THD, ours.lse_HT),
        "pin from native": lambda: pinned(theirs.contiguous(), lse_HT),
    }
    asked = engine.config.knobs.get(BACKWARD)
    left_out = {"native": ("pin", "pin from native"), "triton": ("native",)}.get(str(asked), ())
    out = {}
    for source, gradients in sources.items():
        if source in left_out:
            continue
        runs = [gradients() for _ in range(REPEATS)]
        for i, name in enumerate(GRADIENTS):
            repeats = all(torch.equal(run[i], runs[0][i]) for run in runs[1:])
            out[f"backward/{source}/layers.{layer}.{name}"] = _facts(engine, runs[0][i], exact[i], repeats)
    return out


def fixed_dout(engine: MegatronEngine, q_THD: torch.Tensor) -> torch.Tensor:
    """[T, this rank's Hq, D] in q's dtype: normal numbers that depend on the global head alone, whatever TP is."""
    generator = torch.Generator().manual_seed(engine.config.seed)
    whole = torch.randn(q_THD.shape[0], engine.model.num_heads, q_THD.shape[2], generator=generator)
    start = engine.tp.rank * q_THD.shape[1]
    return whole[:, start : start + q_THD.shape[1]].to(q_THD)


def _native_gradients(engine: MegatronEngine, core: Any, qkv: Sequence[torch.Tensor], dout_THD: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv of the live core attention, in its dtype."""
    leaves = [x_THD[:, None].detach().contiguous().requires_grad_() for x_THD in qkv]
    local = engine.config.trainer_spec == "local"
    mask = causal_mask(len(qkv[0]), engine.device) if local else None
    mask_type = engine.gpt.decoder.layers[0].self_attention.attn_mask_type
    was_training = core.training
    core.train()  # what a backward needs is kept in train mode alone by some of Transformer Engine's backends; dropout is 0 but for a plant
    try:
        with torch.enable_grad():
            out_SBN = core(*leaves, mask, attn_mask_type=mask_type)
            found = torch.autograd.grad(out_SBN, leaves, dout_THD.flatten(1)[:, None].contiguous())
    finally:
        core.train(was_training)
    return tuple(g[:, 0] for g in found)


def exact_gradients(
    qkv: Sequence[torch.Tensor], dout_THD: torch.Tensor, *, scale: float, window: int | None, sink: float | None = None
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv in float64, unrounded, of causal softmax attention, in a window and with a sink if there is one: torch
    differentiates the formula."""
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    q, k, v = leaves
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    with torch.enable_grad():
        score_HTN = torch.einsum("thd,nhd->htn", q, k.repeat_interleave(group, dim=1)) * scale
        seen = attention_policies.visible(tokens, tokens, window, q.device)
        score_HTN = score_HTN.masked_fill(~seen, -torch.inf)
        if sink is not None:
            score_HTN = torch.cat([score_HTN, score_HTN.new_full((heads, tokens, 1), sink)], -1)
        weight_HTN = score_HTN.softmax(-1)[..., : len(k)]
        out_THD = torch.einsum("htn,nhd->thd", weight_HTN, v.repeat_interleave(group, dim=1))
        return torch.autograd.grad(out_THD, leaves, dout_THD.double())


def _facts(engine: MegatronEngine, grad_THD: torch.Tensor, exact_THD: torch.Tensor, repeats: bool) -> torch.Tensor:
    """float64 [5]: FACTS, over the ranks of the TP group. Collective."""
    error = (grad_THD.double() - exact_THD).abs()
    own = torch.stack(
        [
            error.max(),
            error.sum(),
            exact_THD.abs().sum(),
            (grad_THD.double() * exact_THD).sum(),
            exact_THD.square().sum(),
            error.new_tensor(float(repeats)),
            error.new_tensor(float(error.numel())),
        ]
    )
    ranks_R7 = torch.stack(engine.tp.gathered(own)).cpu()
    total = ranks_R7.sum(0)
    return torch.stack([ranks_R7[:, 0].max(), total[1] / total[6], total[2] / total[6], total[3] / total[4], ranks_R7[:, 5].amin()])


def backward_readings(engine: MegatronEngine) -> Fields:
    """The fields of attention.backward: from three backward runs of the live module on known operands. Collective."""
    names = ("dq", "dk", "dv", "saved_forward_state", "backward_backend", "deterministic")
    if engine.cp.size > 1:
        return forward_only(*names)
    source = f"trial: {_TRIAL_ROWS} rows through core_attention and back, {REPEATS} times"
    te, size = engine.config.trainer_spec == "te", engine.tp.size
    generator = torch.Generator().manual_seed(0)
    heads = (engine.model.num_heads, engine.model.num_kv_heads, engine.model.num_kv_heads)
    weight = engine.gpt.decoder.layers[0].self_attention.linear_qkv.weight
    qkv = tuple(torch.randn(_TRIAL_ROWS, max(1, n // size), engine.model.head_dim, generator=generator).to(weight) for n in heads)
    core, dout_THD = engine.gpt.decoder.layers[0].self_attention.core_attention, fixed_dout(engine, qkv[0])
    runs = [_native_gradients(engine, core, qkv, dout_THD) for _ in range(REPEATS)]
    shape = engine.ops.shape
    exact = exact_gradients(qkv, dout_THD, scale=shape.softmax_scale, window=shape.window, sink=shape.sink)
    repeats = all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    fields: Fields = {}
    for name, grad, truth in zip(GRADIENTS, runs[0], exact, strict=True):
        facts = dict(zip(FACTS, _facts(engine, grad, truth, repeats).tolist(), strict=True))
        fields[name] = read(_formula(facts, dtype_of(grad)), source)
    saved = "out, lse" if te else "probabilities"
    where = "transformer_engine: attention/dot_product_attention/backends.py" if te else "transformer/dot_product_attention.py: autograd"
    return {
        **fields,
        "saved_forward_state": by_table(saved, where),
        "backward_backend": by_table("transformer_engine" if te else "torch autograd of bmm and softmax", where),
        "deterministic": read(repeats, source),
    }


def _formula(facts: Mapping[str, float], dtype: str) -> str:
    """``softmax attention, bfloat16``, or what else the gradient is."""
    if abs(facts["slope"] - 1.0) > _SLOPE:
        return f"{facts['slope']:.4g} times softmax attention's, {dtype}"
    return f"softmax attention's, {dtype}" if facts["mean_error"] <= _ERROR * facts["mean_size"] else f"another formula's, {dtype}"
