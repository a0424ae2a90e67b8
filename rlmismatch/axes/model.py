"""The gates, and what lies between the GEMMs. Gates come first: if weights or tokens differ, every other number is void."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlmismatch.axes.base import Axis, Plant
from rlmismatch.contract import identical, recorded, semantic


@dataclass(frozen=True, kw_only=True)
class WeightIdentitySpec:
    """Which weights a side holds."""

    tensor_digests: str = identical("digest of every logical tensor of the live engine")
    tied_head: bool = identical("whether the head is the embedding")
    buffers: str = identical("persistent buffers outside the rotary embedding")
    weight_version: str = identical("which update the weights are from")


@dataclass(frozen=True, kw_only=True)
class TokenIdentitySpec:
    """Which tokens a side scores."""

    prompt_ids: str = identical("digest of the prompts' token ids")
    response_ids: str = identical("digest of the responses' token ids")
    bos_count: int = identical("begin-of-sequence tokens in front of the prompts")
    mask: str = identical("digest of which tokens are scored")


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A normalisation: its formula and where it rounds."""

    eps: float = identical("constant added to the mean square")
    variant: str = identical("formula: rms")
    norm_dtype: str = semantic("dtype of the mean square")
    residual_rounded_before_norm: bool = recorded("whether the residual sum is rounded before it is normalised")
    cast_before_weight: bool = recorded("whether the normalised value is rounded before the weight multiplies it")
    fusion: str = recorded("what the norm is fused with")
    present: bool = identical("whether the model has this norm")


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """The activation of the feed-forward layer."""

    kind: str = identical("formula: swiglu")
    rounding: str = recorded("where the product is rounded")
    fusion: str = recorded("what the activation is fused with")


@dataclass(frozen=True, kw_only=True)
class ModeSpec:
    """Train-mode behaviour that would make a side random."""

    attention_dropout: float = semantic("dropout probability inside attention, as in force")
    hidden_dropout: float = semantic("dropout probability behind attention and feed-forward, as in force")
    training_flag: bool = recorded("whether the modules are in train mode")


@dataclass(frozen=True, kw_only=True)
class CompileSpec:
    """How a side's forward is run."""

    mode: str = recorded("eager, captured graph or compiled")
    capture_sizes: str = recorded("batch sizes that were captured")
    padded_rows: int = recorded("rows a captured graph adds")


MODEL: Final[tuple[Axis, ...]] = (
    Axis(
        id="model.weights",
        family="model",
        asks="Do both engines hold the same weights?",
        spec=WeightIdentitySpec,
        measure="digest per logical tensor read from the LIVE engine after un-sharding and un-fusing, on both sides",
        hint="load the same checkpoint into both engines, and sync every tensor after an update",
        plants=(
            Plant(
                id="one_stale_tensor",
                verdict="void",
                what="one tensor of the live engine is 1.01 times what the checkpoint says",
                built=True,
            ),
            Plant(id="untied_head", verdict="void", what="a tied head is no longer the embedding", built=True),
        ),
        built="contract_only",
    ),
    Axis(
        id="model.tokens",
        family="model",
        asks="Do both sides score the same token ids at the same positions?",
        spec=TokenIdentitySpec,
        measure="digest; token ids travel, never re-tokenised text",
        hint="pass the rollout's own token ids to the trainer instead of text",
        plants=(Plant(id="two_bos", verdict="void", what="one side sees one more begin-of-sequence token", built=True),),
        built="contract_only",
    ),
    Axis(
        id="model.norm",
        family="model",
        asks="Norm, residual and embedding arithmetic between GEMM and attention?",
        spec=NormSpec,
        field_names=("eps", "variant", "norm_dtype", "residual_rounded_before_norm", "cast_before_weight", "fusion"),
        knobs={"model.norm": ("native", "triton")},
        pin="fp32 norm of the rounded residual sum, cast, then weight",
        pins=("norm",),
        measure="local replay and pinned in both engines",
        trap=(
            "eps 1e-5 against 1e-6 moves 3e-5 nats, far below the noise floor; a fused add+norm may normalise the unrounded sum; one engine"
            " rounds before the weight, the other once at the end (the largest single effect seen)"
        ),
        hint="give both engines the rms_norm_eps of the checkpoint's config.json",
        plants=(Plant(id="eps", verdict="contract", what="one side's norms use another eps", built=True),),
        built="complete",
    ),
    Axis(
        id="model.qk_norm",
        family="model",
        asks="The norms of Q and K per head?",
        spec=NormSpec,
        field_names=("eps", "present", "norm_dtype", "cast_before_weight", "fusion"),
        knobs={"model.qk_norm": ("native", "triton")},
        pin="as model.norm",
        pins=("qk_norm",),
        hint="switch the q/k-norm on (or off) as the checkpoint's architecture says, with its rms_norm_eps",
        zero={"no_qk_norm": "the model has no q/k-norm"},
        plants=(Plant(id="qk_norm_skipped", verdict="contract", what="one side leaves out the norms of Q and K", built=True),),
        built="complete",
    ),
    Axis(
        id="model.activation",
        family="model",
        asks="SwiGLU rounding?",
        spec=ActivationSpec,
        knobs={"model.activation": ("native", "triton")},
        pin="fp32 inside, one rounding",
        pins=("activation",),
        hint="give both engines the activation of the checkpoint's config.json",
        built="complete",
    ),
    Axis(
        id="model.mode",
        family="model",
        asks="Is dropout or another train-mode behaviour still on?",
        spec=ModeSpec,
        measure="effective values; a repeat of the same side must be bit-equal",
        hint="put the trainer into eval mode, or set its dropout to 0, while it scores",
        plants=(
            Plant(
                id="dropout_on",
                verdict="contract",
                what="the trainer scores in train mode with dropout 0.1",
                sides=("trainer",),
                built=True,
            ),
        ),
        built="contract_only",
    ),
    Axis(
        id="model.compile",
        family="model",
        asks="Does compilation or graph capture move the number?",
        spec=CompileSpec,
        knobs={"model.compile": ("eager", "graph", "inductor")},
        pin="eager",
        measure="eager against the engine's default mode on the same tokens",
        hint="run the rollout with enforce_eager while you measure",
        measured=True,
        built="complete",
    ),
)
