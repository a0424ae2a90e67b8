"""Attention as other arithmetic would compute it: where scores and probabilities are rounded, in which pieces the output is added, in
which order the pieces are merged, and where the running state is cast.

Float64 inside, with a rounding at each named point, so that two policies differ in their roundings alone. Blocks lie at absolute positions,
so a row's result does not depend on which other rows are computed with it. T query rows, the last of N keys, causal; Hq query heads read
Hkv = Hq / group key/value heads; D head dim.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from rlmismatch import float64

Probabilities = Literal["float32", "rounded", "rounded before the sum"]
Downcast = Literal["final_write", "per_partial", "per_block"]
KV_BLOCKS: Final = (16, 32, 64)  # keys, of a running output that is cast after each block
PARTIAL: Final = 64  # keys, of an output that is cast after each partial
MAX_ORDERS: Final = 64


@dataclass(frozen=True, kw_only=True)
class Policy:
    """scores: whether they are rounded to the model dtype. probabilities: kept in float32, normalised and then rounded, or rounded as
    exp(score - largest) and divided by their unrounded sum at the end. downcast: where the output state is cast to the model dtype;
    after every block of `block` keys the running sum lives in that dtype."""

    scores_rounded: bool = False
    probabilities: Probabilities = "float32"
    downcast: Downcast = "final_write"
    block: int = 0  # keys; 0: no cast but the last

    @property
    def accum(self) -> str:
        """The contract's word for the dtype of the running sum."""
        return "rounded" if self.downcast == "per_block" else "float32"

    def __str__(self) -> str:
        scores = "scores rounded" if self.scores_rounded else "scores float32"
        weights = {"float32": "probabilities float32", "rounded": "probabilities rounded", "rounded before the sum": "weights rounded"}
        where = {"final_write": "one cast", "per_partial": "a cast per partial of", "per_block": "a cast per"}[self.downcast]
        where = f"{where} {self.block} keys" if self.block else where
        return f"{scores}, {weights[self.probabilities]}, {where}"


_CASTS: Final[tuple[tuple[Downcast, int], ...]] = (("final_write", 0), ("per_partial", PARTIAL), *(("per_block", n) for n in KV_BLOCKS))
POLICIES: Final[tuple[Policy, ...]] = tuple(
    Policy(scores_rounded=scores, probabilities=probabilities, downcast=downcast, block=block)
    for scores, probabilities, (downcast, block) in itertools.product((False, True), get_args(Probabilities), _CASTS)
)


@dataclass(frozen=True, kw_only=True)
class Operands:
    """What attention reads: q [T, Hq, D], k and v [N, Hkv, D], in the model dtype; and where it is known what it wrote, [T, Hq, D]."""

    q_THD: torch.Tensor
    k_THD: torch.Tensor
    v_THD: torch.Tensor
    scale: float
    out_THD: torch.Tensor | None = None
    window: int | None = None  # tokens that a token sees, itself included

    def first_heads(self, tokens: int, heads: int) -> Operands:
        """The first tokens of the first key/value heads with their query heads, `heads` of these at most (one group at least)."""
        group = self.q_THD.shape[1] // self.k_THD.shape[1]
        kv = max(1, heads // group)
        rows = slice(tokens)
        return Operands(
            q_THD=self.q_THD[rows, : kv * group],
            k_THD=self.k_THD[rows, :kv],
            v_THD=self.v_THD[rows, :kv],
            scale=self.scale,
            out_THD=None if self.out_THD is None else self.out_THD[rows, : kv * group],
            window=self.window,
        )

    def scores(self, k_THD: torch.Tensor | None = None) -> torch.Tensor:
        """float64 [Hq, T, N]: scaled scores, -inf where a query may not look."""
        k = self.k_THD if k_THD is None else k_THD
        group = self.q_THD.shape[1] // k.shape[1]
        k_HDN = k.double().repeat_interleave(group, dim=1).permute(1, 2, 0)
        score = float64.matmul(self.q_THD.double().transpose(0, 1), k_HDN) * self.scale
        rows, keys = score.shape[1:]
        return score.masked_fill(~visible(rows, keys, self.window, score.device), -torch.inf)

    def values(self, v_THD: torch.Tensor | None = None) -> torch.Tensor:
        """float64 [Hq, N, D]: V of the key/value head of each query head."""
        v = self.v_THD if v_THD is None else v_THD
        return v.double().repeat_interleave(self.q_THD.shape[1] // v.shape[1], dim=1).transpose(0, 1)


def visible(rows: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [T, N]: which keys each of the last T of N tokens sees."""
    distance = torch.arange(keys - rows, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def exact(given: Operands, k_THD: torch.Tensor | None = None, v_THD: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [T, Hq, D], unrounded; with another K and V where they are given."""
    return float64.matmul(given.scores(k_THD).softmax(-1), given.values(v_THD)).transpose(0, 1)


def simulate(given: Operands, policy: Policy) -> torch.Tensor:
    """[T, Hq, D] in the model dtype: what `policy` makes of the operands."""
    dtype = given.q_THD.dtype

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).double()

    def single(x: torch.Tensor) -> torch.Tensor:
        return x.float().double()

    score = rounded(given.scores()) if policy.scores_rounded else single(given.scores())
    weight = single(torch.exp(score - score.amax(-1, keepdim=True)))
    total = weight.sum(-1, keepdim=True)
    if policy.probabilities == "rounded":
        weight, total = rounded(single(weight / total)), torch.ones_like(total)
    elif policy.probabilities == "rounded before the sum":
        weight = rounded(weight)
    value = given.values()
    keys = weight.shape[-1]
    out = weight.new_zeros(()) if policy.block else float64.matmul(weight, value) / total
    # What is cast stands in units of the finished output: a cast is relative, and a common factor moves nothing.
    for start in range(0, keys, policy.block) if policy.block else ():
        piece = slice(start, start + policy.block)
        part = single(float64.matmul(weight[..., piece], value[:, piece]) / total)
        out = out + rounded(part) if policy.downcast == "per_partial" else rounded(out + part)
    return single(out).to(dtype).transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class Partial:
    """Attention over a run of keys: out float32 [Hq, T, D] and natural-log lse float32 [Hq, T]; -inf and 0 for a row that sees none.

    keys: [start, end) of the run, by position.
    """

    out_HTD: torch.Tensor
    lse_HT: torch.Tensor
    keys: tuple[int, int]


def partials(given: Operands, bounds: Sequence[int]) -> list[Partial]:
    """One partial for each run of keys between two of `bounds`, in float32 from float64."""
    score, value = given.scores(), given.values()
    out = []
    for start, end in itertools.pairwise(bounds):
        piece = score[..., start:end]
        lse = torch.logsumexp(piece, -1)
        weight = torch.exp(piece - lse[..., None]).nan_to_num(0.0)  # -inf minus -inf: a row that sees nothing here
        out.append(Partial(out_HTD=float64.matmul(weight, value[:, start:end]).float(), lse_HT=lse.float(), keys=(start, end)))
    return out


def merge(parts: Sequence[Partial]) -> torch.Tensor:
    """float32 [Hq, T, D]: the partials joined one after the other in float32, as a kernel's epilogue or a ring does."""
    out, lse = parts[0].out_HTD, parts[0].lse_HT
    for part in parts[1:]:
        joined = torch.logaddexp(lse, part.lse_HT)
        mine, theirs = (torch.exp(x - joined).nan_to_num(0.0)[..., None] for x in (lse, part.lse_HT))
        out, lse = out * mine + part.out_HTD * theirs, joined
    return out


def even_bounds(tokens: int, splits: int) -> list[int]:
    """`splits` runs of nearly equal length."""
    return [tokens * i // splits for i in range(splits + 1)]


def orders(count: int, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """Every order of `count` partials, or where they are too many a sample, the ascending one first."""
    every = itertools.permutations(range(count))
    if count <= 4:
        yield from every
        return
    yield next(every)
    rng = random.Random(seed)
    for _ in range(MAX_ORDERS - 1):
        yield tuple(rng.sample(range(count), count))
