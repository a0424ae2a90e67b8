"""The trainer's gradients: drift of the native one from the pinned one, whose it is, and the measures of the two gradient axes.

Pure functions of the capture of the probe ``grads`` (engines/megatron_gradients.py). A drift of gradients is relative:
``|g - p| / |p|`` over all elements, with p the pinned gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from rlmismatch.arms import ALL, GRADS, NATIVE, arm_id
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.assemble.worst import worst, worst_of
from rlmismatch.attribution import shapley
from rlmismatch.engines.protocol import ArmResult
from rlmismatch.evidence import Evidence
from rlmismatch.report.model import ControlRow, GradientInfo, GradientPlayer, GradientRow, MeasureRow

# Of what is pinned apart: its words, and the axis that it is; the operations are many axes'.
PLAYERS: Final[Mapping[str, str]] = {"ops": "", "dgrad_reduce": "gemm.dgrad_reduce", "wgrad_accumulate": "gemm.wgrad_accumulate"}
# Relative L2 of a sum of n partials sent in bfloat16 or float16, or in float32, that is no fault: a rounding or two an addition.
_SENT_LOW, _SENT_FLOAT32 = 2.0**-8, 2.0**-20
_FLOAT32_GEMM: Final = 1e-4  # a float32 dW over some 1e4 tokens
_ROUNDED_DW: Final[Mapping[str, float]] = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": _FLOAT32_GEMM}
_WAY_WORDS: Final[Mapping[str, str]] = {
    "fused": "fused",
    "explicit_rounded": "explicit, dW in {dtype}",
    "explicit_fp32": "explicit fp32",
    "bf16_main_grad": "kept in bf16",
}
_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_UNIT: Final = "rel. L2"


@dataclass(frozen=True, kw_only=True)
class AxisNumbers:
    """The numbers of one gradient axis: `local` in the op's unit, `alone` and `last` relative L2 of the gradient."""

    local: float | None = None
    alone: float | None = None
    last: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Statistics:
    """`STATISTICS` of one gradient against the pinned one, of one or of many parameters."""

    values: torch.Tensor  # float64 [8]

    @classmethod
    def joined(cls, parts: Iterable[_Statistics]) -> _Statistics:
        stacked = torch.stack([p.values for p in parts])
        return cls(values=torch.cat([stacked[:, :6].sum(dim=0), stacked[:, 6:].amax(dim=0)]))

    @property
    def count(self) -> int:
        return int(self.values[0])

    @property
    def unequal(self) -> int:
        return int(self.values[1])

    @property
    def pinned_norm(self) -> float:
        return math.sqrt(float(self.values[2]))

    @property
    def norm(self) -> float:
        return math.sqrt(float(self.values[3]))

    @property
    def relative(self) -> float:
        """Relative L2; NaN where the pinned gradient is zero and the other is not."""
        difference = math.sqrt(float(self.values[4]))
        return difference / self.pinned_norm if self.pinned_norm else math.nan if difference else 0.0

    @property
    def cosine(self) -> float | None:
        both = self.norm * self.pinned_norm
        return float(self.values[5]) / both if both else None

    @property
    def max_abs(self) -> float:
        return float(self.values[6])


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The capture, by what it is of."""

    result: ArmResult
    sets: Mapping[frozenset[str], Mapping[str, _Statistics]]  # which players are pinned -> parameter -> against all pinned

    @classmethod
    def of(cls, book: ScoreBook) -> Gradients | None:
        """None if the run took no gradient."""
        result = book.arms["trainer"].get(GRADS)
        if result is None:
            return None
        sets: dict[frozenset[str], dict[str, _Statistics]] = {}
        for name, values in result.boundaries.items():
            kind, _, rest = name.partition("/")
            if kind == "of":
                players, _, parameter = rest.partition("/")
                key = frozenset() if players == "native" else frozenset(players.split("+"))
                sets.setdefault(key, {})[parameter] = _Statistics(values=values)
        return cls(result=result, sets=sets)

    @property
    def players(self) -> tuple[str, ...]:
        every = frozenset[str]().union(*self.sets)
        return tuple(p for p in PLAYERS if p in every)

    @property
    def closed(self) -> bool:
        """Whether there is a pinned gradient."""
        return bool(self.players)

    def whole(self, players: Iterable[str]) -> _Statistics:
        return _Statistics.joined(self.sets[frozenset(players)].values())

    def named(self, kind: str) -> dict[str, torch.Tensor]:
        return {k.removeprefix(f"{kind}/"): v for k, v in self.result.boundaries.items() if k.startswith(f"{kind}/")}


def shares(value: Mapping[frozenset[str], float], players: tuple[str, ...]) -> dict[str, float]:
    """Shapley values of what pinning takes from ``value[{}]``, as shares of it; exact. Empty where there is nothing to share."""
    whole = value[frozenset()] - value[frozenset(players)]
    if not whole > 0:
        return {}
    found = shapley.exact(players, lambda pinned: np.asarray(value[pinned]))
    return dict(zip(found.members, (found.value / whole).tolist(), strict=True))


def info(evidence: Evidence, book: ScoreBook) -> GradientInfo | None:
    """What the report says of the gradients; None without them."""
    found = Gradients.of(book)
    if found is None:
        return None
    sequences = evidence.sequences
    tokens = sum(len(s.response_ids) for s in sequences)
    native = found.whole(())
    loss = f"minus the mean log-prob of {tokens} response tokens in {len(sequences)} microbatches"
    why = next((n.removeprefix(REFUSED) for n in found.result.notes if n.startswith(REFUSED)), "")
    if not found.closed:
        return GradientInfo(loss=loss, tokens=tokens, microbatches=len(sequences), elements=native.count, norm_native=native.norm, why=why)
    digests = {name: bytes(v.tolist()).hex() for name, v in found.named("digest").items()}
    rows = [
        GradientRow(
            parameter=name,
            elements=s.count,
            unequal=s.unequal,
            norm=s.pinned_norm,
            relative_l2=s.relative,
            cosine=s.cosine,
            max_abs=s.max_abs,
            digest=digests[name],
        )
        for name, s in found.sets[frozenset()].items()
    ]
    whole = hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()
    return GradientInfo(
        loss=loss,
        tokens=tokens,
        microbatches=len(sequences),
        elements=native.count,
        unequal=native.unequal,
        norm_native=native.norm,
        norm_pinned=native.pinned_norm,
        relative_l2=native.relative,
        cosine=native.cosine,
        max_abs=native.max_abs,
        players=_players(found),
        rows=tuple(sorted(rows, key=lambda r: -r.relative_l2 if r.relative_l2 == r.relative_l2 else -math.inf)),
        composition=tuple(n.removeprefix(CONSISTS) for n in found.result.notes if n.startswith(CONSISTS)),
        digest=whole,
    )


REFUSED: Final = "no pinned gradient: "
CONSISTS: Final = "pinned backward: "


def _players(found: Gradients) -> tuple[GradientPlayer, ...]:
    every = frozenset(found.players)
    share = shares({players: found.whole(players).relative ** 2 for players in found.sets}, found.players)
    return tuple(
        GradientPlayer(
            player=player,
            axis=axis,
            alone=found.whole({player}).relative if player in every else None,
            last=found.whole(every - {player}).relative if player in every else None,
            share=share.get(player),
            why="" if player in every else "structural zero: at most one addition",
        )
        for player, axis in PLAYERS.items()
    )


def numbers(book: ScoreBook) -> dict[str, AxisNumbers]:
    """axis id -> its numbers, of the axes that have any in this run."""
    found = Gradients.of(book)
    if found is None:
        return {}
    by_player = {p.axis: p for p in _players(found)} if found.closed else {}
    sums, ways = found.named("dgrad"), found.named("wgrad")
    native_way = "fused" if any(k == "gemm.wgrad_accumulate" and v["actual"] == "fused" for k, v in found.result.knobs.items()) else ""
    taken = [v[5] for k, v in ways.items() if k.endswith(f"/{native_way or 'explicit_rounded'}")]
    local = {
        "gemm.dgrad_reduce": worst(float(v[7]) for v in sums.values()) if sums else None,
        "gemm.wgrad_accumulate": worst(map(float, taken)) if taken else None,
    }
    return {
        axis: AxisNumbers(
            local=found_locally,
            alone=by_player[axis].alone if axis in by_player else None,
            last=by_player[axis].last if axis in by_player else None,
        )
        for axis, found_locally in local.items()
        if found_locally is not None
    }


def measures(evidence: Evidence, book: ScoreBook) -> tuple[MeasureRow, ...]:
    """The rows of gemm.dgrad_reduce and gemm.wgrad_accumulate; none where no gradient was taken."""
    found = Gradients.of(book)
    side = evidence.side("trainer")
    if found is None or side is None:
        return ()
    return (*_sums(found, side.config.tp, side.config.dtype), *_propagated(found), *_ways(found, side.config.dtype))


def _sums(found: Gradients, tp: int, dtype: str) -> Iterator[MeasureRow]:
    """Every sum on the same partials, as they are sent; `DGRAD` of engines/gradient_probes.py."""
    layers = found.named("dgrad")
    if not layers:
        return
    axis = "gemm.dgrad_reduce"
    total = torch.stack(list(layers.values())).sum(dim=0)
    layer = worst_of(layers, lambda name: _relative(layers[name], 3, 4))
    unequal = f"of {int(total[0])} in {len(layers)} layers"
    for what, index in (("engine", 1), ("balanced tree", 2)):
        yield MeasureRow(
            axis=axis, side="trainer", what=f"dX unlike rank order: {what}", value=float(total[index]), unit="elements", note=unequal
        )
    limit = (tp - 1) * (_SENT_FLOAT32 if dtype == "float32" else _SENT_LOW)
    rows = (
        ("engine", _relative(layers[layer], 3, 4), limit, f"worst layer, {layer}"),
        ("rank order", _relative(total, 3, 5), None, "all layers"),
        ("balanced tree", _relative(total, 3, 6), None, "all layers"),
    )
    for what, value, most, note in rows:
        yield MeasureRow(axis=axis, side="trainer", what=f"dX off float64: {what}", value=value, unit=_UNIT, limit=most, note=note)


def _relative(sums: torch.Tensor, size: int, error: int) -> float:
    return math.sqrt(float(sums[error]) / float(sums[size])) if float(sums[size]) else math.nan


def _propagated(found: Gradients) -> Iterator[MeasureRow]:
    """What the order of the sums makes of the gradient: with the engine's operations, and with the pinned ones."""
    axis = "gemm.dgrad_reduce"
    moved = {name: _Statistics(values=v) for name, v in found.named("order").items()}
    every = frozenset(found.players)
    released = found.sets.get(every - {"dgrad_reduce"}) if "dgrad_reduce" in every else None
    for words, statistics in (("native ops", moved), ("pinned ops", released)):
        if not statistics:
            continue
        first = _Statistics.joined(s for name, s in statistics.items() if name.startswith("model.layers.0."))
        whole = _Statistics.joined(statistics.values())
        norm = abs(whole.norm - whole.pinned_norm) / whole.pinned_norm
        yield MeasureRow(axis=axis, side="trainer", what=f"layer 0 moved by dX's order, {words}", value=first.relative, unit=_UNIT)
        yield MeasureRow(axis=axis, side="trainer", what=f"norm moved by dX's order, {words}", value=norm, unit="of itself")


def _ways(found: Gradients, dtype: str) -> Iterator[MeasureRow]:
    """`WGRAD` of engines/gradient_probes.py: every way into main_grad against float64, over the microbatches of the run."""
    axis = "gemm.wgrad_accumulate"
    by_way: dict[str, dict[str, torch.Tensor]] = {}
    for key, values in found.named("wgrad").items():
        layer, _, way = key.rpartition("/")
        by_way.setdefault(way, {})[layer] = values
    limits = {"fused": _FLOAT32_GEMM, "explicit_fp32": _FLOAT32_GEMM, "explicit_rounded": _ROUNDED_DW[dtype]}
    for way, layers in by_way.items():
        errors = {name: _relative(values, 1, 2) for name, values in layers.items()}
        name = worst_of(errors, errors.__getitem__)
        yield MeasureRow(
            axis=axis,
            side="trainer",
            what=f"main_grad off float64: {_WAY_WORDS[way].format(dtype=_SHORT[dtype])}",
            value=errors[name],
            unit=_UNIT,
            limit=limits.get(way),
            note=f"worst of {len(layers)} layers, {name}; a first step of Adam moves by {_relative(layers[name], 3, 4):.2g} of itself",
        )
    if "stays" in found.result.boundaries:
        low, wide = found.result.boundaries["stays"].tolist()
        note = f"in float32 it is {wide:g}: the gap hides until microbatch 2"
        yield MeasureRow(axis=axis, side="trainer", what="256 + 1 at microbatch 2, bf16 main_grad", value=low, unit="", note=note)


def controls(evidence: Evidence, book: ScoreBook) -> tuple[ControlRow, ...]:
    """That gradients are of what was scored, and that the pinned one repeats itself."""
    found = Gradients.of(book)
    if found is None:
        return ()
    result = found.result
    rows = [_same_forward("native", book, NATIVE, torch.cat([result.scores["forward"][s.id] for s in evidence.sequences]), evidence)]
    if found.closed:
        pinned = result.boundaries["logprob/pinned"]
        rows.append(_same_forward("pinned", book, arm_id(ALL, evidence.base_pins), pinned, evidence))
        again = found.whole(found.players)
        name, got = "trainer: the pinned gradient repeats itself", f"{again.unequal} of {again.count} elements differ"
        rows.append(ControlRow(name=name, expected="bit-equal", got=got, ok=again.unequal == 0 and again.count > 0))
    return tuple(rows)


def _same_forward(which: str, book: ScoreBook, arm: str, logprob_N: torch.Tensor, evidence: Evidence) -> ControlRow:
    name = f"trainer: the {which} gradient is of the log-probs that were scored"
    scored = book.get("trainer", arm, "forward")
    if scored is None:
        return ControlRow(name=name, expected="bit-equal", got="not run", ok=False)
    scored_N = torch.cat([scored[s.id] for s in evidence.sequences])
    unequal = int((scored_N != logprob_N).sum())
    return ControlRow(name=name, expected="bit-equal", got=f"{unequal} of {len(scored_N)} differ", ok=unequal == 0 and len(scored_N) > 0)
