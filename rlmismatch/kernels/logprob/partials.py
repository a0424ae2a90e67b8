"""Vocabulary tiles: the unit in which a log-softmax is summed, wherever the shard boundaries lie. No arithmetic here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from rlmismatch.errors import ContractError

WIDTH: Final = 64  # columns of the real vocabulary; divides every shard boundary of both engines


@dataclass(frozen=True, kw_only=True)
class VocabPartials:
    """What one rank knows of its vocabulary shard, tile by tile; J tiles, the first of which is global tile `first_tile`.

    max_TJ: largest scaled logit of a tile. sumexp_TJ: sum of exp(scaled logit - max). target_T: scaled logit of the target on the rank
    that owns it, NaN elsewhere. owns_T: bool. Floats are float64 (reference) or float32 (triton).
    """

    max_TJ: torch.Tensor
    sumexp_TJ: torch.Tensor
    target_T: torch.Tensor
    owns_T: torch.Tensor
    first_tile: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which real-vocabulary columns a rank's logits hold: ``[start, start + columns)``, in tiles from `first_tile`."""

    start: int
    columns: int

    @classmethod
    def of(cls, *, vocab_start: int, local_width: int, vocab_size: int) -> Shard:
        """The real columns of a shard of `local_width` columns at `vocab_start`; padding rows of the head do not count.

        Raises ValueError if a boundary inside the real vocabulary cuts a tile in two.
        """
        end = min(vocab_start + local_width, vocab_size)
        if vocab_size < 1 or vocab_start < 0:
            raise ValueError(f"vocabulary of {vocab_size}, shard from {vocab_start}")
        if vocab_start % WIDTH or (end % WIDTH and end < vocab_size):
            raise ValueError(
                f"shard [{vocab_start}, {vocab_start + local_width}) of {vocab_size} does not start and end at multiples of {WIDTH}"
            )
        return cls(start=vocab_start, columns=max(0, end - vocab_start))

    @property
    def first_tile(self) -> int:
        return self.start // WIDTH

    @property
    def tiles(self) -> int:
        return tile_count(self.columns)


@dataclass(frozen=True, kw_only=True)
class Joined:
    """All tiles of the vocabulary in global order, and the owner's copy of the target's scaled logit."""

    max_TJ: torch.Tensor
    sumexp_TJ: torch.Tensor
    target_T: torch.Tensor


def tile_count(columns: int) -> int:
    return -(-columns // WIDTH)


class TargetCheck:
    """Are all targets tokens? Begun before the work that reads them and answered after its launch: on a GPU the bounds are found on a
    stream of their own, so that waiting for the answer is not waiting for the work.
    """

    def __init__(self, targets_T: torch.Tensor, *, rows: int, vocab_size: int) -> None:
        """Raises ValueError for a wrong shape or dtype."""
        if targets_T.shape != (rows,) or targets_T.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"targets must be {rows} int32 or int64, got {tuple(targets_T.shape)} {targets_T.dtype}")
        self._targets_T, self._vocab_size = targets_T, vocab_size
        self._stream = _side_stream(targets_T.device) if targets_T.is_cuda else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(targets_T.device))
            targets_T.record_stream(self._stream)
        with torch.cuda.stream(self._stream):  # None: where it is
            self._bounds = torch.stack(targets_T.aminmax()) if rows else None

    def require(self) -> None:
        """Raise ContractError for a target that is no token (a padding id, -100)."""
        if self._bounds is None:
            return
        with torch.cuda.stream(self._stream):
            low, high = self._bounds.tolist()
        if low < 0 or high >= self._vocab_size:
            row = int(((self._targets_T < 0) | (self._targets_T >= self._vocab_size)).int().argmax())
            raise ContractError(
                "target-outside-vocabulary",
                f"target {int(self._targets_T[row])} of row {row} is not in [0, {self._vocab_size})",
                hint="ignored positions must be left out, not scored",
            )


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def require_targets(targets_T: torch.Tensor, *, rows: int, vocab_size: int) -> None:
    """`TargetCheck`, begun and answered at once."""
    TargetCheck(targets_T, rows=rows, vocab_size=vocab_size).require()


def require_tiled(runs: Sequence[tuple[int, int]], *, vocab_size: int) -> None:
    """Raise ContractError unless the ranks' runs of tiles, (first, count) from rank 0 on, cover the vocabulary exactly once."""
    next_tile = 0
    for rank, (first, count) in enumerate(runs):
        if first != next_tile and count:
            what = "leaves a gap" if first > next_tile else "overlaps"
            raise ContractError("vocabulary-shards-do-not-tile", f"rank {rank} starts at tile {first}, expected {next_tile}: {what}")
        next_tile += count
    if next_tile != tile_count(vocab_size):
        raise ContractError("vocabulary-shards-do-not-tile", f"{next_tile} tiles of {WIDTH} for a vocabulary of {vocab_size}")


def join(parts: Sequence[VocabPartials], *, vocab_size: int) -> Joined:
    """The ranks' partials, rank 0 first, as one. Raises ContractError unless the tiles cover the vocabulary exactly once and every
    row has exactly one owner: its logit is copied, never summed."""
    require_tiled([(p.first_tile, p.max_TJ.shape[1]) for p in parts], vocab_size=vocab_size)
    owns_RT = torch.stack([p.owns_T for p in parts])
    owners_T = owns_RT.sum(dim=0)
    if bool((owners_T != 1).any()):
        row = int((owners_T != 1).int().argmax())
        raise ContractError(
            "target-owner-count", f"the target of row {row} has {int(owners_T[row])} owners among {len(parts)} ranks, not 1"
        )
    owner_1T = owns_RT.int().argmax(dim=0, keepdim=True)
    return Joined(
        max_TJ=torch.cat([p.max_TJ for p in parts], dim=1),
        sumexp_TJ=torch.cat([p.sumexp_TJ for p in parts], dim=1),
        target_T=torch.stack([p.target_T for p in parts]).gather(0, owner_1T)[0],
    )
