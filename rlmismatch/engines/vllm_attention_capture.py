"""The rollout's part of the attention probe: the live operands and output of vLLM's attention in one prefill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlmismatch.engines import vllm_kernel_calls
from rlmismatch.engines.attention_capture import Seen, joined, layers_kept, try_candidates
from rlmismatch.engines.attention_exports import exported
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.pins.vllm_live import LiveModel


@contextlib.contextmanager
def watching(live: LiveModel) -> Iterator[Seen]:
    """Keeps what attention of `layers_kept` reads and writes of the one prefill made while the context is open.

    Its K and V are those of the call: in a prefill without a cached prefix they are all that it reads.
    """
    seen = Seen()
    running: int | None = None  # the kept layer whose implementation runs

    def called(name: str, kwargs: dict[str, Any], native: Callable[..., Any]) -> None:
        lse_HT = None if running is None else vllm_kernel_calls.exported_lse(name, kwargs, native)
        if running is not None and lse_HT is not None:
            seen.keep(running, lse=lse_HT.T)

    def hook(index: int) -> Patch:
        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def forward(
                layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any,
                output: torch.Tensor, *args: Any, **kwargs: Any,
            ) -> torch.Tensor:  # fmt: skip
                nonlocal running
                running = None if attn_metadata is None else index
                written: torch.Tensor = native(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
                running = None
                if attn_metadata is not None:
                    tokens = attn_metadata.num_actual_tokens
                    heads = {"q": query, "k": key, "v": value, "out": output}
                    seen.keep(index, **{name: x[:tokens].view(tokens, -1, layer.head_size) for name, x in heads.items()})
                return written

            return forward

        return Patch(target=live.layers[index].self_attn.attn.impl, name="forward", make=make, pins=(), label="probe")

    kernels = vllm_kernel_calls.hooks(live.layers[0].self_attn.attn.impl, called)
    with installed([*kernels, *map(hook, layers_kept(len(live.layers)))]):
        yield seen


def probe(live: LiveModel, config: SideConfig, seen: Seen) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of `attention_capture`, and notes. Collective."""
    operands = {name: x for name, x in seen.tensors.items() if not name.endswith(".lse")}
    out = joined(operands, live.tp, kv_copies=live.kv_copies)
    scale = float(seen.tensors["layers.0.q"].shape[-1] ** -0.5)
    out |= exported(seen.tensors, num_layers=len(live.layers), scale=scale, impl=config.impl, tp=live.tp)
    tried, notes = try_candidates(config, seen, rank=live.tp.rank, scale=scale)
    return {**out, **tried, "window": torch.tensor(live.window or 0)}, notes
