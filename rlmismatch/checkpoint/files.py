"""Safetensors files of a checkpoint directory: one file, or shards with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from safetensors import SafetensorError, safe_open

from rlmismatch.errors import UsageError

if TYPE_CHECKING:
    import torch

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
# Names that safetensors writes -> (torch name, bytes an element).
_DTYPES: Final[Mapping[str, tuple[str, int]]] = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor as a file's header describes it. `dtype` is torch's name for the supported ones, else safetensors' own."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the data; 0 for a dtype that is not supported."""
        sizes = dict(_DTYPES.values())
        return math.prod(self.shape) * sizes.get(self.dtype, 0)

    def load(self) -> torch.Tensor:
        """The tensor on the CPU, as stored. Raises UsageError if the file has changed or went away since its header was read."""
        try:
            with safe_open(self.file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise _corrupt(self.file, error) from None
        return tensor


def read_headers(root: Path) -> dict[str, StoredTensor]:
    """Every tensor in the checkpoint directory, from the headers alone. Raises UsageError for what can not be read or does not add up."""
    index, single = root / INDEX_FILE, root / SINGLE_FILE
    if index.is_file():
        return _read_sharded(root, index)
    if single.is_file():
        return _read_file(single)
    others = sorted(p.name for p in root.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
    raise UsageError(
        "checkpoint-no-weights",
        f"{root} holds neither {SINGLE_FILE} nor {INDEX_FILE}" + (f", only {', '.join(others)}" if others else ""),
        where=str(root),
        hint="save it again with save_pretrained(..., safe_serialization=True)" if others else "the copy is incomplete",
    )


def _read_sharded(root: Path, index: Path) -> dict[str, StoredTensor]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        listed = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UsageError("checkpoint-index-malformed", f"{INDEX_FILE} has no usable weight_map: {error!r}", where=str(index)) from None
    files = sorted(set(listed.values()))
    absent = [name for name in files if not (root / name).is_file()]
    if absent:
        raise UsageError(
            "checkpoint-shard-missing",
            f"{INDEX_FILE} names {len(files)} files, of which {len(absent)} are not there: {', '.join(absent)}",
            where=str(root),
            hint="the copy is incomplete",
        )
    found: dict[str, StoredTensor] = {}
    disagreements = []
    for file in files:
        for name, stored in _read_file(root / file).items():
            if listed.get(name) == file:
                found[name] = stored
            else:
                disagreements.append(f"{name} stands in {file}; the index says {listed.get(name, 'nothing of it')}")
    disagreements += [f"{name} is said to stand in {file}, but does not" for name, file in listed.items() if name not in found]
    if disagreements:
        raise UsageError(
            "checkpoint-index-malformed",
            f"{INDEX_FILE} and the shards disagree about {len(disagreements)} tensors: {disagreements[0]}",
            where=str(index),
            hint="the files are of different versions of the checkpoint",
            details=tuple(disagreements),
        )
    return found


def _read_file(path: Path) -> dict[str, StoredTensor]:
    out = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                part = file.get_slice(name)
                dtype = part.get_dtype()
                out[name] = StoredTensor(name=name, file=path, shape=tuple(part.get_shape()), dtype=_DTYPES.get(dtype, (dtype, 0))[0])
    except (OSError, SafetensorError) as error:
        raise _corrupt(path, error) from None
    return out


def _corrupt(path: Path, error: Exception) -> UsageError:
    return UsageError(
        "checkpoint-corrupt", f"{path.name} is truncated or corrupt: {error}", where=str(path), hint="copy or download it again"
    )
