"""The pins inside a live vLLM model: where each operation is hooked, and what stands there while its pin is on.

Written for the V1 model runner in eager mode, where every hook below is called; under compilation most of them are silently
inert, which is why calls are counted. This module takes the live objects as they are and does not import vllm.

Shapes: T tokens of one engine step, H hidden, Hq / Hkv heads and I ffn columns of this rank, D head dim, V real vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from rlmismatch.attention_policies import Policy
from rlmismatch.kernels import gemm, norm, reduce, rope, swiglu
from rlmismatch.kernels.gemm import reference as gemm_fp64
from rlmismatch.kernels.norm import reference as norm_fp64
from rlmismatch.kernels.reduce import reference as reduce_fp64
from rlmismatch.kernels.rope import reference as rope_fp64
from rlmismatch.kernels.swiglu import reference as swiglu_fp64
from rlmismatch.pins.hooks import OpSwitch, Patch
from rlmismatch.pins.logprob_ways import Way
from rlmismatch.pins.vllm_attention import PagedCache, attention_patches
from rlmismatch.pins.vllm_live import LiveModel
from rlmismatch.pins.vllm_logprob import NATIVE_WAY, LogprobOp

# The name under which the head's first output of a prefill step, the row it samples from, waits for the prompt's rows.
_SAMPLED_ROW: Final = "lm_head.sampled"


Native = Callable[..., torch.Tensor]


class VllmPins:
    """The hooks of one arm."""

    def __init__(self, live: LiveModel, *, impl: gemm.Impl, switch: OpSwitch, way: Way = NATIVE_WAY, policy: Policy | None = None) -> None:
        self._live = live
        self._impl = impl
        self._switch = switch
        self._logprob = LogprobOp(live, impl=impl, switch=switch, way=way)
        self._cache = PagedCache()
        self._policy = policy

    def patches(self) -> tuple[Patch, ...]:
        """What the arm needs to hook: the active pins' operations, all of them under a probe, the log-prob for its knob."""
        logprob = self._logprob.patches()
        return (*self._switch.hooks(self._all()), *(logprob if self._logprob.way != NATIVE_WAY else self._switch.hooks(logprob)))

    def _attention(self, layer: Any, boundary: str) -> tuple[Patch, ...]:
        settings: dict[str, Any] = {"impl": self._impl, "switch": self._switch, "cache": self._cache, "policy": self._policy}
        return attention_patches(layer, boundary, window=self._live.window, sink=self._live.sink, **settings)

    def boundaries(self, group: torch.distributed.ProcessGroup | None) -> dict[str, torch.Tensor]:
        """The recorder's boundaries in canonical layout: the head's rows of one prefill joined to [T, V]. Collective."""
        kept = self._switch.recorder.boundaries(group)
        sampled = kept.pop(_SAMPLED_ROW, None)
        if sampled is not None:
            kept["lm_head"] = torch.cat([kept["lm_head"], sampled])
        return kept

    def _all(self) -> tuple[Patch, ...]:
        live, out = self._live, []
        for i, layer in enumerate(live.layers):
            name, attn, mlp = f"layers.{i}", layer.self_attn, layer.mlp
            out += [
                self._norm(layer.input_layernorm, f"{name}.input_norm"),
                self._column(attn.qkv_proj, f"{name}.qkv", self._split_qkv(name, attn)),
                *self._qk_norm(attn, name),
                *self._attention(attn.attn, f"{name}.attention"),
                self._row(attn.o_proj, f"{name}.o_proj"),
                self._norm(layer.post_attention_layernorm, f"{name}.post_attention_norm"),
                self._column(mlp.gate_up_proj, f"{name}.gate_up", self._split_gate_up(name)),
                self._activation(mlp.act_fn, f"{name}.activation"),
                self._row(mlp.down_proj, f"{name}.down_proj"),
            ]
        return (*out, *self._rope(), self._norm(live.model.model.norm, "final_norm"), self._head())

    def _norm(self, module: Any, boundary: str) -> Patch:
        eps, impl, switch = self._live.eps, self._impl, self._switch

        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def alone(x_TH: torch.Tensor) -> torch.Tensor:
                y_TH: torch.Tensor = switch.run(
                    "norm",
                    native=lambda: native(x_TH),
                    pinned=lambda: norm.rms_norm(x_TH, module.weight, eps, impl=impl),
                    exact=lambda: norm_fp64.rms_norm(x_TH, module.weight, eps, out_dtype=torch.float64),
                    parts=lambda y_TH: {boundary: y_TH},
                    split="whole",
                )
                return y_TH

            def behind_add(x_TH: torch.Tensor, residual_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                def native_op() -> tuple[torch.Tensor, torch.Tensor]:
                    y_TH, sum_TH = native(x_TH.clone(), residual_TH.clone())  # it may write into its operands
                    return y_TH, sum_TH

                def pinned() -> tuple[torch.Tensor, torch.Tensor]:
                    out = norm.add_rms_norm(x_TH, residual_TH, module.weight, eps, impl=impl)
                    return out.y, out.residual

                return switch.run(
                    "norm",
                    native=native_op,
                    pinned=pinned,
                    exact=lambda: norm_fp64.add_rms_norm(x_TH, residual_TH, module.weight, eps, out_dtype=torch.float64),
                    parts=lambda out: {boundary: out[0]},
                    split="whole",
                )

            def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
                return alone(x) if residual is None else behind_add(x, residual)

            return forward

        return Patch(target=module, name="forward", make=make, pins=("norm",), label=boundary)

    def _qk_norm(self, attn: Any, name: str) -> tuple[Patch, ...]:
        if not hasattr(attn, "q_norm"):
            return ()
        return (self._head_norm(attn.q_norm, f"{name}.q_norm"), self._head_norm(attn.k_norm, f"{name}.k_norm"))

    def _head_norm(self, module: Any, boundary: str) -> Patch:
        eps, impl, switch = self._live.eps, self._impl, self._switch
        owned = boundary.endswith("q_norm") or self._live.owns_kv_heads

        def make(native: Native) -> Callable[..., Any]:
            def forward(x_THD: torch.Tensor, residual: None = None) -> torch.Tensor:
                return switch.run(
                    "qk_norm",
                    native=lambda: native(x_THD),
                    pinned=lambda: norm.rms_norm(x_THD, module.weight, eps, impl=impl),
                    exact=lambda: norm_fp64.rms_norm(x_THD, module.weight, eps, out_dtype=torch.float64),
                    parts=lambda y: {boundary: y if owned else y[:, :0]},
                    split="columns",
                )

            return forward

        return Patch(target=module, name="forward", make=make, pins=("qk_norm",), label=boundary)

    def _column(self, linear: Any, label: str, parts: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]) -> Patch:
        live, impl, switch = self._live, self._impl, self._switch

        def make(native: Native) -> Callable[..., Any]:
            def apply(layer: Any, x_TK: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
                return switch.run(
                    "gemm",
                    native=lambda: native(layer, x_TK, bias),
                    pinned=lambda: gemm.linear(x_TK, live.weight(layer), bias, impl=impl),
                    exact=lambda: gemm_fp64.linear(x_TK, live.weight(layer), bias, out_dtype=torch.float64),
                    parts=parts,
                    split="columns",
                )

            return apply

        return Patch(target=linear.quant_method, name="apply", make=make, pins=("gemm",), label=label)

    def _split_qkv(self, name: str, attn: Any) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(x.shape[0], -1, attn.head_dim)

        def parts(qkv: torch.Tensor) -> dict[str, torch.Tensor]:
            q, k, v = torch.split(qkv, [attn.q_size, attn.kv_size, attn.kv_size], dim=-1)
            kv_heads = slice(None) if self._live.owns_kv_heads else slice(0)
            k_THD, v_THD = heads(k), heads(v)
            return {
                f"{name}.q_proj": heads(q),
                f"{name}.k_proj": k_THD[:, kv_heads],
                f"{name}.v_proj": v_THD[:, kv_heads],
            }

        return parts

    def _split_gate_up(self, name: str) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
        def parts(gate_up: torch.Tensor) -> dict[str, torch.Tensor]:
            gate, up = gate_up.chunk(2, dim=-1)
            return {f"{name}.gate_proj": gate, f"{name}.up_proj": up}

        return parts

    def _row(self, linear: Any, boundary: str) -> Patch:
        """Both pins of a row-parallel layer: its GEMM, and the sum over ranks behind it.

        The unrounded share of a rank has to survive up to the sum, so the two are one hook. With the GEMM alone pinned, a rank's share
        is rounded as the engine rounds it and the engine's own collective adds.
        """
        live, impl, switch = self._live, self._impl, self._switch

        def partial(x_TK: torch.Tensor) -> torch.Tensor:
            weight_NK = live.weight(linear)
            return gemm.row_partial(x_TK, weight_NK, k_total=weight_NK.shape[1] * live.tp.size, impl=impl)

        def native_partial(x_TK: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = linear.quant_method.apply(linear, x_TK, None)
            return out

        def fold(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return reduce.fold(live.tp.gathered(part), impl=impl, out_dtype=dtype)

        def rounded(x_TK: torch.Tensor) -> torch.Tensor:
            """This rank's share in x's dtype. One rank owns the whole tree: the bits of fold(partial) in one launch."""
            if live.tp.size == 1:
                return gemm.row_linear(x_TK, live.weight(linear), impl=impl)
            return reduce.fold([partial(x_TK)], impl=impl, out_dtype=x_TK.dtype)

        def exact_sum(part: torch.Tensor) -> torch.Tensor:
            return reduce_fp64.fold(live.tp.gathered(part), out_dtype=torch.float64)

        def make(native: Native) -> Callable[..., Any]:
            def forward(input_: torch.Tensor) -> tuple[torch.Tensor, None]:
                x, dtype = input_, input_.dtype
                ops: dict[tuple[bool, bool], Callable[[], torch.Tensor]] = {
                    (False, False): lambda: native(x)[0],
                    (True, False): lambda: live.all_reduce(rounded(x)),
                    (False, True): lambda: fold(native_partial(x), dtype),
                    (True, True): lambda: rounded(x) if live.tp.size == 1 else fold(partial(x), dtype),
                }
                y = switch.run(
                    "gemm",
                    native=ops[False, False],
                    pinned=ops[True, True],
                    exact=lambda: exact_sum(gemm_fp64.linear(x, live.weight(linear), out_dtype=torch.float64)),
                    parts=lambda out: {boundary: out},
                    split="whole",
                    chosen=ops["gemm" in switch.active, "forward_reduce" in switch.active],
                    also=("forward_reduce",),
                )
                if switch.probe == "local" and live.tp.size > 1:
                    part = native_partial(x)
                    switch.recorder.observe(
                        boundary,
                        "forward_reduce",
                        native=live.all_reduce(part.clone()),
                        pinned=fold(part, dtype),
                        fp64=exact_sum(part),
                        split="whole",
                    )
                return y, None

            return forward

        return Patch(target=linear, name="forward", make=make, pins=("gemm", "forward_reduce"), label=boundary)

    def _rope(self) -> tuple[Patch, ...]:
        """One patch per rotary object. The engine shares one among all layers and calls it once a layer, in order."""
        owners: dict[int, tuple[Any, list[int]]] = {}
        for i, layer in enumerate(self._live.layers):
            rotary = layer.self_attn.rotary_emb
            owners.setdefault(id(rotary), (rotary, []))[1].append(i)
        return tuple(self._rotary(rotary, indices) for rotary, indices in owners.values())

    def _rotary(self, rotary: Any, indices: list[int]) -> Patch:
        live, impl, switch = self._live, self._impl, self._switch
        head_dim: int = rotary.head_size
        call = 0

        def make(native: Native) -> Callable[..., Any]:
            def forward(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                nonlocal call
                name = f"layers.{indices[call % len(indices)]}"
                call += 1
                q_THD, k_THD = (x.view(x.shape[0], -1, head_dim) for x in (query, key))

                def native_op() -> tuple[torch.Tensor, torch.Tensor]:
                    q, k = native(positions, query.clone(), key.clone())  # it rotates in place
                    return q.view_as(q_THD), k.view_as(k_THD)

                def pinned() -> tuple[torch.Tensor, torch.Tensor]:
                    out = rope.rotary(q_THD, k_THD, positions, live.inv_freq, impl=impl)
                    return out.q_THD, out.k_THD

                def exact() -> tuple[torch.Tensor, torch.Tensor]:
                    q, k = (rope_fp64.rotary(x, positions, live.inv_freq, out_dtype=torch.float64) for x in (q_THD, k_THD))
                    return q, k

                q, k = switch.run(
                    "rope",
                    native=native_op,
                    pinned=pinned,
                    exact=exact,
                    parts=lambda out: {f"{name}.q_rope": out[0], f"{name}.k_rope": out[1] if live.owns_kv_heads else out[1][:, :0]},
                    split="columns",
                )
                return q.reshape(query.shape), k.reshape(key.shape)

            return forward

        return Patch(target=rotary, name="forward", make=make, pins=("rope",), label="rotary_emb")

    def _activation(self, module: Any, boundary: str) -> Patch:
        impl, switch = self._impl, self._switch

        def exact(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return swiglu_fp64.swiglu(gate, up, out_dtype=torch.float64)

        def make(native: Native) -> Callable[..., Any]:
            def forward(x: torch.Tensor) -> torch.Tensor:
                return switch.run(
                    "activation",
                    native=lambda: native(x),
                    pinned=lambda: swiglu.swiglu_packed(x, impl=impl),
                    exact=lambda: exact(x),
                    parts=lambda y: {boundary: y},
                    split="columns",
                )

            return forward

        return Patch(target=module, name="forward", make=make, pins=("activation",), label=boundary)

    def _head(self) -> Patch:
        live, impl, switch = self._live, self._impl, self._switch
        head, processor = live.model.lm_head, live.model.logits_processor
        shard = head.shard_indices
        rows = shard.org_vocab_end_index - shard.org_vocab_start_index
        dtype = getattr(processor, "head_dtype", None)
        # A head in another dtype than the model's bypasses quant_method; the version that can have one has `_apply_head` around both.
        target, name = (processor, "_apply_head") if hasattr(processor, "_apply_head") else (head.quant_method, "apply")
        calls = 0

        def make(native: Native) -> Callable[..., Any]:
            def apply(lm_head: Any, x_TH: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
                nonlocal calls
                # Of one prefill with prompt log-probs the engine computes the sampled row first, then the prompt's rows.
                boundary = _SAMPLED_ROW if switch.probe == "boundary" and calls == 0 else "lm_head"
                calls += 1
                out_dtype = dtype or x_TH.dtype
                x, weight = x_TH.to(out_dtype), live.weight(lm_head).to(out_dtype)
                return switch.run(
                    "head_gemm",
                    native=lambda: native(lm_head, x_TH, bias),
                    pinned=lambda: gemm.linear(x, weight, bias, impl=impl),
                    exact=lambda: gemm_fp64.linear(x, weight, bias, out_dtype=torch.float64),
                    parts=lambda logits: {boundary: logits[:, :rows]},
                    split="columns",
                )

            return apply

        return Patch(target=target, name=name, make=make, pins=("head_gemm",), label="lm_head")
