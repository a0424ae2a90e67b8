"""The rows of the head that no token of the tokenizer names, looked at without an engine: how many, how large, how they were made.

A checkpoint's vocabulary is often larger than its tokenizer's. Those rows are no padding: they are the model's, both engines count them,
and what they hold decides how much probability they take.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlmismatch.errors import UsageError

if TYPE_CHECKING:
    import torch

    from rlmismatch.checkpoint import Checkpoint

_ROWS_AT_A_TIME: Final = 8192
# Of a normal distribution with mean 0: what n samples may stray from it, in standard errors.
_STRAY: Final = 6.0


@dataclass(frozen=True, kw_only=True)
class UnusedRows:
    """Rows of the head from `first` on, which no token names. Norms are Euclidean, of one row each.

    kind: zeros | one row repeated | copies of the mean row | normal(STD) | other | none.
    """

    rows: int  # of the head
    tokenizer: int | None  # ids that the tokenizer knows, added ones included; None: the checkpoint has none that can be read
    first: int
    kind: str = "none"
    norm_mean: float | None = None
    norm_max: float | None = None
    used_norm_mean: float | None = None  # of the rows before `first`

    @property
    def count(self) -> int:
        return self.rows - self.first

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def unused_rows(checkpoint: Checkpoint) -> UnusedRows:
    """Look at the head's rows beyond the tokenizer; without a tokenizer, at the rows at its end that are all alike."""
    rows, size = checkpoint.config.vocab_size, tokenizer_size(checkpoint.path)
    if size is not None and size >= rows:
        return UnusedRows(rows=rows, tokenizer=size, first=rows)
    weight_VH = checkpoint.tensor("model.embed_tokens.weight" if checkpoint.config.tied else "lm_head.weight")
    first = _first_of_tail(weight_VH) if size is None else size
    if first == rows:
        return UnusedRows(rows=rows, tokenizer=size, first=first)
    unused_VH = weight_VH[first:].float()
    used_mean_H, used_norm = _means(weight_VH[:first])
    norms_V = unused_VH.norm(dim=1)
    return UnusedRows(
        rows=rows,
        tokenizer=size,
        first=first,
        kind=kind_of(unused_VH, used_mean_H),
        norm_mean=float(norms_V.mean()),
        norm_max=float(norms_V.max()),
        used_norm_mean=used_norm,
    )


def kind_of(rows_VH: torch.Tensor, used_mean_H: torch.Tensor | None) -> str:
    """How float32 `rows_VH` were made, in the words of `UnusedRows.kind`. used_mean_H: float32 mean of the rows that are used."""
    if not bool(rows_VH.any()):
        return "zeros"
    # A mean that was written in bfloat16 is off by 2^-9 of each element.
    if used_mean_H is not None and bool(((rows_VH - used_mean_H).abs() <= 2.0**-8 * used_mean_H.abs() + 1e-8).all()):
        return "copies of the mean row"
    if len(rows_VH) > 1 and bool((rows_VH == rows_VH[0]).all()):
        return "one row repeated"
    x, n = rows_VH.flatten().double(), rows_VH.numel()
    std = float(x.std())
    mean_strays = abs(float(x.mean())) > _STRAY * std / n**0.5
    kurtosis_strays = abs(float(((x - x.mean()) ** 4).mean()) / std**4 - 3.0) > _STRAY * (24.0 / n) ** 0.5
    return "other" if mean_strays or kurtosis_strays else f"normal({std:.2g})"


def tokenizer_size(root: Path) -> int | None:
    """One more than the largest id in tokenizer.json, added tokens included; None without that file. UsageError if it cannot be read."""
    file = root / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = data["model"]["vocab"]
        # A unigram model lists [piece, score] pairs in the order of their ids; the others map a piece to its id.
        ids = [*(range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values())]
        ids += [token["id"] for token in data.get("added_tokens") or ()]
        return max(map(int, ids)) + 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError("tokenizer-malformed", f"tokenizer.json can not be read: {error!r}", where=str(file)) from None


def _first_of_tail(weight_VH: torch.Tensor) -> int:
    """The first of two or more equal rows at the end; all rows if the last two differ."""
    rows = first = weight_VH.shape[0]
    while first > 0 and bool((weight_VH[first - 1] == weight_VH[-1]).all()):
        first -= 1
    return first if rows - first > 1 else rows


def _means(weight_VH: torch.Tensor) -> tuple[torch.Tensor | None, float | None]:
    """(float32 mean row, mean norm of a row), a few rows at a time; None of no row."""
    if not len(weight_VH):
        return None, None
    total_H, norms = weight_VH.new_zeros(weight_VH.shape[1]).double(), 0.0
    for first in range(0, len(weight_VH), _ROWS_AT_A_TIME):
        part_VH = weight_VH[first : first + _ROWS_AT_A_TIME].float()
        total_H += part_VH.sum(dim=0)
        norms += float(part_VH.norm(dim=1).double().sum())
    return (total_H / len(weight_VH)).float(), norms / len(weight_VH)
