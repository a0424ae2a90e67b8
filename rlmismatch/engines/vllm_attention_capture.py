"""The rollout's part of the attention probe: the live operands and output of vLLM's attention in one prefill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlmismatch.engines.attention_capture import Seen, joined, layers_kept, try_candidates
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.pins.vllm_live import LiveModel


@contextlib.contextmanager
def watching(live: LiveModel) -> Iterator[Seen]:
    """Keeps what attention of `layers_kept` reads and writes of the one prefill made while the context is open.

    Its K and V are those of the call: in a prefill without a cached prefix they are all that it reads.
    """
    seen = Seen()

    def hook(index: int) -> Patch:
        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def forward(
                layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any,
                output: torch.Tensor, *args: Any, **kwargs: Any,
            ) -> torch.Tensor:  # fmt: skip
                written: torch.Tensor = native(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
                if attn_metadata is not None:
                    tokens = attn_metadata.num_actual_tokens
                    heads = {"q": query, "k": key, "v": value, "out": output}
                    seen.keep(index, **{name: x[:tokens].view(tokens, -1, layer.head_size) for name, x in heads.items()})
                return written

            return forward

        return Patch(target=live.layers[index].self_attn.attn.impl, name="forward", make=make, pins=(), label="probe")

    with installed([hook(i) for i in layers_kept(len(live.layers))]):
        yield seen


def probe(live: LiveModel, config: SideConfig, seen: Seen) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of `attention_capture`, and notes. Collective."""
    out = joined(seen.tensors, live.tp, kv_copies=live.kv_copies)
    scale = float(seen.tensors["layers.0.q"].shape[-1] ** -0.5)
    tried, notes = try_candidates(config, seen, rank=live.tp.rank, scale=scale)
    return {**out, **tried, "window": torch.tensor(live.window or 0)}, notes
