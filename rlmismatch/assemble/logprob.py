"""The log-prob family's measures: pure functions of the two sides' captures of the arm ``logits`` (engines/logprob_probe.py).

N scored rows, V columns of the real vocabulary. All arithmetic here is float64, and every number is in nats unless its row says
otherwise. A row with a limit that does not hold is a defect of its axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from rlmismatch.arms import LOGITS
from rlmismatch.assemble.defects import rounds_sums
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.engines.logprob_knobs import chain_of
from rlmismatch.engines.protocol import SideName
from rlmismatch.evidence import Evidence
from rlmismatch.pins.logprob_ways import comparable
from rlmismatch.report.model import MeasureRow
from rlmismatch.transforms import Chain, candidates, parse_texts

FP32_NATS: Final = 3e-6  # a float32 log-softmax of float32 logits
CLOSED_FORM_NATS: Final = 1e-7
ADDS_UP_NATS: Final = 1e-6
CHAIN_NATS: Final = 1e-4  # recorded values against recomputed ones; other chains lie 1e-2 and more away
COARSE_NATS: Final = 5e-2  # the same, where an engine caps, scales or sums in bfloat16
FP32_GRADIENT: Final = 1e-5  # mean error over mean size of a float32 gradient
BF16_GRADIENT: Final = 2.0**-9  # rounding to bfloat16
_TILE: Final = 64  # columns, at most
_MOST_ORDERS: Final = 24  # of arrival: all of four shards


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What one side's probe kept."""

    tensors: Mapping[str, torch.Tensor]
    chain: Chain  # what the side was asked to do to the logits
    vocab_size: int

    @property
    def logits(self) -> torch.Tensor:
        """float64 [N, V], raw, without padding."""
        return self.tensors["logits"][:, : self.vocab_size].double()

    @property
    def targets(self) -> torch.Tensor:
        return self.tensors["targets"]

    def logprob(self, chain: Chain | None = None, shift: int = 0) -> torch.Tensor:
        """float64 [N]: the log-probs of the kept logits under a chain (default: the side's own), of targets `shift` rows later."""
        logp_NV = (self.chain if chain is None else chain).apply(self.logits).log_softmax(-1)
        return logp_NV.gather(1, self.targets.roll(-shift)[:, None])[:, 0]

    def named(self, prefix: str) -> dict[str, torch.Tensor]:
        """Tensors under ``prefix/``, without it, float64."""
        return {k.removeprefix(f"{prefix}/"): v.double() for k, v in self.tensors.items() if k.startswith(f"{prefix}/")}


def measures(evidence: Evidence, book: ScoreBook) -> tuple[MeasureRow, ...]:
    """Every measure of the family, in the order of its axes; none without the probe of both sides."""
    sides: dict[SideName, Captured] = {}
    vocab_size = evidence.run["checkpoint"]["vocab_size"]
    names: tuple[SideName, ...] = ("trainer", "rollout")
    for name in names:
        side, arm = evidence.side(name), book.arms[name].get(LOGITS)
        if side is None or arm is None:
            return ()
        sides[name] = Captured(tensors=arm.boundaries, chain=chain_of(side.config), vocab_size=vocab_size)
    trainer, rollout = sides["trainer"], sides["rollout"]
    rows = [
        *_impls(trainer),
        *_padding(trainer),
        *_shards(trainer, _shard_widths(evidence)),
        *_reduces(sides),
        *_merge_orders(trainer, evidence.settings.trainer_tp),
        *_precision(trainer, rollout),
        *_chains(sides, evidence),
        *_shifts(sides),
        *_head_and_lse(trainer, rollout),
        *_row_counts(sides),
        *_fusion(trainer),
        *_backward(trainer),
    ]
    return tuple(rows)


def _largest(x_N: torch.Tensor) -> float:
    return float(x_N.abs().max()) if x_N.numel() else math.nan


def _difference(a_N: torch.Tensor, b_N: torch.Tensor) -> torch.Tensor:
    """`a_N - b_N` where a token may be cut off (-inf): on both sides it is no difference, on one it is still a large one."""
    return comparable(a_N) - comparable(b_N)


def _mean(x_N: torch.Tensor) -> float:
    return float(x_N.abs().mean()) if x_N.numel() else math.nan


def _impls(trainer: Captured) -> Iterator[MeasureRow]:
    exact_N = trainer.logprob()
    for name, logp_N in trainer.named("impl").items():
        yield MeasureRow(
            axis="logprob.provenance",
            side="trainer",
            what=f"{name} against float64, largest",
            value=_largest(_difference(logp_N, exact_N)),
            limit=FP32_NATS,
        )


def _padding(trainer: Captured) -> Iterator[MeasureRow]:
    """Include minus mask of every token, and the closed form -log(1 + sum_pad / sum_real): a bias of one sign, no noise."""
    padded_NV = trainer.tensors["logits"].double()
    pads = padded_NV.shape[1] - trainer.vocab_size
    if not pads or not trainer.chain.elementwise:
        return
    whole_NV = trainer.chain.apply(padded_NV)
    real_NV, pad_NV = whole_NV[:, : trainer.vocab_size], whole_NV[:, trainer.vocab_size :]
    bias_N = real_NV.logsumexp(1) - whole_NV.logsumexp(1)
    closed_N = -torch.log1p(torch.exp(pad_NV.logsumexp(1) - real_NV.logsumexp(1)))
    yield MeasureRow(
        axis="logprob.vocab_padding",
        side="trainer",
        what=f"bias of counting {pads} padded rows, signed mean",
        value=float(bias_N.mean()),
        note=f"largest {float(bias_N.min()):.3g} nats, of one sign",
    )
    yield MeasureRow(
        axis="logprob.vocab_padding",
        side="trainer",
        what="that bias against its closed form, largest",
        value=_largest(bias_N - closed_N),
        limit=CLOSED_FORM_NATS,
    )


def _shards(trainer: Captured, widths: Mapping[SideName, int]) -> Iterator[MeasureRow]:
    """One logits tensor summed shard by shard at both engines' boundaries, and tile by tile, in float32. widths: rows that a rank owns."""
    if len(widths) < 2:
        return
    x_NV = trainer.logits.float()
    tile = math.gcd(_TILE, *widths.values())
    by_map = [_lse_by_shards(x_NV, width) for width in widths.values()]
    tiled = [_lse_by_tiles(x_NV, width, tile) for width in widths.values()]
    note = ", ".join(f"{side} owns {width} rows a rank" for side, width in widths.items())
    axis, what = "logprob.vocab_shards", "log-sum-exp at the trainer's shards minus at the rollout's"
    yield MeasureRow(axis=axis, what=f"{what}, largest", value=_largest(by_map[0] - by_map[1]), limit=FP32_NATS, note=note)
    yield MeasureRow(axis=axis, what=f"{what}, tiles of {tile}", value=_largest(tiled[0] - tiled[1]), limit=0.0)


def _shard_widths(evidence: Evidence) -> dict[SideName, int]:
    """Rows of the head that a rank of each side owns, as read back; a side that did not say is left out."""
    out: dict[SideName, int] = {}
    names: tuple[SideName, ...] = ("trainer", "rollout")
    for name in names:
        side = evidence.side(name)
        reading = side.readings.get("logprob.vocab_shards", {}).get("boundaries") if side else None
        if reading is not None and reading.value:
            first, end = reading.value[0]
            out[name] = end - first
    return out


def _lse_by_shards(x_NV: torch.Tensor, width: int) -> torch.Tensor:
    parts = [x.logsumexp(1) for x in torch.split(x_NV, width, dim=1)]
    return torch.stack(parts).logsumexp(0).double()


def _lse_by_tiles(x_NV: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    tiles = [tile for shard in torch.split(x_NV, width, dim=1) for tile in torch.split(shard, columns, dim=1)]
    return torch.stack([tile.logsumexp(1) for tile in tiles]).logsumexp(0).double()


def _reduces(sides: Mapping[SideName, Captured]) -> Iterator[MeasureRow]:
    for side, captured in sides.items():
        exact_N = captured.logprob()
        for way, logp_N in captured.named("reduce").items():
            error = _largest(_difference(logp_N, exact_N))
            yield MeasureRow(axis="logprob.reduce", side=side, what=f"{way} against float64, largest", value=error, limit=FP32_NATS)


def _merge_orders(trainer: Captured, tp: int) -> Iterator[MeasureRow]:
    """One logits tensor cut into the trainer's shards, their float32 sums added in every order in which they can arrive."""
    if tp <= 2:
        return
    width = trainer.tensors["logits"].shape[1] // tp
    shards = torch.split(trainer.logits.float(), width, dim=1)
    max_N = trainer.logits.float().amax(dim=1)
    sums = [torch.exp(x - max_N[:, None]).sum(dim=1) for x in shards]
    orders = list(itertools.islice(itertools.permutations(range(len(sums))), _MOST_ORDERS))
    lse_ON = torch.stack([max_N + _added([sums[rank] for rank in order]).log() for order in orders]).double()
    axis, what = "logprob.merge_order", f"log-sum-exp of {len(sums)} shards in {len(orders)} orders of arrival"
    yield MeasureRow(axis=axis, side="trainer", what=f"{what}, largest spread", value=_largest(lse_ON.amax(0) - lse_ON.amin(0)))


def _added(sums: list[torch.Tensor]) -> torch.Tensor:
    total = sums[0]
    for one in sums[1:]:
        total = total + one
    return total


def _precision(trainer: Captured, rollout: Captured) -> Iterator[MeasureRow]:
    """Head dtype of the trainer x head dtype of the rollout, each from its own hidden rows, and each against the exact head."""
    heads = {"trainer": trainer.named("head"), "rollout": rollout.named("head")}
    for t, r in ((t, r) for t in ("bf16", "fp32") for r in ("bf16", "fp32")):
        if t in heads["trainer"] and r in heads["rollout"]:
            drift = _mean(heads["trainer"][t] - heads["rollout"][r])
            yield MeasureRow(axis="logprob.precision", what=f"drift: trainer head {t}, rollout head {r}", value=drift)
    for side, head in heads.items():
        for dtype in ("bf16", "fp32"):
            if dtype in head:
                error = _mean(head[dtype] - head["exact"])
                yield MeasureRow(axis="logprob.precision", side=side, what=f"head in {dtype} against the exact head", value=error)


def _chains(sides: Mapping[SideName, Captured], evidence: Evidence) -> Iterator[MeasureRow]:
    """Which chain, applied to a side's raw logits, gives the values that the side recorded; no drift number."""
    found: dict[SideName, Chain | None] = {}
    errors: dict[SideName, float] = {}
    both: tuple[SideName, ...] = ("trainer", "rollout")
    for name, captured in sides.items():
        read = [chain for side in both if (chain := _chain_read(evidence, side)) is not None]
        every = candidates(*read, *(s.chain for s in sides.values()), Chain())
        recorded_N = captured.tensors["recorded"].double()
        tried = [(_mean_or_inf(captured.logprob(c), recorded_N), i, c) for i, c in enumerate(every)]
        # Chains that are one function lie equally near; the first of them stands.
        best = min(t[0] for t in tried)
        error, _, chain = next(t for t in tried if t[0] <= best + 1e-9)
        coarse = any(s.name in ("soft_cap", "logit_scale") for s in chain.steps) or rounds_sums(evidence, name)
        errors[name] = error
        found[name] = chain if error <= (COARSE_NATS if coarse else CHAIN_NATS) else None
    words = {name: "none of the known" if chain is None else str(chain) for name, chain in found.items()}
    for name in sides:
        yield MeasureRow(
            axis="logprob.transform_chain",
            side=name,
            what=f"recorded values explained by: {words[name]}",
            value=errors[name],
            limit=CHAIN_NATS if found[name] is None else None,
            note="; ".join(f"{side}: {text}" for side, text in reversed(words.items())),
        )
    for name, chain in found.items():
        if chain is not None and not chain.elementwise:
            kept_N = sides[name].logprob(chain) - sides[name].logprob(Chain(steps=tuple(s for s in chain.steps if s.name in _KEPT_BY_ALL)))
            finite_N = kept_N[kept_N.isfinite()]
            yield MeasureRow(
                axis="logprob.transform_chain",
                side=name,
                what="offset by the mass kept, -log(kept), signed mean",
                value=float(finite_N.mean()) if finite_N.numel() else None,
                note=f"{int(kept_N.numel() - finite_N.numel())} of {kept_N.numel()} tokens were cut off",
            )


_KEPT_BY_ALL: Final = ("soft_cap", "logit_scale", "temperature")


def _chain_read(evidence: Evidence, name: SideName) -> Chain | None:
    side = evidence.side(name)
    reading = side.readings.get("logprob.transform_chain", {}).get("transform_chain") if side else None
    return None if reading is None or reading.value is None else parse_texts(reading.value)


def _mean_or_inf(a_N: torch.Tensor, b_N: torch.Tensor) -> float:
    """Mean |a - b|; a token that is cut off on both sides (-inf) is no difference, any NaN is the largest there is."""
    both = (a_N == -torch.inf) & (b_N == -torch.inf)
    mean = float((a_N - b_N).masked_fill(both, 0.0).abs().mean())
    return math.inf if math.isnan(mean) or bool(both.all()) else mean


def _shifts(sides: Mapping[SideName, Captured]) -> Iterator[MeasureRow]:
    """Recorded values against the row before, the row itself and the row after: the least must be at 0."""
    for name, captured in sides.items():
        recorded_N = captured.tensors["recorded"].double()
        if len(recorded_N) < 3:
            continue
        inner = slice(1, -1)
        errors = {s: _mean_or_inf(captured.logprob(shift=s)[inner], recorded_N[inner]) for s in (-1, 0, 1)}
        best = min(errors, key=lambda s: (errors[s], abs(s)))
        note = ", ".join(f"{s:+d}: {e:.3g} nats" for s, e in errors.items())
        what = "shift of the targets that explains the recorded values best, rows"
        yield MeasureRow(axis="logprob.selected_gather", side=name, what=what, value=float(abs(best)), limit=0.0, note=note)


def _head_and_lse(trainer: Captured, rollout: Captured) -> Iterator[MeasureRow]:
    """The drift from equal hidden rows, split at the logits: what the head's GEMM adds, and what the two log-softmaxes add."""
    axis = "logprob.head_gemm"
    if not torch.equal(trainer.tensors["hidden"], rollout.tensors["hidden"]):
        yield MeasureRow(axis=axis, what="head apart from log-softmax", value=None, note="the hidden rows of the two sides differ")
        return
    # A token that one side's transforms cut off counts as 0 there, in each of the three alike.
    recorded = {s: comparable(c.tensors["recorded"].double()) for s, c in (("trainer", trainer), ("rollout", rollout))}
    exact = {s: comparable(c.logprob()) for s, c in (("trainer", trainer), ("rollout", rollout))}
    total_N = recorded["trainer"] - recorded["rollout"]
    head_N = exact["trainer"] - exact["rollout"]
    # From equal logits: both sides' native arithmetic judged by float64 on the logits that it read.
    lse_N = (recorded["trainer"] - exact["trainer"]) - (recorded["rollout"] - exact["rollout"])
    yield MeasureRow(axis=axis, what="head drift: logits of equal hidden rows", value=_mean(head_N))
    yield MeasureRow(axis=axis, what="log-softmax drift: from equal logits", value=_mean(lse_N))
    yield MeasureRow(axis=axis, what="the two against the whole, largest", value=_largest(head_N + lse_N - total_N), limit=ADDS_UP_NATS)


def _row_counts(sides: Mapping[SideName, Captured]) -> Iterator[MeasureRow]:
    for side, captured in sides.items():
        by_rows = captured.named("rows")
        for rows in ("1", "padded"):
            drift = _mean(by_rows[rows] - by_rows["full"])
            yield MeasureRow(axis="logprob.head_gemm", side=side, what=f"head GEMM at M = {rows} against all rows", value=drift)


def _fusion(trainer: Captured) -> Iterator[MeasureRow]:
    heads = trainer.named("head")
    plain = _largest(heads["fp32"] - heads["exact"])
    for tiling, logp_N in trainer.named("linear").items():
        error = _largest(logp_N - heads["exact"])
        what = f"fused linear loss, block x chunk {tiling}, against float64, largest"
        yield MeasureRow(axis="logprob.fusion", side="trainer", what=what, value=error, limit=FP32_NATS + 4 * plain)


def _backward(trainer: Captured) -> Iterator[MeasureRow]:
    axis = "logprob.backward"
    for name, facts in trainer.named("backward").items():
        _, mean_error, mean_size, foreign, rounded, dhidden = facts.tolist()
        low = rounded == 1.0
        yield MeasureRow(
            axis=axis,
            side="trainer",
            what=f"dlogits of {name}, mean error over mean size",
            value=mean_error / mean_size,
            unit="",
            limit=BF16_GRADIENT if low else FP32_GRADIENT,
            note=("cast to bfloat16; " if low else "") + f"dhidden off by {dhidden:.2g}; not the owner: largest {foreign:.3g}",
        )
    for padding in ("mask", "include"):
        entropy = trainer.named(f"entropy/{padding}")
        if entropy:
            error = _largest(entropy["pin"] - entropy["exact"])
            yield MeasureRow(axis=axis, side="trainer", what=f"entropy ({padding}) against float64, largest", value=error, limit=FP32_NATS)
