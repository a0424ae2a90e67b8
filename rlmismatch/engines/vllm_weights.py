"""The weights a live vLLM engine computes with, as the logical tensors of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlmismatch.checkpoint import ModelConfig, digest
from rlmismatch.pins.vllm_live import LiveModel


def digests(live: LiveModel, model: ModelConfig) -> dict[str, str]:
    """HF name -> digest of the live tensor, un-sharded, un-fused and without vocabulary padding; and "tied" -> "true" or "false".

    Collective. Complete on rank 0, empty elsewhere.
    """
    found = {name: digest(tensor) if live.tp.rank == 0 else "" for name, tensor in tensors(live, model)}
    tied = is_tied(live)
    return {**found, "tied": "true" if tied else "false"} if live.tp.rank == 0 else {}


def is_tied(live: LiveModel) -> bool:
    """Whether the live head is, on every rank, the embedding's own memory and computes with what stands there. Collective."""
    head, embedding = live.model.lm_head, live.model.model.embed_tokens
    own = head.weight.data_ptr() == embedding.weight.data_ptr() and torch.equal(live.weight(head), embedding.weight)
    return bool(torch.stack(live.tp.gathered(torch.tensor(own, device=embedding.weight.device))).all())


def tensors(live: LiveModel, model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, whole tensor) in the order of the forward pass; one tensor at a time is held whole. Collective, complete on every rank.

    A tensor that every rank holds whole, and that differs between ranks, comes as the stack of what they hold: it equals no checkpoint's.
    """
    yield "model.embed_tokens.weight", _vocabulary(live, live.model.model.embed_tokens.weight, model)
    for i, layer in enumerate(live.layers):
        name, attn, mlp = f"model.layers.{i}", layer.self_attn, layer.mlp
        yield f"{name}.input_layernorm.weight", _replicated(live, layer.input_layernorm.weight)
        yield from _qkv(live, attn, f"{name}.self_attn")
        if hasattr(attn, "q_norm"):
            yield f"{name}.self_attn.q_norm.weight", _replicated(live, attn.q_norm.weight)
            yield f"{name}.self_attn.k_norm.weight", _replicated(live, attn.k_norm.weight)
        yield f"{name}.self_attn.o_proj.weight", torch.cat(live.tp.gathered(live.weight(attn.o_proj)), dim=1)
        yield f"{name}.post_attention_layernorm.weight", _replicated(live, layer.post_attention_layernorm.weight)
        gate, up = live.weight(mlp.gate_up_proj).chunk(2)
        yield f"{name}.mlp.gate_proj.weight", torch.cat(live.tp.gathered(gate))
        yield f"{name}.mlp.up_proj.weight", torch.cat(live.tp.gathered(up))
        yield f"{name}.mlp.down_proj.weight", torch.cat(live.tp.gathered(live.weight(mlp.down_proj)), dim=1)
    yield "model.norm.weight", _replicated(live, live.model.model.norm.weight)
    live_tied = is_tied(live)  # a collective: also where the checkpoint is not tied
    if not (model.tied and live_tied):
        yield "lm_head.weight", _vocabulary(live, live.weight(live.model.lm_head), model)


def _qkv(live: LiveModel, attn: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    linear, q_rows, kv_rows = attn.qkv_proj, attn.q_size, attn.kv_size  # type: ignore[attr-defined]
    fused = {"weight": live.weight(linear)}
    if linear.bias is not None:
        # One of the CPU's packed GEMMs keeps the bias in float32: the same numbers.
        fused["bias"] = linear.bias.detach().to(linear.params_dtype)
    for kind, tensor in fused.items():
        for projection, part in zip("qkv", torch.split(tensor, [q_rows, kv_rows, kv_rows]), strict=True):
            ranks = live.tp.gathered(part)
            # With more ranks than KV heads, neighbours hold copies of one head.
            copies = 1 if projection == "q" else live.kv_copies
            equal = all(torch.equal(part, ranks[i // copies * copies]) for i, part in enumerate(ranks))
            yield f"{name}.{projection}_proj.{kind}", torch.cat(ranks[::copies]) if equal else torch.stack(ranks)


def _vocabulary(live: LiveModel, weight: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    return torch.cat(live.tp.gathered(weight.detach()))[: model.vocab_size]


def _replicated(live: LiveModel, weight: torch.Tensor) -> torch.Tensor:
    ranks = live.tp.gathered(weight.detach())
    return ranks[0] if all(torch.equal(ranks[0], other) for other in ranks[1:]) else torch.stack(ranks)
