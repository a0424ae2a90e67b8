"""The pins of Megatron-core: each names one operation of a live GPTModel and the kernel that stands in for it.

This is the local spec; megatron_te.py has what the TE spec builds otherwise. One class and one file, because all hooks read the state
of the forward that is under way (and so a little over 400 lines).

Shapes, per rank: S sequence (padded to a multiple of TP under sequence parallelism; s = S / TP), B = 1 batch, T the real tokens,
H hidden, Hq / Hkv heads, D head dim, I ffn, V vocabulary. Megatron's layout is sequence first: ``hidden_sBH``, ``query_SBHqD``.
Weights come from the live modules; eps, rotary frequencies, softmax scale and the logits' transforms are what the checkpoint and the
run ask for, so that a pin heals a wrong constant of the operation it replaces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlmismatch.kernels import attention, gemm, norm, reduce, rope, swiglu
from rlmismatch.kernels.attention import reference as attention_fp64
from rlmismatch.kernels.gemm import reference as gemm_fp64
from rlmismatch.kernels.norm import reference as norm_fp64
from rlmismatch.kernels.reduce import reference as reduce_fp64
from rlmismatch.kernels.rope import reference as rope_fp64
from rlmismatch.kernels.swiglu import reference as swiglu_fp64
from rlmismatch.pins import attention_policy
from rlmismatch.pins.hooks import OpSwitch, Patch, Split
from rlmismatch.pins.logprob_ways import blocks, comparable
from rlmismatch.pins.megatron_logprob import HeadInput, HeadSettings, LossSettings, VocabShard, exact_logprob, merged_logprob, native_loss
from rlmismatch.pins.megatron_shape import TrainerShape

Native = Callable[..., torch.Tensor]
Parts = Mapping[str, torch.Tensor]


class TrainerOps:
    """All hooks of one live GPTModel. `begin` must be called before every forward."""

    def __init__(self, gpt: Any, shape: TrainerShape, shard: VocabShard) -> None:
        self.gpt = gpt
        self.shape = shape
        self.shard = shard
        self.tp = shard.tp
        self._tokens = 0
        self._rope_calls = 0
        self._gate_up_SBI2: dict[int, torch.Tensor] = {}
        self._head_input: HeadInput | None = None
        # Under context parallelism a probe looks at the whole sequence: a rank's rows are no slice of it.
        self._row_split: Split = "rows" if shape.sp and shape.cp.size == 1 else "whole"
        self._qkv_columns = shape.qkv_columns(self.tp)
        # With more ranks than kv heads several ranks hold one head; the first of them speaks for it.
        self._owns_kv = self.tp.size <= shape.num_kv_heads or self.tp.rank % (self.tp.size // shape.num_kv_heads) == 0

    @property
    def tokens(self) -> int:
        """Real tokens of the forward that is under way."""
        return self._tokens

    def qkv_columns(self) -> Mapping[str, torch.Tensor]:
        """q, k, v -> indices of this rank's columns of the fused product."""
        return self._qkv_columns

    def begin(self, tokens: int) -> None:
        """One sequence of `tokens` real tokens is about to run."""
        self._tokens = tokens
        self._rope_calls = 0
        self._gate_up_SBI2.clear()
        self._head_input = None

    def give_head_input(self, hidden_SH: torch.Tensor, weight_VH: torch.Tensor) -> None:
        """What a loss that starts from hidden rows is to read, for a trial without a forward."""
        self._head_input = HeadInput(hidden_SH=hidden_SH, weight_VH=weight_VH)

    def patches(self, switch: OpSwitch, settings: LossSettings) -> tuple[Patch, ...]:
        """The hooks that `switch` needs, and the loss's wherever `settings` differ from Megatron's own behaviour."""
        out: list[Patch] = []
        for i, layer in enumerate(self.gpt.decoder.layers):
            here, attn, mlp = f"layers.{i}", layer.self_attention, layer.mlp
            qkv_parts, gate_up_parts = functools.partial(self._qkv_parts, here), functools.partial(self._gate_up_parts, here)
            out += [
                *self._norm_and_column(switch, layer.input_layernorm, attn.linear_qkv, f"{here}.input_norm", f"{here}.qkv", qkv_parts),
                self._attention(switch, attn.core_attention, f"{here}.attention"),
                self._row(switch, attn.linear_proj, f"{here}.o_proj", i, activation=False),
                *self._norm_and_column(
                    switch, layer.pre_mlp_layernorm, mlp.linear_fc1, f"{here}.post_attention_norm", f"{here}.gate_up", gate_up_parts, i
                ),
                self._row(switch, mlp.linear_fc2, f"{here}.down_proj", i, activation=True),
            ]
            if self.gpt.config.qk_layernorm:
                out += [
                    self._qk_norm(switch, attn.q_layernorm, f"{here}.q_norm", owns=True),
                    self._qk_norm(switch, attn.k_layernorm, f"{here}.k_norm", owns=self._owns_kv),
                ]
        out += [
            self._rope(switch),
            self._norm(switch, self.gpt.decoder.final_layernorm, "final_norm"),
        ]
        head, loss = self._head(switch), self._logprob(switch, settings)
        plain = self.shape.head == HeadSettings() and settings.fusion != "chunked_linear_ce"
        return (
            *switch.hooks(out),
            *(switch.hooks([head]) if plain else [head]),
            *(switch.hooks([loss]) if settings == LossSettings() else [loss]),
        )

    def _rows(self, x_sBN: torch.Tensor) -> torch.Tensor:
        """[rows, N] of the residual stream: this rank's slice of the sequence under SP, all of it otherwise, without the padding."""
        if self.shape.cp.size > 1:
            return self.rows_of(torch.cat(self.tp.gathered(x_sBN)) if self.shape.sp else x_sBN)
        start = x_sBN.shape[0] * self.tp.rank if self.shape.sp else 0
        return x_sBN[: max(0, self._tokens - start), 0]

    def rows_of(self, x_SBN: torch.Tensor) -> torch.Tensor:
        """[T, ...]: the rows of every token in order of position, from this rank's share of the sequence, without the padding."""
        return self.shape.cp.whole(x_SBN)[: self._tokens, 0]

    def _heads(self, x_SBHD: torch.Tensor, owns: bool = True) -> torch.Tensor:
        x_THD = self.rows_of(x_SBHD)
        return x_THD if owns else x_THD[:, :0]

    def _qkv_parts(self, here: str, y_SBN: torch.Tensor) -> Parts:
        rows_TN = self.rows_of(y_SBN)
        return {f"{here}.{name}_proj": rows_TN[:, columns] for name, columns in self._qkv_columns.items()}

    def _gate_up_parts(self, here: str, y_SBN: torch.Tensor) -> Parts:
        gate_TI, up_TI = self.rows_of(y_SBN).chunk(2, dim=-1)
        return {f"{here}.gate_proj": gate_TI, f"{here}.up_proj": up_TI}

    def _head_parts(self, y_SBV: torch.Tensor) -> Parts:
        return {"lm_head": self.rows_of(y_SBV)[:, : self.shard.real_width]}

    def _own_slice(self, x_SBH: torch.Tensor) -> torch.Tensor:
        return x_SBH.chunk(self.tp.size)[self.tp.rank].contiguous() if self.shape.sp else x_SBH

    def _normed(
        self, switch: OpSwitch, pin: str, native: Native, weight: torch.Tensor, parts: Callable[[torch.Tensor], Parts], split: Split
    ) -> Native:
        """x -> its RMSNorm over the last dim, as the arm says."""
        eps, impl = self.shape.eps, self.shape.impl

        def forward(x: torch.Tensor) -> torch.Tensor:
            return switch.run(
                pin,
                native=lambda: native(x),
                pinned=lambda: norm.rms_norm(x, weight, eps, impl=impl),
                exact=lambda: norm_fp64.rms_norm(x, weight, eps, out_dtype=torch.float64),
                parts=parts,
                split=split,
            )

        return forward

    def _norm(self, switch: OpSwitch, module: Any, name: str) -> Patch:
        def make(native: Native) -> Native:
            return self._normed(switch, "norm", native, module.weight, lambda y: {name: self._rows(y)}, self._row_split)

        return Patch(target=module, name="forward", make=make, pins=("norm",), label=name)

    def _qk_norm(self, switch: OpSwitch, module: Any, name: str, *, owns: bool) -> Patch:
        def make(native: Native) -> Native:
            return self._normed(switch, "qk_norm", native, module.weight, lambda y: {name: self._heads(y, owns)}, "columns")

        return Patch(target=module, name="forward", make=make, pins=("qk_norm",), label=name)

    def _multiplied(
        self, switch: OpSwitch, pin: str, native: Native, parts: Callable[[torch.Tensor], Parts], feeds: int | None = None
    ) -> Native:
        """A column-parallel GEMM as the arm says, called as Megatron calls `_forward_impl`.

        Under SP Megatron gathers the sequence inside that call, so the pin gathers too. feeds: the layer whose activation
        reads this output; it is remembered for the activation's pin.
        """

        def forward_impl(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
            @functools.cache
            def whole_input() -> torch.Tensor:
                return torch.cat(self.tp.gathered(input)) if rest["sequence_parallel"] else input

            y_SBN = switch.run(
                pin,
                native=lambda: native(input=input, weight=weight, bias=bias, **rest),
                pinned=lambda: _linear(gemm.linear, whole_input(), weight, bias, impl=self.shape.impl),
                exact=lambda: _linear(gemm_fp64.linear, whole_input(), weight, bias, out_dtype=torch.float64),
                parts=parts,
                split="columns",
            )
            if feeds is not None:
                self._gate_up_SBI2[feeds] = y_SBN
            return y_SBN

        return forward_impl

    def _norm_and_column(
        self,
        switch: OpSwitch,
        norm_module: Any,
        linear: Any,
        norm_name: str,
        name: str,
        parts: Callable[[torch.Tensor], Parts],
        feeds: int | None = None,
    ) -> list[Patch]:
        """The layer norm and the column-parallel linear that it feeds: two modules here, one in the TE spec."""

        def make(native: Native) -> Native:
            return self._multiplied(switch, "gemm", native, parts, feeds)

        pins = ("gemm",) if feeds is None else ("gemm", "activation")
        column = Patch(target=linear, name="_forward_impl", make=make, pins=pins, label=name)
        return [self._norm(switch, norm_module, norm_name), column]

    def _head(self, switch: OpSwitch) -> Patch:
        """The head's GEMM, in the dtype and over as many rows at a time as the run asks for; its input is remembered for the loss."""

        def make(native: Native) -> Native:
            multiplied = self._multiplied(switch, "head_gemm", self._native_head(native), self._head_parts)
            dtype = self.shape.head.dtype

            def forward_impl(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
                whole = torch.cat(self.tp.gathered(input)) if rest["sequence_parallel"] else input
                x_SBH, w_VH, b_V = (t if t is None or dtype is None else t.to(dtype) for t in (whole, weight, bias))
                assert x_SBH is not None
                assert w_VH is not None
                self._head_input = HeadInput(hidden_SH=x_SBH[:, 0], weight_VH=w_VH)
                return multiplied(x_SBH, w_VH, b_V, **{**rest, "sequence_parallel": False})

            return forward_impl

        return Patch(target=self.gpt.output_layer, name="_forward_impl", make=make, pins=("head_gemm",), label="lm_head")

    def _native_head(self, native: Native) -> Native:
        rows = self.shape.head.rows
        if rows is None:
            return native

        def by_rows(input: torch.Tensor, **rest: Any) -> torch.Tensor:
            return torch.cat([native(input=x_SBH.contiguous(), **rest) for x_SBH in blocks(input, rows)])

        return by_rows

    def _row(self, switch: OpSwitch, module: Any, name: str, layer: int, *, activation: bool) -> Patch:
        """A row-parallel GEMM and the sum behind it: one hook, because the unrounded partials must live to be summed.

        activation: the input is the SwiGLU output, which Megatron computes in a closure that nothing can hook; it is replaced
        here, where it arrives.
        """

        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def forward(input_: torch.Tensor) -> tuple[torch.Tensor, None]:
                x_SBK = self._activation(switch, input_, layer) if activation else input_
                return self._row_forward(switch, module, name, native, x_SBK), None

            return forward

        pins = ("gemm", "forward_reduce", "activation") if activation else ("gemm", "forward_reduce")
        return Patch(target=module, name="forward", make=make, pins=pins, label=name)

    def _activation(self, switch: OpSwitch, native_SBI: torch.Tensor, layer: int) -> torch.Tensor:
        def gate_up() -> torch.Tensor:
            return self._gate_up_SBI2[layer]

        return switch.run(
            "activation",
            native=lambda: native_SBI,
            pinned=lambda: swiglu.swiglu_packed(gate_up(), impl=self.shape.impl),
            exact=lambda: swiglu_fp64.swiglu(*gate_up().chunk(2, dim=-1), out_dtype=torch.float64),
            parts=lambda y: {f"layers.{layer}.activation": self.rows_of(y)},
            split="columns",
        )

    def _row_forward(self, switch: OpSwitch, module: Any, name: str, native: Callable[..., Any], x_SBK: torch.Tensor) -> torch.Tensor:
        weight, dtype, impl = module.weight, x_SBK.dtype, self.shape.impl
        k_total = weight.shape[1] * self.tp.size

        def pinned_partial() -> torch.Tensor:
            return _linear(gemm.row_partial, x_SBK, weight, k_total=k_total, impl=impl)

        def fold(partial_SBH: torch.Tensor) -> torch.Tensor:
            return self._own_slice(reduce.fold(self.tp.gathered(partial_SBH), impl=impl, out_dtype=dtype))

        def rounded() -> torch.Tensor:
            """This rank's share in x's dtype. One rank owns the whole tree: the bits of fold(partial) in one launch."""
            if self.tp.size == 1:
                return _linear(gemm.row_linear, x_SBK, weight, impl=impl)
            return reduce.fold([pinned_partial()], impl=impl, out_dtype=dtype)

        def exact_sum(partial_SBH: torch.Tensor) -> torch.Tensor:
            return self._own_slice(reduce_fp64.fold(self.tp.gathered(partial_SBH), out_dtype=torch.float64))

        choices: dict[tuple[bool, bool], Callable[[], torch.Tensor]] = {
            (False, False): lambda: native(x_SBK)[0],
            (True, False): lambda: self._native_sum(rounded()),
            (False, True): lambda: fold(self._native_partial(module, x_SBK)),
            (True, True): lambda: rounded() if self.tp.size == 1 else fold(pinned_partial()),
        }
        if switch.probe == "local" and self.tp.size > 1:
            # The sum apart from the GEMM: both sums see the same native partials.
            partial = self._native_partial(module, x_SBK)
            switch.recorder.observe(
                name,
                "forward_reduce",
                native=self._rows(self._native_sum(partial.clone())),
                pinned=self._rows(fold(partial)),
                fp64=self._rows(exact_sum(partial)),
                split=self._row_split,
            )
        return switch.run(
            "gemm",
            native=choices[False, False],
            pinned=choices[True, True],
            exact=lambda: exact_sum(_linear(gemm.row_partial, x_SBK, weight, k_total=k_total, impl="reference")),
            parts=lambda y: {name: self._rows(y)},
            split=self._row_split,
            chosen=choices["gemm" in switch.active, "forward_reduce" in switch.active],
            also=("forward_reduce",),
        )

    def _native_partial(self, module: Any, x_SBK: torch.Tensor) -> torch.Tensor:
        return native_row_partial(module, x_SBK)

    def _native_sum(self, partial_SBH: torch.Tensor) -> torch.Tensor:
        """The layers' own collective. It may work in place, and on a strided tensor it returns its input unreduced."""
        from megatron.core.tensor_parallel import layers  # where a knob may have put another one

        collective = layers.reduce_scatter_to_sequence_parallel_region if self.shape.sp else layers.reduce_from_tensor_model_parallel_region
        summed: torch.Tensor = collective(partial_SBH.contiguous(), group=self.tp.group)
        return summed

    def _rope(self, switch: OpSwitch) -> Patch:
        """Megatron rotates Q, then K, of one layer after the other through one module global: the call number says which."""
        from megatron.core.transformer import attention as megatron_attention

        def make(native: Native) -> Native:
            def apply(t: torch.Tensor, freqs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                layer, is_k = divmod(self._rope_calls, 2)
                self._rope_calls += 1
                x_THD = t[:, 0]
                cp = self.shape.cp
                positions_T = cp.positions(t.shape[0] * cp.size).to(t.device)
                name, owns = (f"layers.{layer}.k_rope", self._owns_kv) if is_k else (f"layers.{layer}.q_rope", True)

                def pinned() -> torch.Tensor:
                    rotated = rope.rotary(x_THD, x_THD[:, :0], positions_T, self.shape.inv_freq, impl=self.shape.impl)
                    return rotated.q_THD[:, None]

                def exact() -> torch.Tensor:
                    return rope_fp64.rotary(x_THD, positions_T, self.shape.inv_freq, out_dtype=torch.float64)[:, None]

                return switch.run(
                    "rope",
                    native=lambda: native(t, freqs, *args, **kwargs),
                    pinned=pinned,
                    exact=exact,
                    parts=lambda y: {name: self._heads(y, owns)},
                    split="columns",
                )

            return apply

        return Patch(target=megatron_attention, name="apply_rotary_pos_emb", make=make, pins=("rope",), label="rope")

    def _attention(self, switch: OpSwitch, module: Any, name: str) -> Patch:
        def make(native: Native) -> Native:
            def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                qkv, cp = (query[:, 0], key[:, 0], value[:, 0]), self.shape.cp
                shape = self.shape
                scores: dict[str, Any] = {"scale": shape.softmax_scale, "window": shape.window, "sinks_H": shape.sinks(query)}
                bounds = [0, query.shape[0]]

                def packed(out_THD: torch.Tensor) -> torch.Tensor:
                    return out_THD.flatten(1)[:, None]

                def pinned() -> torch.Tensor:
                    if self.shape.attention is not None:
                        return packed(cp.attend(attention_policy.paged, *qkv, scale=self.shape.softmax_scale, policy=self.shape.attention))
                    if cp.size > 1:
                        return packed(cp.attend(attention.paged, *qkv, **scores, impl=self.shape.impl))
                    return packed(attention.causal(*qkv, bounds, **scores, impl=self.shape.impl).out_THD)

                def exact() -> torch.Tensor:
                    if cp.size > 1:
                        return packed(cp.attend(attention_fp64.paged, *qkv, **scores, out_dtype=torch.float64))
                    return packed(attention_fp64.causal(*qkv, bounds, **scores, out_dtype=torch.float64)[0])

                return switch.run(
                    "attention",
                    native=lambda: native(query, key, value, *args, **kwargs),
                    pinned=pinned,
                    exact=exact,
                    parts=lambda y: {name: self._heads(y.view(*y.shape[:2], -1, self.shape.head_dim))},
                    split="columns",
                )

            return forward

        return Patch(target=module, name="forward", make=make, pins=("attention",), label=name)

    def _exact_logits(self, settings: LossSettings, logits_SV: torch.Tensor) -> torch.Tensor:
        """What the loss starts from: the head's logits, or where it is fused with the head, what they are without rounding."""
        head = self._head_input
        if settings.fusion != "chunked_linear_ce" or head is None:
            return logits_SV
        return gemm_fp64.linear(head.hidden_SH, head.weight_VH, out_dtype=torch.float64)

    def _logprob(self, switch: OpSwitch, settings: LossSettings) -> Patch:
        """The loss. `settings` are the native loss's; the pin never counts padded vocabulary rows, whatever they say."""

        def make(native: Native) -> Native:
            def loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
                shape, shard = self.shape, self.shard
                operands = (logits[:, 0], labels[0])
                return switch.run(
                    "logprob",
                    native=lambda: native_loss(
                        native, labels, logits, settings=settings, shard=shard, impl=shape.impl, head=self._head_input
                    ),
                    pinned=lambda: -merged_logprob(*operands, shard.vocab_size, chain=shape.chain, shard=shard, impl=shape.impl)[None],
                    exact=lambda: (
                        -exact_logprob(self._exact_logits(settings, logits[:, 0]), labels[0], chain=shape.chain, shard=shard)[None]
                    ),
                    parts=lambda y: {"logprob": comparable(-self.shape.cp.whole(y[0])[: self._tokens - 1])},
                    split="whole",
                )

            return loss

        return Patch(target=self.gpt, name="compute_language_model_loss", make=make, pins=("logprob",), label="logprob")


def native_row_partial(module: Any, x_SBK: torch.Tensor) -> torch.Tensor:
    """This rank's product of a row-parallel layer by Megatron's own GEMM, before any sum over ranks: [S, B, H] in x's dtype."""
    partial: torch.Tensor = module._forward_impl(
        input=x_SBK,
        weight=module.weight,
        bias=None,
        gradient_accumulation_fusion=module.gradient_accumulation_fusion,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=None,
        grad_output_buffer=None,
    )
    return partial


def _linear(op: Callable[..., torch.Tensor], x_SBK: torch.Tensor, weight_NK: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A kernel that wants rows, on a sequence-first tensor whose batch is 1."""
    return op(x_SBK[:, 0], weight_NK, *args, **kwargs)[:, None]
