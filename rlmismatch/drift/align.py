"""Two score sets, token by token. What does not line up is a reason, never a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlmismatch.drift.model import Invalid
from rlmismatch.tokens import Sequence

if TYPE_CHECKING:
    import torch

# sequence id -> log-probs [R] of its R response tokens, nats, float64; a CPU tensor or an array.
Scores = Mapping[str, "torch.Tensor | npt.NDArray[np.float64]"]
FloatN = npt.NDArray[np.float64]
IntN = npt.NDArray[np.int64]


def _no_floats() -> FloatN:
    return np.empty(0, dtype=np.float64)


def _no_ints() -> IntN:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class AlignedScores:
    """N tokens, flat, in sequence order and then position order. N is 0 whenever `invalid` is not empty."""

    sequences: tuple[Sequence, ...]
    invalid: tuple[Invalid, ...] = ()
    a_N: FloatN = field(default_factory=_no_floats)  # nats
    b_N: FloatN = field(default_factory=_no_floats)  # nats
    delta_N: FloatN = field(default_factory=_no_floats)  # a - b
    sequence_N: IntN = field(default_factory=_no_ints)  # index into `sequences`
    position_N: IntN = field(default_factory=_no_ints)  # in the response, from 0
    context_N: IntN = field(default_factory=_no_ints)  # tokens before it, prompt included
    token_N: IntN = field(default_factory=_no_ints)  # token id

    @property
    def tokens(self) -> int:
        return int(self.delta_N.size)


def align(a: Scores, b: Scores, sequences: Iterable[Sequence], *, names: tuple[str, str] = ("a", "b")) -> AlignedScores:
    """Pair the log-probs of `a` and `b` for every response token of `sequences`.

    a, b: sequence id -> float64 [R], nats. Every sequence must be in both with exactly R finite values, no other id may be in
    either, and at least one token must be active: each breach is an `Invalid` in the result, and then no token is returned.
    names: what the reasons call `a` and `b`.
    """
    seqs = tuple(sequences)
    invalid = [*_id_reasons(a, names[0], seqs), *_id_reasons(b, names[1], seqs)]
    rows: list[tuple[FloatN, FloatN]] = []
    for s in seqs:
        if s.id not in a or s.id not in b:
            continue
        pair = (np.asarray(a[s.id], dtype=np.float64), np.asarray(b[s.id], dtype=np.float64))
        invalid += [reason for name, row in zip(names, pair, strict=True) for reason in _row_reasons(name, row, s)]
        rows.append(pair)
    if not any(s.response_ids for s in seqs):
        invalid.append(Invalid(kind="no_active_tokens", text=f"no active token in {len(seqs)} sequences: nothing was compared"))
    if invalid:
        return AlignedScores(sequences=seqs, invalid=tuple(invalid))
    lengths = [len(s.response_ids) for s in seqs]
    a_N, b_N = (np.concatenate([pair[i] for pair in rows]) for i in (0, 1))
    position_N = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    sequence_N = np.repeat(np.arange(len(seqs), dtype=np.int64), lengths)
    return AlignedScores(
        sequences=seqs,
        a_N=a_N,
        b_N=b_N,
        delta_N=a_N - b_N,
        sequence_N=sequence_N,
        position_N=position_N,
        context_N=position_N + np.asarray([len(s.prompt_ids) for s in seqs], dtype=np.int64)[sequence_N],
        token_N=np.concatenate([np.asarray(s.response_ids, dtype=np.int64) for s in seqs]),
    )


def _id_reasons(scores: Scores, name: str, sequences: tuple[Sequence, ...]) -> list[Invalid]:
    ids = [s.id for s in sequences]
    problems = (
        ("is not scored by", sorted(set(ids) - set(scores))),
        ("is not a sequence of this run but is scored by", sorted(set(scores) - set(ids))),
        ("stands twice among the sequences given to", sorted(i for i, n in Counter(ids).items() if n > 1)),
    )
    return [Invalid(kind="id_mismatch", text=f"sequence {i!r} {words} {name}", sequence=i) for words, found in problems for i in found]


def _row_reasons(name: str, row: npt.NDArray[Any], sequence: Sequence) -> list[Invalid]:
    expected = (len(sequence.response_ids),)
    if row.shape != expected:
        text = f"{name} has shape {list(row.shape)} for sequence {sequence.id!r}, expected {list(expected)}"
        return [Invalid(kind="shape_mismatch", text=text, sequence=sequence.id)]
    if not row.size:
        return [Invalid(kind="no_active_tokens", text=f"sequence {sequence.id!r} has no active token", sequence=sequence.id)]
    bad = np.flatnonzero(~np.isfinite(row))
    if bad.size:
        where = f"in sequence {sequence.id!r}, first {row[bad[0]]} at position {bad[0]}"
        text = f"{name} has {bad.size} of {row.size} log-probs not finite {where}"
        return [Invalid(kind="not_finite", text=text, sequence=sequence.id)]
    return []
