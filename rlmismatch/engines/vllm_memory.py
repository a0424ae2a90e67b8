"""How much memory vLLM's KV cache gets: what the scored sequences can fill, not what the device has left.

Given a size, vLLM measures no free memory, which fails as soon as another process on the device starts or ends meanwhile: the trainer, say.
"""

from __future__ import annotations

from typing import Final

import torch

from rlmismatch.checkpoint import ModelConfig
from rlmismatch.engines.protocol import SideConfig

MAX_SEQUENCES: Final = 128  # of one step
_CPU_BYTES: Final = 2**30  # all of it is cleared at the start, in half a second
_ACTIVATIONS: Final = 2**30  # of a step of 2048 tokens, beside weights and cache


def kv_cache_bytes(config: SideConfig, model: ModelConfig, *, weights: int, length: int, local_rank: int) -> int:
    """Bytes of one rank's KV cache, for `MAX_SEQUENCES` sequences of `length` tokens where memory allows, for two where it hardly does.

    `weights`: bytes of the whole checkpoint; a rank holds its share. On CUDA the cache stays within ``config.gpu_memory_fraction``.
    """
    kv_heads = max(1, model.num_kv_heads // config.tp)
    a_sequence: int = 2 * model.num_layers * kv_heads * model.head_dim * getattr(torch, config.dtype).itemsize * length
    if config.device != "cuda":
        return max(2 * a_sequence, min(MAX_SEQUENCES * a_sequence, _CPU_BYTES))
    total: int = torch.cuda.get_device_properties(local_rank).total_memory
    left = int(total * config.gpu_memory_fraction) - weights // config.tp - _ACTIVATIONS
    return max(2 * a_sequence, min(MAX_SEQUENCES * a_sequence, left))
