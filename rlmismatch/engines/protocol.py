"""What a side is asked and what it answers. Everything here is data that travels as JSON, or a tensor.

A *side* is one engine in its own process group; `worker.py` runs an `Engine` there. The two adapters (`megatron.py`,
`vllm.py`) and the oracle implement `Engine`; nothing else knows which engine it talks to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from rlmismatch.contract import Reading
from rlmismatch.pins.spec import LocalError as LocalError
from rlmismatch.tokens import Prompt, Sequence

if TYPE_CHECKING:
    import torch

SideName = Literal["trainer", "rollout", "oracle"]
Impl = Literal["reference", "triton"]
# trainer: forward. rollout: prefill, chunked, paged, decode, and what pages come to (vllm_scoring.py). oracle: oracle (float64 or
# float32), plain (model dtype).
ScorePath = Literal[
    "forward",
    "prefill",
    "chunked",
    "paged",
    "decode",
    "decode_hit",
    "prefill_shuffled",
    "prefill_packed",
    "decode_shuffled",
    "oracle",
    "plain",
]

NOT_PACKED: Final = "prefill_packed left out: "  # and why: a note of an arm that asked for this path


@dataclass(frozen=True, kw_only=True)
class SideConfig:
    """All that one side's worker needs to start; the same on every rank."""

    side: SideName
    engine: Literal["megatron", "vllm", "oracle"]
    ckpt: str
    tp: int = 1
    sp: bool = False
    cp: int = 1  # context-parallel ranks of the trainer: they share the sequence
    cp_partition: Literal["zigzag", "contiguous"] = "zigzag"
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] | None = None  # None: the layer spec's own
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    impl: Impl = "reference"
    seed: int = 0
    max_model_len: int = 4096
    block_size: int = 32  # KV cache block, tokens
    chunk_size: int = 16  # tokens per step of the chunked path
    gpu_memory_fraction: float = 0.4  # of one GPU, for a rollout rank's weights and KV cache
    ranks_per_gpu: int = 1  # more than one where ranks outnumber the GPUs of a host and --share-gpu lets them
    trainer_spec: Literal["local", "te"] = "local"
    vocab_padding_policy: Literal["include", "mask"] = "include"
    temperature: float = 1.0  # the sampling temperature both sides are to apply to the logits
    bos_token_id: int | None = None
    grads: bool = False  # the trainer holds gradients, too
    try_backends: bool = False  # all other attention backends are tried: some compile for minutes at their first call
    oracle_dtype: Literal["float64", "float32"] = "float64"
    plants: tuple[str, ...] = ()  # faults put in on purpose on this side
    knobs: Mapping[str, Any] = field(default_factory=dict)  # family knobs requested for this side

    def __post_init__(self) -> None:
        if self.tp < 1 or self.cp < 1:
            raise ValueError(f"tp and cp must be at least 1, got {self.tp} and {self.cp}")
        if self.sp and self.tp == 1:
            raise ValueError("sequence parallelism needs tp of at least 2")

    @property
    def world_size(self) -> int:
        return self.tp * self.cp

    @property
    def sharing(self) -> str:
        """What to say of this side's ranks where they have not each a GPU of its own."""
        return f"up to {self.ranks_per_gpu} of {self.world_size} ranks on a GPU" if self.ranks_per_gpu > 1 else ""

    @property
    def layout(self) -> str:
        """How the ranks share the model and the sequence, in a word: ``TP2+SP CP2``."""
        return f"TP{self.tp}{'+SP' if self.sp else ''}" + (f" CP{self.cp}" if self.cp > 1 else "")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SideConfig:
        return cls(**{**data, "plants": tuple(data["plants"])})


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting of all knobs that is run on one side.

    pins: pin ids in force (pins/spec.py). paths: which scores to take. probe: ``local`` replays every pinned op's captured inputs
    through the native op, the pin and float64; ``boundary`` (all pins on, one sequence) also runs the native op on the same, equal
    inputs and keeps its output; ``logits`` keeps scored rows of the head, and what the side's own log-softmax makes of them
    (engines/logprob_probe.py); ``attention`` keeps attention's operands and output of one sequence (engines/attention_capture.py);
    ``gemm`` replays products and sums over ranks on the operands of the scored rows (engines/gemm_probe.py);
    ``grads`` takes the trainer's gradients (engines/megatron_gradients.py).
    settings: knob values for this arm only, e.g. ``{"logprob.reduce": "allgather_logits"}``.
    """

    id: str
    pins: frozenset[str] = frozenset()
    paths: tuple[ScorePath, ...] = ()
    probe: Literal["none", "local", "boundary", "logits", "attention", "gemm", "grads"] = "none"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "pins": sorted(self.pins), "paths": list(self.paths)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Arm:
        return cls(**{**data, "pins": frozenset(data["pins"]), "paths": tuple(data["paths"])})


@dataclass(kw_only=True)
class ArmResult:
    """What one side measured for one arm. Complete on rank 0; other ranks may leave the tensors empty."""

    arm: Arm
    # path -> sequence id -> float64 [len(response_ids)], nats
    scores: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    # pin id -> how often its replacement ran, summed over hooks; a requested pin with 0 calls is an error, not a pass
    calls: dict[str, int] = field(default_factory=dict)
    local: list[LocalError] = field(default_factory=list)
    # boundary name -> native output on pinned (equal) inputs, canonical global layout; or the tensors of a probe
    boundaries: dict[str, torch.Tensor] = field(default_factory=dict)
    # knob -> {"requested":, "actual":, "status": applied|fell_back|unsupported|unobservable, "reason":}
    knobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Engine(Protocol):
    """One engine on one rank, built as ``EngineClass(config, rank=, local_rank=)``.

    Every method is collective: all ranks of the side call it in the same order.
    """

    def load(self) -> None:
        """Load the checkpoint. torch.distributed is already initialised with the side's ranks."""

    def readings(self) -> Mapping[str, Mapping[str, Reading]]:
        """The contract, read back from the live engine: axis id -> field -> reading."""

    def weight_digests(self) -> Mapping[str, str]:
        """Logical (HF) tensor name -> digest of the live, un-sharded, un-fused tensor. Complete on rank 0."""

    def provenance(self) -> Mapping[str, Any]:
        """Versions, backends that run, environment that matters: JSON."""

    def generate(self, prompts: Seq[Prompt], *, max_new_tokens: int, seed: int) -> tuple[Sequence, ...]:
        """Sample responses and record their log-probs (rollout only)."""

    def run(self, arm: Arm, sequences: Seq[Sequence]) -> ArmResult:
        """Score the sequences under one arm; native state is restored on return, also after an error."""

    def close(self) -> None: ...
