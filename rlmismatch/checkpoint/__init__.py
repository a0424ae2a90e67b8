"""A checkpoint in HF layout: a directory with config.json and safetensors, read as logical tensors under their HF names.

`Checkpoint.open` reads config.json and the headers of the weight files only, and refuses everything that would otherwise show up as
a traceback in an engine or, worse, as drift. Nothing is downloaded, and torch is imported only when a tensor is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlmismatch.checkpoint.config import ARCHITECTURES, DTYPES, ModelConfig, RopeSpec
from rlmismatch.checkpoint.files import StoredTensor, read_headers
from rlmismatch.checkpoint.parse import parse_config
from rlmismatch.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["ARCHITECTURES", "DTYPES", "Checkpoint", "ModelConfig", "RopeSpec", "StoredTensor", "combine_digests", "digest"]

# Old checkpoints store the rotary buffer that every reader recomputes from config.json.
_TOLERATED: Final = re.compile(r"\.rotary_emb\.inv_freq$")
_TOKENIZER_FILES: Final[tuple[tuple[str, ...], ...]] = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
# What a person types for a model on a hub: "org/name".
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files fit its config. `stored` holds the logical tensors in the order of the forward pass."""

    path: Path
    config: ModelConfig
    stored: Mapping[str, StoredTensor] = field(repr=False)
    stored_head: StoredTensor | None = field(default=None, repr=False)  # a tied checkpoint's redundant lm_head.weight

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read config.json and the tensor headers. Raises one UsageError that says all that is wrong with them."""
        root = Path(path)
        config = parse_config(_read_config(root), where=str(root / "config.json"))
        headers = read_headers(root)
        expected = config.tensor_shapes()
        head = headers.pop("lm_head.weight", None) if config.tied else None
        _check_tensors(headers, expected, config, root)
        if not config.dtype:
            config = dataclasses.replace(config, dtype=headers["model.embed_tokens.weight"].dtype)
        if head is not None and head.shape != expected["model.embed_tokens.weight"]:
            raise _tied_head_differs(
                root, f"its shape is {list(head.shape)}, the embedding's {list(expected['model.embed_tokens.weight'])}"
            )
        return cls(path=root, config=config, stored={name: headers[name] for name in expected}, stored_head=head)

    @property
    def has_tokenizer(self) -> bool:
        """Whether text prompts can be tokenised from this directory."""
        return any(all((self.path / name).is_file() for name in names) for names in _TOKENIZER_FILES)

    @property
    def num_bytes(self) -> int:
        """Bytes of the logical tensors as stored."""
        return sum(stored.num_bytes for stored in self.stored.values())

    def tensor(self, name: str, *, dtype: str | None = None) -> torch.Tensor:
        """One logical tensor on the CPU, as stored, or rounded to `dtype` (a torch name, e.g. ``bfloat16``). KeyError if unknown."""
        return _cast(self.stored[name].load(), dtype)

    def tensors(self, *, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """All logical tensors, one after the other, in the order of the forward pass."""
        return ((name, self.tensor(name, dtype=dtype)) for name in self.stored)

    def digests(self, *, dtype: str | None = None, progress: Callable[[int, int], None] | None = None) -> dict[str, str]:
        """Logical name -> `digest` of the tensor, rounded to `dtype` first: what an engine that runs in `dtype` must hold.

        Reads every byte, so this is also where values are judged. progress: called with tensors done and tensors in all. Raises
        UsageError ``weights-not-finite`` with the counts of every tensor that holds a NaN or an Inf (after rounding: a float32 may
        overflow float16), and ``checkpoint-tied-head-differs`` if a tied checkpoint stores a head that is not the embedding.
        """
        import torch

        out, bad = {}, []
        for done, (name, tensor) in enumerate(self.tensors(dtype=dtype), 1):
            if not bool(torch.isfinite(tensor).all()):
                bad.append(f"{name}: {int(tensor.isnan().sum())} NaN, {int(tensor.isinf().sum())} Inf of {tensor.numel()}")
            out[name] = digest(tensor)
            if progress is not None:
                progress(done, len(self.stored))
        if bad:
            raise UsageError(
                "weights-not-finite", f"{len(bad)} tensors hold NaN or Inf: {bad[0]}", where=str(self.path), details=tuple(bad)
            )
        if self.stored_head is not None and digest(_cast(self.stored_head.load(), dtype)) != out["model.embed_tokens.weight"]:
            raise _tied_head_differs(self.path, "their values are not equal")
        return out


def digest(tensor: torch.Tensor) -> str:
    """sha256 (hex) over dtype name, shape and row-major bytes; -0.0 and 0.0 differ. Any device; the tensor may be a strided view."""
    import torch

    header = json.dumps([str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode()
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    sha = hashlib.sha256(header)
    sha.update(flat.numpy().data)
    return sha.hexdigest()


def combine_digests(digests: Mapping[str, str]) -> str:
    """One sha256 (hex) for a whole set of tensors, whatever order they come in."""
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def _read_config(root: Path) -> dict[str, Any]:
    if not root.exists():
        looks_remote = not root.is_absolute() and _HUB_NAME.fullmatch(str(root)) is not None
        raise UsageError(
            "checkpoint-not-found",
            f"{root} does not exist",
            where=str(root),
            hint="this looks like a hub name, but nothing is downloaded: give the directory of a local copy" if looks_remote else "",
        )
    if not root.is_dir():
        raise UsageError(
            "checkpoint-not-a-directory", f"{root} is a file", where=str(root), hint="give the directory that holds config.json"
        )
    path = root / "config.json"
    if not path.is_file():
        raise UsageError(
            "checkpoint-no-config",
            f"{root} holds no config.json, so it is no checkpoint in HF layout",
            where=str(root),
            hint="convert it to HF layout first",
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError("checkpoint-config-malformed", f"config.json can not be read: {error}", where=str(path)) from None
    if not isinstance(data, dict):
        raise UsageError("checkpoint-config-malformed", "config.json must be a JSON object", where=str(path))
    return data


def _check_tensors(headers: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], config: ModelConfig, root: Path) -> None:
    found = {name: stored for name, stored in headers.items() if name in expected or not _TOLERATED.search(name)}
    missing = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    surplus = [f"surplus: {name} {list(stored.shape)}" for name, stored in found.items() if name not in expected]
    misshapen = [
        f"misshapen: {name} is {list(found[name].shape)}, config.json implies {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    if missing or surplus or misshapen:
        hint = "config.json and the weights are not of one model, or the copy is incomplete"
        if "lm_head.weight" in expected and "lm_head.weight" not in found and len(missing) == 1:
            hint = "a tied model says so: set tie_word_embeddings to true in config.json"
        raise UsageError(
            "checkpoint-tensors-do-not-match",
            f"the weights do not fit {config.architecture} as config.json describes it: "
            f"{len(missing)} tensors missing, {len(surplus)} surplus, {len(misshapen)} misshapen",
            where=str(root),
            hint=hint,
            details=(*missing, *surplus, *misshapen),
        )
    foreign = [f"{name}: {stored.dtype}" for name, stored in found.items() if stored.dtype not in DTYPES]
    if foreign:
        raise UsageError(
            "checkpoint-dtype-unsupported",
            f"{len(foreign)} tensors are stored in another dtype than {', '.join(DTYPES)}: {foreign[0]}",
            where=str(root),
            hint="use the checkpoint that is not quantised",
            details=tuple(foreign),
        )


def _tied_head_differs(root: Path, how: str) -> UsageError:
    return UsageError(
        "checkpoint-tied-head-differs",
        f"config.json ties lm_head to the embedding, but the weights hold another lm_head.weight: {how}",
        where=str(root),
        hint="set tie_word_embeddings to false if the head was trained apart, or delete lm_head.weight",
    )


def _cast(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    import torch

    return tensor if dtype is None else tensor.to(getattr(torch, dtype))
