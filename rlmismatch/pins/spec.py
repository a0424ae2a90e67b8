"""The pins by name: one per operation that both engines have, and the op boundaries at which they are compared.

A pin names the engine's operation and our kernel. Which axis it belongs to stands with the axis (`Axis.pins`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# In the order of the forward pass.
PINS: Final[tuple[str, ...]] = (
    "norm",  # residual add + RMSNorm: input, post-attention, final
    "qk_norm",  # RMSNorm of Q and K per head
    "gemm",  # qkv, o, gate_up, down: the local GEMM
    "forward_reduce",  # the sum over TP ranks behind o and down
    "rope",
    "attention",  # core attention, all four forms
    "activation",  # SwiGLU
    "head_gemm",
    "logprob",  # log-softmax and gather
)

# Outputs recorded per layer, in order of execution, in canonical global layout, dtype as the op wrote them:
# T tokens of one sequence, H hidden, Hq/Hkv heads, D head dim, I ffn.
LAYER_BOUNDARIES: Final[tuple[tuple[str, str, str], ...]] = (
    # (name, pin, layout)
    ("input_norm", "norm", "[T, H]"),
    ("q_proj", "gemm", "[T, Hq, D]"),
    ("k_proj", "gemm", "[T, Hkv, D]"),
    ("v_proj", "gemm", "[T, Hkv, D]"),
    ("q_norm", "qk_norm", "[T, Hq, D]"),
    ("k_norm", "qk_norm", "[T, Hkv, D]"),
    ("q_rope", "rope", "[T, Hq, D]"),
    ("k_rope", "rope", "[T, Hkv, D]"),
    ("attention", "attention", "[T, Hq, D]"),
    ("o_proj", "gemm", "[T, H]"),  # after the sum over ranks
    ("post_attention_norm", "norm", "[T, H]"),
    ("gate_proj", "gemm", "[T, I]"),
    ("up_proj", "gemm", "[T, I]"),
    ("activation", "activation", "[T, I]"),
    ("down_proj", "gemm", "[T, H]"),  # after the sum over ranks
)
FINAL_BOUNDARIES: Final[tuple[tuple[str, str, str], ...]] = (
    ("final_norm", "norm", "[T, H]"),
    ("lm_head", "head_gemm", "[T, V]"),  # real vocabulary only
    ("logprob", "logprob", "[T - 1]"),  # of token t + 1 given 0..t, float32
)


def boundary_names(num_layers: int) -> tuple[str, ...]:
    """Every boundary in order of execution: ``layers.0.input_norm`` .. ``logprob``."""
    layers = tuple(f"layers.{i}.{name}" for i in range(num_layers) for name, _, _ in LAYER_BOUNDARIES)
    return layers + tuple(name for name, _, _ in FINAL_BOUNDARIES)


def pin_of_boundary(name: str) -> str:
    """The pin that owns a boundary name."""
    short = name.rsplit(".", 1)[-1]
    return next(pin for known, pin, _ in LAYER_BOUNDARIES + FINAL_BOUNDARIES if known == short)


@dataclass(frozen=True, kw_only=True)
class LocalError:
    """One op of one layer on one side: native and pin on the same inputs, each against float64 (unrounded reference).

    Absolute errors in the op's own unit. `count` elements were compared, `unequal` of them differ between native and pin.
    """

    boundary: str  # e.g. layers.0.q_proj
    pin: str
    rows: int
    count: int
    unequal: int
    native_vs_pin_max: float
    native_vs_pin_mean: float
    native_vs_fp64_max: float
    native_vs_fp64_mean: float
    pin_vs_fp64_max: float
    pin_vs_fp64_mean: float
    fp64_scale: float  # mean |float64 reference|
    beyond_one_ulp: int = 0  # elements of native that are further from the rounded float64 reference than its neighbour
    ulp_max: float = 0.0  # of native against the rounded float64 reference
