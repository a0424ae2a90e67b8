"""Which Megatron parameter holds which logical (HF) tensors, and how the rows and columns are dealt to TP ranks.

The table is data (`parameters`); `shard` and `unshard` are inverse to each other for every kind. Column order inside the fused
QKV matrix: per kv group its query heads, then K, then V. Inside fc1: per rank its gate rows, then its up rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlmismatch.errors import EngineError
from rlmismatch.pins.collectives import TpGroup

if TYPE_CHECKING:
    from rlmismatch.checkpoint import Checkpoint, ModelConfig

Kind = Literal["whole", "columns", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One Megatron parameter. `sources` are the logical tensors fused in it, in order."""

    name: str
    sources: tuple[str, ...]
    kind: Kind


def parameters(model: ModelConfig, *, te: bool) -> tuple[Parameter, ...]:
    """Every parameter of the GPTModel of a checkpoint. te: the TE spec keeps the two layer norms inside the linears they feed."""
    out = [Parameter(name="embedding.word_embeddings.weight", sources=("model.embed_tokens.weight",), kind="vocab")]
    input_norm, mlp_norm = "input_layernorm.weight", "pre_mlp_layernorm.weight"
    if te:
        input_norm, mlp_norm = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
    for i in range(model.num_layers):
        here, there = f"decoder.layers.{i}", f"model.layers.{i}"
        qkv = [f"{there}.self_attn.{x}_proj" for x in "qkv"]
        out += [
            Parameter(name=f"{here}.{input_norm}", sources=(f"{there}.input_layernorm.weight",), kind="whole"),
            Parameter(name=f"{here}.self_attention.linear_qkv.weight", sources=tuple(f"{x}.weight" for x in qkv), kind="qkv"),
        ]
        if model.qkv_bias:
            out.append(Parameter(name=f"{here}.self_attention.linear_qkv.bias", sources=tuple(f"{x}.bias" for x in qkv), kind="qkv"))
        if model.qk_norm:
            out += [
                Parameter(name=f"{here}.self_attention.{x}_layernorm.weight", sources=(f"{there}.self_attn.{x}_norm.weight",), kind="whole")
                for x in "qk"
            ]
        gate_up = (f"{there}.mlp.gate_proj.weight", f"{there}.mlp.up_proj.weight")
        out += [
            Parameter(name=f"{here}.self_attention.linear_proj.weight", sources=(f"{there}.self_attn.o_proj.weight",), kind="columns"),
            Parameter(name=f"{here}.{mlp_norm}", sources=(f"{there}.post_attention_layernorm.weight",), kind="whole"),
            Parameter(name=f"{here}.mlp.linear_fc1.weight", sources=gate_up, kind="gate_up"),
            Parameter(name=f"{here}.mlp.linear_fc2.weight", sources=(f"{there}.mlp.down_proj.weight",), kind="columns"),
        ]
    out.append(Parameter(name="decoder.final_layernorm.weight", sources=("model.norm.weight",), kind="whole"))
    if not model.tied:
        out.append(Parameter(name="output_layer.weight", sources=("lm_head.weight",), kind="vocab"))
    return tuple(out)


def shard(kind: Kind, tensors: Sequence[torch.Tensor], model: ModelConfig, *, tp: TpGroup, vocab_rows: int) -> torch.Tensor:
    """This rank's part of a parameter. vocab_rows: rows of the padded vocabulary; the padding is zero, as Megatron's own loader has it."""
    if kind == "whole":
        return tensors[0]
    if kind == "columns":
        return tensors[0].chunk(tp.size, dim=1)[tp.rank]
    if kind == "vocab":
        padded = tensors[0].new_zeros(vocab_rows, *tensors[0].shape[1:])
        padded[: tensors[0].shape[0]] = tensors[0]
        return padded.chunk(tp.size)[tp.rank]
    if kind == "gate_up":
        return torch.cat([t.chunk(tp.size)[tp.rank] for t in tensors])
    groups, dim = model.num_kv_heads, model.head_dim
    by_group = [t.view(groups, -1, dim, *t.shape[1:]) for t in tensors]
    return torch.cat(by_group, dim=1).flatten(0, 2).chunk(tp.size)[tp.rank]


def unshard(kind: Kind, parts: Sequence[torch.Tensor], model: ModelConfig) -> tuple[torch.Tensor, ...]:
    """All ranks' parts -> the logical tensors fused in them, without vocabulary padding."""
    if kind == "whole":
        return (parts[0],)
    if kind == "columns":
        return (torch.cat(list(parts), dim=1),)
    if kind == "vocab":
        return (torch.cat(list(parts))[: model.vocab_size],)
    if kind == "gate_up":
        halves = [part.chunk(2) for part in parts]
        return torch.cat([h[0] for h in halves]), torch.cat([h[1] for h in halves])
    groups, dim = model.num_kv_heads, model.head_dim
    heads = torch.cat(list(parts))
    heads = heads.view(groups, -1, dim, *heads.shape[1:])
    return tuple(t.flatten(0, 2) for t in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:]))


def load(gpt: Any, checkpoint: Checkpoint, *, tp: TpGroup, te: bool, dtype: str) -> None:
    """Copy the checkpoint into the live model, in place. Raises EngineError unless every parameter is filled exactly once."""
    model = checkpoint.config
    live = dict(gpt.named_parameters())
    table = parameters(model, te=te)
    differs = sorted(live.keys() ^ {p.name for p in table})
    if differs:
        raise EngineError(
            "megatron-parameters-differ",
            f"{len(differs)} parameters of the live model and of the weight table do not match: {differs[0]}",
            where="trainer",
            hint="this version of megatron-core names its parameters differently",
            details=tuple(differs),
        )
    for parameter in table:
        tensors = [checkpoint.tensor(name, dtype=dtype) for name in parameter.sources]
        part = shard(parameter.kind, tensors, model, tp=tp, vocab_rows=gpt.vocab_size)
        target = live[parameter.name]
        if part.shape != target.shape:
            raise EngineError(
                "megatron-parameter-shape",
                f"{parameter.name} is {list(target.shape)} in the live model and {list(part.shape)} by the weight table",
                where="trainer",
            )
        with torch.no_grad():
            target.copy_(part)
