"""What a run works on, checked before any engine starts: checkpoint, prompts or rollout, device, lengths."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rlmismatch import tokens
from rlmismatch.checkpoint import Checkpoint
from rlmismatch.errors import EnvironmentUnfitError, UsageError
from rlmismatch.settings import Settings
from rlmismatch.tokens import Prompt, Sequence
from rlmismatch.torchrun_exit import under_torchrun

_DEFAULT_TEXTS: Final = (
    "The capital of France is",
    "Water boils at one hundred degrees Celsius because",
    "List three reasons why a train may be late:",
    "Once upon a time, in a small village by the sea,",
)
_DEFAULT_LENGTHS: Final = (5, 17, 33, 12)  # below, at and above a KV block of 16 or 32, and one in between
_DEFAULT_MODEL_LEN: Final = 2048
_NEEDS_PEERS: Final = ("custom", "symm_mem", "flashinfer")  # all-reduces that read the memory of other GPUs


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A checked run: sequences if a rollout file was given, prompts otherwise."""

    checkpoint: Checkpoint
    prompts: tuple[Prompt, ...]
    sequences: tuple[Sequence, ...]
    device: Literal["cpu", "cuda"]
    impl: Literal["reference", "triton"]
    max_model_len: int
    together: bool  # whether all sides are up at the same time
    gpus: int | None = None  # of this host, where ranks share them; None: each has its own

    def ranks_per_gpu(self, ranks: int) -> int:
        """How many of a side's `ranks` one GPU of this host holds."""
        return _ranks_per_gpu(ranks, self.gpus)


def _all_or_none_recorded(sequences: Iterable[Sequence], source: str) -> None:
    """Recorded log-probs are compared for all tokens or not at all: of a part, a report could only say something false."""
    given = tuple(sequences)
    without = [s.id for s in given if s.recorded_logprobs is None]
    if without and len(without) < len(given):
        raise UsageError(
            "recorded-logprobs-missing",
            f"{len(without)} of {len(given)} sequences have no logprobs, the first is {without[0]!r}; the others have them",
            where=source,
            hint="give logprobs to every sequence, or take them from all",
        )


def prepare(settings: Settings) -> Inputs:
    """Check everything that needs no engine. Raises UsageError with what to mend, EnvironmentUnfitError for a missing device."""
    checkpoint = Checkpoint.open(Path(settings.ckpt))
    config = checkpoint.config
    config.check_fits(settings.trainer_tp, side="trainer", sp=settings.sp)
    config.check_fits(settings.rollout_tp, side="rollout")
    sequences = tokens.read_rollout(Path(settings.rollout)) if settings.rollout else ()
    _all_or_none_recorded(sequences, settings.rollout or "")
    if settings.prompts:
        prompts = tokens.read_prompts(Path(settings.prompts))
    else:
        prompts = () if settings.rollout else default_prompts(config.vocab_size, text=checkpoint.has_tokenizer)
    texts = [p.id for p in prompts if p.text]
    if texts and not checkpoint.has_tokenizer:
        raise UsageError(
            "tokenizer-missing",
            f"prompt {texts[0]!r} is text, but {settings.ckpt} has no tokenizer",
            where=settings.prompts or "",
            hint="give token_ids instead of text, or copy tokenizer.json into the checkpoint",
        )
    limit = min(config.max_positions, settings.max_model_len or config.max_positions)
    source = settings.prompts or settings.rollout or ""
    reserve = 0 if settings.rollout else settings.max_new_tokens
    tokens.check_ids((*prompts, *sequences), vocab_size=config.vocab_size, max_positions=limit, reserve=reserve, source=source)
    lengths = [len(p.token_ids) for p in prompts] + [len(s.token_ids) for s in sequences]
    longest = max(lengths) + reserve
    device = _device(settings)
    gpus = _shared_gpus(settings, device)
    return Inputs(
        checkpoint=checkpoint,
        prompts=prompts,
        sequences=sequences,
        device=device,
        impl=settings.impl if settings.impl != "auto" else ("triton" if device == "cuda" else "reference"),
        # One more position: a scoring request still has to emit a token.
        max_model_len=min(limit, settings.max_model_len or max(longest + 1, _DEFAULT_MODEL_LEN)),
        together=settings.sides == "together"
        or (settings.sides == "auto" and (device == "cpu" or _fit_beside(settings, checkpoint, gpus))),
        gpus=gpus,
    )


# Of the weights in the model's dtype: what the oracle keeps for its float64 (or float32) copy, and for the plain forward beside it.
_ORACLE_SIZE: Final = {"float64": 5.0, "float32": 3.0, "off": 0.0}
_WORKING_SHARE: Final = 0.1  # of the GPU, for activations, libraries' workspaces and the contexts of a process a side
_A_PROCESS: Final = 2**30  # bytes that each further process takes: its context, NCCL's buffers


def _fit_beside(settings: Settings, checkpoint: Checkpoint, gpus: int | None) -> bool:
    """Whether trainer, rollout and oracle fit onto one GPU (the first, which holds a rank of each) at the same time."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    trainer = checkpoint.num_bytes / settings.trainer_tp * _ranks_per_gpu(settings.trainer_tp * settings.cp, gpus)
    oracle = checkpoint.num_bytes * _ORACLE_SIZE[settings.oracle]
    more_ranks = _ranks_per_gpu(settings.trainer_tp * settings.cp, gpus) + _ranks_per_gpu(settings.rollout_tp, gpus) - 2
    return trainer + oracle + more_ranks * _A_PROCESS + (settings.gpu_memory_fraction + _WORKING_SHARE) * total <= total


def _ranks_per_gpu(ranks: int, gpus: int | None) -> int:
    """How many of a side's ranks one GPU of this host holds. gpus: those that ranks share; None: each rank has its own."""
    return 1 if gpus is None else -(-_ranks_here(ranks) // gpus)


def _ranks_here(ranks: int) -> int:
    """Those of a side's `ranks` that this host starts."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)) if under_torchrun(os.environ) else ranks


def _shared_gpus(settings: Settings, device: str) -> int | None:
    """The GPUs that ranks are to share; None where each has its own. Raises where there is nothing to share."""
    if not settings.share_gpu:
        return None
    if device == "cpu":
        raise EnvironmentUnfitError("no-cuda-device", "--share-gpu, but no CUDA device is visible", hint="leave it out to run on the CPU")
    import torch

    gpus = torch.cuda.device_count()
    if _ranks_per_gpu(settings.world_size, gpus) == 1:
        raise UsageError(
            "share-gpu-not-needed",
            f"--share-gpu, and the {_ranks_here(settings.world_size)} ranks of this host have GPUs enough: {gpus}",
            hint="leave it out",
        )
    if _ranks_per_gpu(settings.rollout_tp, gpus) > 1 and settings.knobs_of("rollout").get("model.compile") == "inductor":
        raise UsageError(
            "share-gpu-has-no-peers",
            "--compile inductor fuses all-reduces that read the memory of other GPUs, and ranks of the rollout share one",
            hint="--compile graph, or as many GPUs as ranks",
        )
    backend = settings.knobs_of("rollout").get("gemm.all_reduce_backend")
    if backend in _NEEDS_PEERS and _ranks_per_gpu(settings.rollout_tp, gpus) > 1:
        raise UsageError(
            "share-gpu-has-no-peers",
            f"--all-reduce-backend {backend} reads the memory of other GPUs, and ranks of the rollout share one",
            hint="--all-reduce-backend nccl, or as many GPUs as ranks",
        )
    return gpus


def default_prompts(vocab_size: int, *, text: bool) -> tuple[Prompt, ...]:
    """The prompts of a run that names none: plain text where there is a tokenizer, else fixed token ids of mixed lengths."""
    if text:
        return tuple(Prompt(id=f"text-{i}", text=words) for i, words in enumerate(_DEFAULT_TEXTS))
    rng = random.Random(0)
    return tuple(
        Prompt(id=f"ids-{n}", token_ids=tuple(rng.randrange(3, min(vocab_size, 1000)) for _ in range(n))) for n in _DEFAULT_LENGTHS
    )


def token_texts(checkpoint: Checkpoint, sequences: tuple[Sequence, ...]) -> dict[str, str]:
    """Token id (as text) -> what it decodes to, for the ids of `sequences`: for people to read. Empty without a tokenizer."""
    file = checkpoint.path / "tokenizer.json"
    if not file.is_file():
        return {}
    from tokenizers import Tokenizer  # comes with either engine

    tokenizer = Tokenizer.from_file(str(file))
    ids = sorted({t for s in sequences for t in s.token_ids})
    return {str(t): tokenizer.decode([t], skip_special_tokens=False) for t in ids}


def _device(settings: Settings) -> Literal["cpu", "cuda"]:
    if settings.device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if settings.device == "cuda":
        raise EnvironmentUnfitError(
            "no-cuda-device",
            "--device cuda, but no CUDA device is visible",
            hint="use --device cpu, or check the driver and CUDA_VISIBLE_DEVICES",
        )
    return "cpu"
