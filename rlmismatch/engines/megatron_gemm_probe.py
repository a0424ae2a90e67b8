"""The trainer's part of the GEMM probe: the inputs of its live products out of a forward, and its own ways to sum over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch

from rlmismatch.engines import gemm_flips, gemm_probe, megatron_sums
from rlmismatch.engines.gemm_probe import Product, Seen, SumSite
from rlmismatch.kernels import reduce
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.pins.megatron import native_row_partial
from rlmismatch.pins.megatron_te import te_gemm, te_norm
from rlmismatch.tokens import Sequence

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine


Columns = Mapping[str, slice | torch.Tensor]


@contextlib.contextmanager
def watching(engine: MegatronEngine) -> Iterator[Seen]:
    """Keeps the inputs of every product of the forwards while the context is open. Collective under sequence parallelism."""
    seen = Seen()
    te = engine.config.trainer_spec == "te"

    def column(name: str, module: Any) -> Patch:
        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def forward_impl(input: torch.Tensor, **rest: Any) -> Any:
                whole = torch.cat(engine.tp.gathered(input)) if rest["sequence_parallel"] else input
                seen.add(name, whole[: engine.ops.tokens, 0])
                return native(input=input, **rest)

            def te_forward(x_sBH: torch.Tensor) -> Any:
                normed = te_norm(module, x_sBH)
                whole = torch.cat(engine.tp.gathered(normed)) if engine.config.sp else normed
                seen.add(name, whole[: engine.ops.tokens, 0])
                return native(x_sBH)

            return te_forward if te and name != "lm_head" else forward_impl

        place = "forward" if te and name != "lm_head" else "_forward_impl"
        return Patch(target=module, name=place, make=make, pins=(), label=f"probe {name}")

    def row(name: str, module: Any) -> Patch:
        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def forward(input_: torch.Tensor) -> Any:
                seen.add(name, input_[: engine.ops.tokens, 0])
                return native(input_)

            return forward

        return Patch(target=module, name="forward", make=make, pins=(), label=f"probe {name}")

    patches = [column("lm_head", engine.gpt.output_layer)]
    for i, layer in enumerate(engine.gpt.decoder.layers):
        here, attention, mlp = f"layers.{i}", layer.self_attention, layer.mlp
        patches += [column(f"{here}.qkv", attention.linear_qkv), row(f"{here}.o_proj", attention.linear_proj)]
        patches += [column(f"{here}.gate_up", mlp.linear_fc1), row(f"{here}.down_proj", mlp.linear_fc2)]
    with installed(patches):
        yield seen


def alone(engine: MegatronEngine, sequences: Seq[Sequence]) -> dict[str, torch.Tensor]:
    """The ``alone`` fact: the first tokens of two sequences scored without those behind them, which causal attention keeps from mattering,
    and with them. Collective."""
    pairs = []
    for sequence in sequences[:2]:
        ids = list(sequence.token_ids)
        whole_S = -engine.forward(ids, [*ids[1:], 0])
        for length in sorted({2, len(ids) // 2} - {0, 1}):
            few_S = -engine.forward(ids[:length], [*ids[1:length], 0])
            pairs.append((few_S[: length - 1], whole_S[: length - 1]))
    return gemm_probe.alone({"forward": pairs})


def replay(engine: MegatronEngine, seen: Seen, sequences: Seq[Sequence], *, interpreted: bool) -> dict[str, torch.Tensor]:
    """The ``replay``, ``sum`` and ``flag`` facts, with no pin in force. Collective."""
    decoded = sum(bool(s.response_ids) for s in sequences)
    site = SumSite(tp=engine.tp, ways=_ways(engine), backends={}, decode_rows=decoded)
    flags = gemm_flips.live_flags(engine.config.device)
    return gemm_probe.tensors(_products(engine, seen), site, impl=engine.config.impl, interpreted=interpreted, flags=flags)


def _products(engine: MegatronEngine, seen: Seen) -> Iterator[Product]:
    te = engine.config.trainer_spec == "te"

    def column(name: str, module: Any, weight: torch.Tensor, columns: Columns) -> Product:
        bias = getattr(module, "bias", None)
        bias = bias.detach() if isinstance(bias, torch.Tensor) and bias.numel() else None

        def native(x_MK: torch.Tensor) -> torch.Tensor:
            if te and name != "lm_head":
                return te_gemm(module, x_MK[:, None].contiguous(), bias)[:, 0]
            product: torch.Tensor = module._forward_impl(
                input=x_MK[:, None].contiguous(),
                weight=weight,
                bias=bias,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=False,
                sequence_parallel=False,
                tp_group=engine.tp.group,
                grad_output_buffer=None,
            )
            return product[:, 0]

        return Product(name=name, x_MK=seen.joined(name), weight_NK=weight, bias_N=bias, native=native, columns=columns)

    def row(name: str, module: Any) -> Product:
        def native(x_MK: torch.Tensor) -> torch.Tensor:
            x_MBK = x_MK[:, None].contiguous()
            return (te_gemm(module, x_MBK, None) if te else native_row_partial(module, x_MBK))[:, 0]

        weight = module.weight.detach()
        whole = {name: slice(None)}
        return Product(name=name, x_MK=seen.joined(name), weight_NK=weight, native=native, columns=whole, partial=True)

    for i, layer in enumerate(engine.gpt.decoder.layers):
        here, attention, mlp = f"layers.{i}", layer.self_attention, layer.mlp
        qkv = {f"{here}.{name}_proj": columns for name, columns in engine.ops.qkv_columns().items()}
        yield column(f"{here}.qkv", attention.linear_qkv, attention.linear_qkv.weight.detach(), qkv)
        yield row(f"{here}.o_proj", attention.linear_proj)
        width = mlp.linear_fc1.weight.shape[0] // 2
        halves = {f"{here}.gate_proj": slice(0, width), f"{here}.up_proj": slice(width, None)}
        yield column(f"{here}.gate_up", mlp.linear_fc1, mlp.linear_fc1.weight.detach(), halves)
        yield row(f"{here}.down_proj", mlp.linear_fc2)
    head = engine.gpt.shared_embedding_or_output_weight() if engine.live_tied else engine.gpt.output_layer.weight
    dtype = engine.ops.shape.head.dtype or head.dtype
    yield column("lm_head", engine.gpt.output_layer, head.detach().to(dtype), {"lm_head": slice(0, engine.shard.real_width)})


def _ways(engine: MegatronEngine) -> dict[str, gemm_probe.Sum]:
    """Megatron's own collectives whichever it runs by itself, and rank order; whole sums [M, N] on every rank."""
    from megatron.core.tensor_parallel import mappings

    tp, impl = engine.tp, engine.config.impl
    scattered = megatron_sums.by_reduce_scatter(tp)
    return {
        "all_reduce": lambda x_MN: mappings.reduce_from_tensor_model_parallel_region(x_MN.contiguous(), group=tp.group),
        "reduce_scatter": lambda x_MN: scattered(x_MN[:, None].contiguous())[:, 0],
        "rank_order": lambda x_MN: reduce.fold(tp.gathered(x_MN), impl=impl, out_dtype=x_MN.dtype),
    }
