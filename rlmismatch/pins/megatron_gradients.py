"""The trainer's backward, pinned: hooks of a live GPTModel under autograd, for the pass that takes gradients.

Three things can be chosen apart. The pins: each operation's forward is the one that is scored, and its gradient comes with it. The sum over
ranks of the column-parallel layers' dX: Megatron's collective, or rank order. How dW reaches main_grad: as Megatron does it, or by a
product in float32 that is added to a float32 accumulator.

Of what is not pinned Megatron's own autograd runs, and hooks on its tensors look on or replace a gradient as it passes. The pinned
gradients do not depend on the tensor-parallel size while no key/value head is shared by ranks: sums over ranks are subtrees of one tree (or
of what all ranks hold), and what is summed over tokens, rows or heads is gathered first.

Shapes as in megatron.py. This is the local spec's. One file of more than 400 lines, because every hook reads the state of the one backward
that is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
import torch.distributed as dist

from rlmismatch.kernels import attention, attention_backward, gemm, logprob_backward, norm, reduce, rope, swiglu
from rlmismatch.kernels.common.rounding import round_once
from rlmismatch.pins import gradient_ops
from rlmismatch.pins.gradient_ops import replaced
from rlmismatch.pins.hooks import Patch
from rlmismatch.pins.megatron import native_row_partial
from rlmismatch.pins.megatron_logprob import VocabShard, gathered_partials, merged_logprob
from rlmismatch.pins.megatron_shape import TrainerShape
from rlmismatch.pins.spec import PINS

Native = Callable[..., torch.Tensor]
# Rows of a weight, and how many of the whole layer's rows they are a rank's equal share of.
Share = tuple[slice, int]
ALL_PINS: Final = frozenset(PINS)

COMPOSITION: Final = (
    "dX, dW of linears: gemm.grad_input, grad_input_partial + reduce.fold, grad_weight",
    "log-softmax: logprob_backward.dlogits",
    "attention: attention_backward.causal_backward",
    "rope: the same rotation by the opposite angle",
    "norms, q/k-norms, SwiGLU: float64 formulas, rounded once",
    "embedding: rows added in token order",
    "residual additions: the engine's own",
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which backward a pass takes. `pins` are as an arm's."""

    pins: frozenset[str] = frozenset()
    dgrad: Literal["native", "rank_order"] = "native"
    wgrad: Literal["native", "explicit"] = "native"


class Observer(Protocol):
    """Looks on at the native backward of the linear layers."""

    def dgrad(self, name: str, ranks: list[torch.Tensor], summed_sBH: torch.Tensor) -> None:
        """A column-parallel layer's dX: every rank's partial [S, B, H], rank 0 first, and what the engine made of them on this rank."""

    def wgrad(self, name: str, dy_TN: torch.Tensor, x_TK: torch.Tensor) -> None:
        """The operands of one layer's dW for one microbatch, padding cut away."""


class GradientOps:
    """All hooks of one live GPTModel for one pass at a time. `begin` must be called before every forward."""

    def __init__(self, gpt: Any, shape: TrainerShape, shard: VocabShard, *, fused: bool) -> None:
        self.gpt, self.shape, self.shard, self.tp = gpt, shape, shard, shard.tp
        # Whether the engine's own dW is added to main_grad inside the GEMM, unrounded.
        self._fused = fused
        self._tokens = 0
        self._gate_up_SBI2: dict[int, torch.Tensor] = {}
        self._kept: dict[int, torch.Tensor] = {}

    def begin(self, tokens: int) -> None:
        """One sequence of `tokens` real tokens is about to run."""
        self._tokens = tokens
        self._gate_up_SBI2.clear()

    def forget(self) -> None:
        """Start from no gradient."""
        self._kept.clear()

    def kept(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """float32 of the parameter's shape: what the pins added beside the engine's own main_grad; None if nothing."""
        return self._kept.get(id(parameter))

    def patches(self, choice: Choice, observer: Observer | None = None) -> tuple[Patch, ...]:
        """The hooks that `choice` needs. An observer sees the layers whose GEMM is not pinned."""
        out: list[Patch] = []
        looking = observer is not None or choice.dgrad != "native" or choice.wgrad != "native"
        pins = choice.pins
        for i, layer in enumerate(self.gpt.decoder.layers):
            here, attn, mlp = f"layers.{i}", layer.self_attention, layer.mlp
            rows_qkv, rows_gate_up = attn.linear_qkv.weight.shape[0], mlp.linear_fc1.weight.shape[0]
            half = rows_gate_up // 2
            # Megatron stacks this rank's gate rows on its up rows: two matrices whose shards are consecutive rows.
            gate_up = [(slice(0, half), half * self.tp.size), (slice(half, rows_gate_up), half * self.tp.size)]
            if "norm" in pins:
                out += [self._norm(choice, n) for n in (layer.input_layernorm, layer.pre_mlp_layernorm)]
            if "qk_norm" in pins and self.gpt.config.qk_layernorm:
                out += [self._norm(choice, n, heads=True) for n in (attn.q_layernorm, attn.k_layernorm)]
            if "attention" in pins:
                out.append(self._attention(attn.core_attention))
            if "gemm" in pins:
                out.append(self._column(choice, attn.linear_qkv, [(slice(0, rows_qkv), rows_qkv * self.tp.size)]))
                out.append(self._column(choice, mlp.linear_fc1, gate_up, feeds=i))
            elif looking:
                linears = {"qkv": attn.linear_qkv, "o_proj": attn.linear_proj, "gate_up": mlp.linear_fc1, "down_proj": mlp.linear_fc2}
                out += [self._watched(choice, module, f"{here}.{name}", observer) for name, module in linears.items()]
            if "activation" in pins and "gemm" not in pins:
                out.append(self._remembered(mlp.linear_fc1, i, watched=looking))
            if {"gemm", "forward_reduce"} & pins:
                out.append(self._row(choice, attn.linear_proj, None))
            if {"gemm", "forward_reduce", "activation"} & pins:
                out.append(self._row(choice, mlp.linear_fc2, i if "activation" in pins else None))
        if "norm" in pins:
            out.append(self._norm(choice, self.gpt.decoder.final_layernorm))
        if "rope" in pins:
            out.append(self._rope())
        if "head_gemm" in pins:
            out.append(self._head(choice))
        elif looking:
            out.append(self._watched(choice, self.gpt.output_layer, "lm_head", observer))
        if "logprob" in pins:
            out.append(self._loss())
        if pins >= ALL_PINS:
            out.append(self._embedding(choice))
        return tuple(out)

    def _whole(self, x_sBN: torch.Tensor) -> torch.Tensor:
        """All rows of the residual stream, of which a rank holds a slice under SP."""
        return torch.cat(self.tp.gathered(x_sBN)) if self.shape.sp else x_sBN

    def _own_slice(self, x_SBN: torch.Tensor) -> torch.Tensor:
        return x_SBN.chunk(self.tp.size)[self.tp.rank].contiguous() if self.shape.sp else x_SBN

    def _real(self, x_SBN: torch.Tensor) -> torch.Tensor:
        return x_SBN[: self._tokens, 0]

    def _delivered(
        self, choice: Choice, weight: torch.Tensor, grad: Callable[[torch.dtype], torch.Tensor], *, once: bool = False
    ) -> torch.Tensor | None:
        """dW as autograd is to see it: kept in float32 here (None), or rounded to the weight's dtype for the engine to add.

        once: the engine will sum this weight's gradients over ranks although every rank has the whole of it: only the first gives it.
        """
        if choice.wgrad == "explicit" or self._fused:
            self._keep(weight, grad(torch.float32))
            return None
        rounded = grad(weight.dtype)
        return torch.zeros_like(rounded) if once and self.tp.rank else rounded

    def _keep(self, weight: torch.Tensor, grad_float32: torch.Tensor) -> None:
        if id(weight) in self._kept:
            self._kept[id(weight)] += grad_float32
        else:
            self._kept[id(weight)] = grad_float32.clone()

    def _norm(self, choice: Choice, module: Any, *, heads: bool = False) -> Patch:
        weight, eps, impl = module.weight, self.shape.eps, self.shape.impl
        once = self.tp.size > 1 and (heads or self.shape.sp)

        def all_rows(x: torch.Tensor) -> torch.Tensor:
            return torch.cat(self.tp.gathered(x), dim=2) if heads else self._whole(x)

        def backward(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
            every_x, every_dy = self._real(all_rows(x)), self._real(all_rows(dy))
            dw = gradient_ops.rms_norm_weight(every_dy, every_x, eps)
            dx = gradient_ops.rms_norm_input(dy, x, w, eps)
            return dx, self._delivered(choice, weight, lambda dtype: round_once(dw, dtype), once=once)

        def make(_: Native) -> Native:
            return lambda x: replaced(lambda x, w: norm.rms_norm(x, w, eps, impl=impl), backward, x, weight)

        return Patch(target=module, name="forward", make=make, pins=("qk_norm" if heads else "norm",), label="gradient of a norm")

    def _column(self, choice: Choice, module: Any, shares: list[Share], feeds: int | None = None) -> Patch:
        """A column-parallel layer; feeds: the layer whose activation reads its output."""
        impl = self.shape.impl

        def make(_: Native) -> Native:
            def forward_impl(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
                def forward(x_sBK: torch.Tensor, w_NK: torch.Tensor, b_N: torch.Tensor | None) -> torch.Tensor:
                    return gemm.linear(self._whole(x_sBK)[:, 0], w_NK, b_N, impl=impl)[:, None]

                def backward(dy_SBN: torch.Tensor, x_sBK: torch.Tensor, w_NK: torch.Tensor, b_N: torch.Tensor | None) -> Any:
                    dy_TN, x_TK = self._real(dy_SBN), self._real(self._whole(x_sBK))
                    partials = [
                        gemm.grad_input_partial(dy_SBN[:, 0, rows], w_NK[rows], n_total=total, impl=impl)[:, None] for rows, total in shares
                    ]
                    dw = self._delivered(choice, weight, lambda dtype: gemm.grad_weight(dy_TN, x_TK, impl=impl, out_dtype=dtype))
                    return self._summed(choice, partials, x_sBK.dtype), dw, self._bias_grad(choice, bias, dy_TN)

                y_SBN = replaced(forward, backward, input, weight, bias)
                if feeds is not None:
                    self._gate_up_SBI2[feeds] = y_SBN
                return y_SBN

            return forward_impl

        return Patch(target=module, name="_forward_impl", make=make, pins=("gemm",), label="gradient of a column-parallel layer")

    def _bias_grad(self, choice: Choice, bias: torch.Tensor | None, dy_TN: torch.Tensor) -> torch.Tensor | None:
        if bias is None:
            return None
        total_N = dy_TN.double().sum(dim=0)
        return self._delivered(choice, bias, lambda dtype: round_once(total_N, dtype))

    def _summed(self, choice: Choice, partials: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The sum over ranks of unrounded partials [S, B, H], this rank's slice of it under SP, rounded once at the very end."""
        impl = self.shape.impl
        if choice.dgrad == "rank_order" or self.tp.size == 1:
            return self._own_slice(gradient_ops.folded([self.tp.gathered(p) for p in partials], impl=impl, out_dtype=dtype))
        return reduce.fold([self._collective(p) for p in partials], impl=impl, out_dtype=dtype)

    def _collective(self, partial_SBH: torch.Tensor) -> torch.Tensor:
        """The collective that Megatron's own backward calls, on a copy."""
        if not self.shape.sp:
            total = partial_SBH.clone()
            dist.all_reduce(total, group=self.tp.group)
            return total
        from megatron.core.tensor_parallel import layers

        own = torch.empty_like(self._own_slice(partial_SBH))
        layers.dist_reduce_scatter_func(own, partial_SBH.contiguous(), group=self.tp.group)
        return own

    def _watched(self, choice: Choice, module: Any, name: str, observer: Observer | None) -> Patch:
        """The engine's own GEMM with the engine's own backward; its gradients are looked at, or replaced, as they pass."""

        def make(native: Native) -> Native:
            def forward_impl(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
                x = input.view_as(input)
                explicit = choice.wgrad == "explicit"
                # Without its weight the engine's backward has no dW to add; the pin adds its own.
                given = {**rest, "gradient_accumulation_fusion": False} if explicit else rest
                y = native(input=x, weight=weight.detach() if explicit else weight, bias=bias, **given)
                seen: list[torch.Tensor] = []

                def on_dy(dy_SBN: torch.Tensor) -> None:
                    seen.append(dy_SBN.detach())
                    if explicit or observer is not None:
                        whole = torch.cat(self.tp.gathered(x.detach())) if rest["sequence_parallel"] else x.detach()
                        dy_TN, x_TK = self._real(seen[0]), self._real(whole)
                        if explicit:
                            self._keep(weight, gemm.grad_weight(dy_TN, x_TK, impl=self.shape.impl))
                        if observer is not None:
                            observer.wgrad(name, dy_TN, x_TK)

                def on_dx(dx_sBH: torch.Tensor) -> torch.Tensor | None:
                    ranks = self.tp.gathered(seen[0].matmul(weight.detach()))
                    if observer is not None:
                        observer.dgrad(name, ranks, dx_sBH.detach())
                    if choice.dgrad == "native":
                        return None
                    return self._own_slice(reduce.fold(ranks, impl=self.shape.impl, out_dtype=dx_sBH.dtype))

                y.register_hook(on_dy)  # type: ignore[no-untyped-call]
                if self.tp.size > 1 and (rest["allreduce_dgrad"] or rest["sequence_parallel"]):
                    x.register_hook(on_dx)  # type: ignore[no-untyped-call]
                return y

            return forward_impl

        return Patch(target=module, name="_forward_impl", make=make, pins=(), label=f"gradient of {name}")

    def _row(self, choice: Choice, module: Any, layer: int | None) -> Patch:
        """A row-parallel layer and its sum over ranks; layer: whose activation stands before it, pinned."""

        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def forward(input_: torch.Tensor) -> tuple[torch.Tensor, None]:
                x_SBK = input_ if layer is None else self._activation(layer)
                if "gemm" in choice.pins:
                    return self._pinned_row(choice, module, x_SBK), None
                if "forward_reduce" not in choice.pins:
                    return native(x_SBK)[0], None
                partial = native_row_partial(module, x_SBK)
                return replaced(lambda p: self._folded(p, x_SBK.dtype), lambda dy, _: (self._whole(dy),), partial), None

            return forward

        return Patch(target=module, name="forward", make=make, pins=("gemm", "forward_reduce"), label="gradient of a row-parallel layer")

    def _folded(self, partial_SBH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._own_slice(reduce.fold(self.tp.gathered(partial_SBH), impl=self.shape.impl, out_dtype=dtype))

    def _pinned_row(self, choice: Choice, module: Any, x_SBK: torch.Tensor) -> torch.Tensor:
        weight, impl = module.weight, self.shape.impl
        k_total = weight.shape[1] * self.tp.size

        def forward(x_SBK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
            partial = gemm.row_partial(x_SBK[:, 0], w_NK, k_total=k_total, impl=impl)[:, None]
            if "forward_reduce" in choice.pins:
                return self._folded(partial, x_SBK.dtype)
            rounded = reduce.fold([partial], impl=impl, out_dtype=x_SBK.dtype)
            return rounded if self.tp.size == 1 else self._collective(rounded)

        def backward(dy_sBN: torch.Tensor, x_SBK: torch.Tensor, w_NK: torch.Tensor) -> Any:
            dy_SBN = self._whole(dy_sBN)
            dy_TN, x_TK = self._real(dy_SBN), self._real(x_SBK)
            dw = self._delivered(choice, weight, lambda dtype: gemm.grad_weight(dy_TN, x_TK, impl=impl, out_dtype=dtype))
            return gemm.grad_input(dy_SBN[:, 0], w_NK, impl=impl)[:, None], dw

        return replaced(forward, backward, x_SBK, weight)

    def _remembered(self, module: Any, layer: int, *, watched: bool) -> Patch:
        """Keeps the engine's own gate and up for the pinned activation. `_forward_impl` is another hook's where layers are watched."""

        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                out = native(*args, **kwargs)
                self._gate_up_SBI2[layer] = out[0]
                return out

            return forward

        return Patch(target=module, name="forward", make=make, pins=("activation",), label="gradient of an activation")

    def _activation(self, layer: int) -> torch.Tensor:
        def forward(gate_up_SBI2: torch.Tensor) -> torch.Tensor:
            return swiglu.swiglu_packed(gate_up_SBI2, impl=self.shape.impl)

        return replaced(forward, lambda dy, gate_up: (gradient_ops.swiglu_packed(dy, gate_up),), self._gate_up_SBI2[layer])

    def _rope(self) -> Patch:
        from megatron.core.transformer import attention as megatron_attention

        inv_freq = self.shape.inv_freq

        def rotated(x_SBHD: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
            x_THD, positions_T = x_SBHD[:, 0], torch.arange(x_SBHD.shape[0], device=x_SBHD.device)
            return rope.rotary(x_THD, x_THD[:, :0], positions_T, frequencies, impl=self.shape.impl).q_THD[:, None]

        def make(_: Native) -> Native:
            # A rotation's transpose is the rotation back.
            return lambda t, *_, **__: replaced(lambda x: rotated(x, inv_freq), lambda dy, _: (rotated(dy, -inv_freq),), t)

        return Patch(target=megatron_attention, name="apply_rotary_pos_emb", make=make, pins=("rope",), label="gradient of rope")

    def _attention(self, module: Any) -> Patch:
        # The same scores as the forward pin's, or the gradient would be another function's: a window hides tokens in both directions.
        scores: dict[str, Any] = {"scale": self.shape.softmax_scale, "window": self.shape.window}
        impl = self.shape.impl

        def pinned(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            done: list[attention.AttentionOut] = []  # its log-sum-exp is what the backward starts from

            def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                done.append(attention.causal(q[:, 0], k[:, 0], v[:, 0], [0, q.shape[0]], **scores, impl=impl))
                return done[0].out_THD.flatten(1)[:, None]

            def backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
                # Padding stands last: no real row reads it, and its own gradient is zero.
                tokens = self._tokens
                out_THD, lse_HT = done[0].out_THD[:tokens], done[0].lse_HT[:, :tokens].contiguous()
                operands = (self._real(q), self._real(k), self._real(v), out_THD, lse_HT, self._real(dout).view_as(out_THD))
                grads = attention_backward.causal_backward(*operands, [0, tokens], **scores, impl=impl)
                padding = (0, 0, 0, 0, 0, q.shape[0] - tokens)
                return tuple(torch.nn.functional.pad(grad, padding)[:, None] for grad in (grads.dq_THD, grads.dk_THD, grads.dv_THD))

            return replaced(forward, backward, query, key, value)

        return Patch(target=module, name="forward", make=lambda _: pinned, pins=("attention",), label="gradient of attention")

    def _head(self, choice: Choice) -> Patch:
        """The head. Shards of a padded vocabulary end elsewhere at every TP, so dX is summed on every rank from what all of them hold."""
        impl, vocab_size = self.shape.impl, self.shard.vocab_size

        def make(_: Native) -> Native:
            def forward_impl(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
                def forward(x_sBH: torch.Tensor, w_VH: torch.Tensor) -> torch.Tensor:
                    return gemm.linear(self._whole(x_sBH)[:, 0], w_VH, None, impl=impl)[:, None]

                def backward(dy_SBV: torch.Tensor, x_sBH: torch.Tensor, w_VH: torch.Tensor) -> Any:
                    every_dy = torch.cat(self.tp.gathered(dy_SBV[:, 0]), dim=-1)[:, :vocab_size]
                    every_w = torch.cat(self.tp.gathered(w_VH))[:vocab_size]
                    dx_SBH = gemm.grad_input(every_dy, every_w, impl=impl)[:, None]
                    dy_TV, x_TH = self._real(dy_SBV), self._real(self._whole(x_sBH))
                    dw = self._delivered(choice, weight, lambda dtype: gemm.grad_weight(dy_TV, x_TH, impl=impl, out_dtype=dtype))
                    return self._own_slice(dx_SBH), dw

                return replaced(forward, backward, input, weight)

            return forward_impl

        return Patch(target=self.gpt.output_layer, name="_forward_impl", make=make, pins=("head_gemm",), label="gradient of the head")

    def _loss(self) -> Patch:
        shape, shard = self.shape, self.shard
        temperature = shape.chain.only_temperature
        if temperature is None:
            raise ValueError(f"the gradient of the pinned log-prob knows no transform but a temperature, got {shape.chain}")

        def make(_: Native) -> Native:
            def loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
                targets_S = labels[0]

                def forward(logits_SBV: torch.Tensor) -> torch.Tensor:
                    operands = (logits_SBV[:, 0], targets_S, shard.vocab_size)
                    return -merged_logprob(*operands, chain=shape.chain, shard=shard, impl=shape.impl)[None]

                def backward(grad_BS: torch.Tensor, logits_SBV: torch.Tensor) -> Any:
                    operands = (logits_SBV[:, 0], targets_S)
                    parts = gathered_partials(*operands, shard.vocab_size, temperature=temperature, shard=shard, impl=shape.impl)
                    grad_SV = logprob_backward.dlogits(
                        *operands,
                        -grad_BS[0].float(),
                        normaliser=logprob_backward.normaliser(parts, vocab_size=shard.vocab_size, impl=shape.impl),
                        vocab_start=shard.start,
                        vocab_size=shard.vocab_size,
                        impl=shape.impl,
                        temperature=temperature,
                    )
                    return (grad_SV.to(logits_SBV.dtype)[:, None],)

                return replaced(forward, backward, logits)

            return loss

        return Patch(target=self.gpt, name="compute_language_model_loss", make=make, pins=("logprob",), label="gradient of the loss")

    def _embedding(self, choice: Choice) -> Patch:
        """The look-up is exact as it is; its gradient is a sum over the tokens of one id."""
        module = self.gpt.embedding.word_embeddings
        scattered = bool(module.reduce_scatter_embeddings)

        def make(native: Native) -> Native:
            def forward(input_: torch.Tensor) -> torch.Tensor:
                def backward(dy: torch.Tensor, weight: torch.Tensor) -> Any:
                    rows_TH = self._real(self._whole(dy)) if scattered else dy[0, : self._tokens]
                    ids_T = input_[0, : self._tokens] - module.vocab_start_index

                    def grad(dtype: torch.dtype) -> torch.Tensor:
                        total_VH = torch.zeros(module.weight.shape, dtype=torch.float32, device=weight.device)
                        gradient_ops.add_rows(total_VH, ids_T, rows_TH)
                        return total_VH.to(dtype)

                    return (self._delivered(choice, module.weight, grad),)

                return replaced(lambda _: native(input_), backward, module.weight)

            return forward

        return Patch(target=module, name="forward", make=make, pins=(), label="gradient of the embedding")
