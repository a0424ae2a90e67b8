"""The attention family's measures of arithmetic: merge order, precision, backward; from the captures of the arm ``attention``.

Errors are absolute, in the unit of attention's output, unless a row says otherwise. A row with a limit that does not hold is a defect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from rlmismatch import attention_policies
from rlmismatch.arms import ATTENTION
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.assemble.worst import worst
from rlmismatch.attention_policies import POLICIES, Operands
from rlmismatch.contract import Reading
from rlmismatch.engines.attention_candidates import FACTS
from rlmismatch.engines.protocol import SideName
from rlmismatch.evidence import Evidence
from rlmismatch.report.model import MeasureRow

# Of what is simulated: enough rows and heads to tell two policies apart, few enough for seconds on a CPU.
_TOKENS: Final = 256
_HEADS: Final = 8
FIXED_WIDTH: Final = 64  # keys
FP32_MERGE: Final = 2.0**-21  # of the output's size: a few float32 roundings
BF16_GRADIENT: Final = 2.0**-6  # mean error over mean size of a gradient whose probabilities, or dS, were rounded to bfloat16
FP32_GRADIENT: Final = 2.0**-18
SLOPE: Final = 2.0**-8  # a gradient of the right size: its slope over the exact one is 1 within one bfloat16 rounding
ENOUGH: Final = 16  # tokens of a sequence whose gradients have a limit
_ALIKE: Final = 1.1  # residuals within a tenth of each other tell no two policies apart
_SIDES: Final[tuple[SideName, ...]] = ("trainer", "rollout")


def measures(evidence: Evidence, book: ScoreBook) -> tuple[MeasureRow, ...]:
    """Every measure, axis by axis; none of a side without the probe."""
    kept = {side: book.arms[side][ATTENTION].boundaries for side in _SIDES if ATTENTION in book.arms[side]}
    operands = {side: layers(tensors) for side, tensors in kept.items()}
    rows: list[MeasureRow] = []
    for side, of_layer in operands.items():
        rows += merge_orders(side, of_layer)
    for side, of_layer in operands.items():
        rows += precision(side, of_layer)
    for side, tensors in kept.items():
        described = evidence.side(side)
        rows += candidates(side, tensors, described.provenance.get("attention_candidates", {}) if described else {})
    if "trainer" in kept:
        trainer = evidence.side("trainer")
        flags = trainer.readings.get("gemm.runtime_flags", {}) if trainer else {}
        claimed = flags.get("deterministic_mode", Reading()).value is True
        rows += backward(kept["trainer"], deterministic=claimed)
    return tuple(rows)


def layers(tensors: Mapping[str, torch.Tensor]) -> dict[str, Operands]:
    """``layers.I`` -> its operands, cut to what is simulated."""
    window = int(tensors["window"]) or None if "window" in tensors else None
    names = [key.removesuffix(".q") for key in tensors if key.endswith(".q")]
    out = {}
    for name in names:
        q, k, v, written = (tensors[f"{name}.{x}"] for x in ("q", "k", "v", "out"))
        whole = Operands(q_THD=q, k_THD=k, v_THD=v, out_THD=written, scale=float(q.shape[-1] ** -0.5), window=window)
        out[name] = whole.first_heads(_TOKENS, _HEADS)
    return out


def merge_orders(side: SideName, of_layer: Mapping[str, Operands]) -> Iterator[MeasureRow]:
    """The envelope of all orders in which partials of these operands can be merged, and the fixed fold's own error."""
    axis = "attention.merge_order"
    for splits in ("2", "4", f"{FIXED_WIDTH} keys each"):
        spread, worst, fixed, flips, count, scale, most, tried = 0.0, 0.0, 0.0, 0, 0, 0.0, 0, 0
        for given in of_layer.values():
            tokens = len(given.q_THD)
            if splits.isdigit() and int(splits) > tokens:
                continue
            bounds = [*range(0, tokens, FIXED_WIDTH), tokens] if "keys" in splits else attention_policies.even_bounds(tokens, int(splits))
            parts = attention_policies.partials(given, bounds)
            truth = attention_policies.exact(given).transpose(0, 1)
            fold = attention_policies.merge(parts)
            low, high, flipped = fold.clone(), fold.clone(), torch.zeros_like(fold, dtype=torch.bool)
            chosen = list(attention_policies.orders(len(parts)))
            for order in chosen:
                merged = attention_policies.merge([parts[i] for i in order])
                low, high = torch.minimum(low, merged), torch.maximum(high, merged)
                flipped |= merged.to(given.q_THD.dtype) != fold.to(given.q_THD.dtype)
                worst = _max(worst, merged.double() - truth)
            spread, fixed = _max(spread, (high - low).double()), _max(fixed, fold.double() - truth)
            flips, count = flips + int(flipped.sum()), count + flipped.numel()
            scale = max(scale, float(truth.abs().max()))
            most, tried = max(most, len(parts)), max(tried, len(chosen))
        if most < 2:
            continue
        what = f"{most} KV splits" + (f" of {FIXED_WIDTH} keys" if "keys" in splits else "")
        limit = FP32_MERGE * most * scale
        note = f"the worst order is {worst:.3g} from float64; in some order {flips} of {count} elements differ after the cast"
        yield MeasureRow(axis=axis, side=side, what=f"{what}: envelope of {tried} merge orders", value=spread, unit="", note=note)
        yield MeasureRow(axis=axis, side=side, what=f"{what}: ascending fold against float64", value=fixed, unit="", limit=limit)
    yield from _forced_splits(side, of_layer)


def _forced_splits(side: SideName, of_layer: Mapping[str, Operands]) -> Iterator[MeasureRow]:
    """1, 2 and 4 splits of the same operands, each in its fixed fold: what a split count alone can move."""
    apart, flips, count = 0.0, 0, 0
    for given in of_layer.values():
        tokens, dtype = len(given.q_THD), given.q_THD.dtype
        found = [
            attention_policies.merge(attention_policies.partials(given, attention_policies.even_bounds(tokens, splits)))
            for splits in (1, 2, 4)
            if splits <= tokens
        ]
        for other in found[1:]:
            apart = _max(apart, (other - found[0]).double())
            flips, count = flips + int((other.to(dtype) != found[0].to(dtype)).sum()), count + other.numel()
    note = f"after the cast {flips} of {count} elements differ"
    what = "1, 2 and 4 forced splits against one another"
    yield MeasureRow(axis="attention.merge_order", side=side, what=what, value=apart, unit="", note=note)


def _max(so_far: float, error: torch.Tensor) -> float:
    """The larger of the two magnitudes, NaN if either is."""
    return worst((so_far, float(error.abs().max()) if error.numel() else math.nan))


def precision(side: SideName, of_layer: Mapping[str, Operands]) -> Iterator[MeasureRow]:
    """Which policy explains what the side wrote, and how far off the others are; what fp8 keys and values would do."""
    axis = "attention.precision"
    residuals = dict.fromkeys(POLICIES, 0.0)
    equal = dict.fromkeys(POLICIES, 0)
    own, size, count = 0.0, 0.0, 0
    for given in of_layer.values():
        assert given.out_THD is not None
        truth, written = attention_policies.exact(given), given.out_THD.double()
        own, size, count = own + float((written - truth).abs().sum()), size + float(truth.abs().sum()), count + truth.numel()
        for policy in POLICIES:
            simulated = attention_policies.simulate(given, policy)
            residuals[policy] += float((simulated.double() - written).abs().sum())
            equal[policy] += int((simulated == given.out_THD).sum())
    if not count:
        return
    yield MeasureRow(axis=axis, side=side, what="native output against float64, mean over mean size", value=own / size, unit="")
    ranked = sorted(POLICIES, key=lambda p: residuals[p])
    best = ranked[0]
    alike = [p for p in ranked[1:] if residuals[p] <= _ALIKE * residuals[best]]
    named = f"unobservable here: {len(alike) + 1} policies explain it alike, the first: {best}" if _undecided(best, alike) else str(best)
    notes = [f"{equal[best]} of {count} elements bit-equal"]
    notes += [f"next: {p}, residual {residuals[p] / size:.3g}" for p in ranked if p not in (best, *alike)][:1]
    notes += [f"alike: {', '.join(map(str, alike[:3]))}"] if alike else []
    note = "; ".join(notes)
    yield MeasureRow(axis=axis, side=side, what=f"explained best by: {named}", value=residuals[best] / size, unit="", note=note)
    yield _fp8(side, of_layer, size)


def _undecided(best: attention_policies.Policy, alike: list[attention_policies.Policy]) -> bool:
    """Whether policies that the contract tells apart (where the state is cast) explain the output equally well."""
    return any(p.downcast != best.downcast for p in alike)


def _fp8(side: SideName, of_layer: Mapping[str, Operands], size: float) -> MeasureRow:
    """What K and V kept as float8 (e4m3, scale 1) would move, all else exact."""
    moved, outside = 0.0, 0
    for given in of_layer.values():
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (given.k_THD, given.v_THD))
        outside += int((~k.isfinite()).sum() + (~v.isfinite()).sum())
        moved += float((attention_policies.exact(given, k, v) - attention_policies.exact(given)).abs().nan_to_num(0.0).sum())
    note = f"{outside} elements lie outside float8's range" if outside else "every element lies within float8's range"
    return MeasureRow(
        axis="attention.precision", side=side, what="simulated: K and V kept as float8 e4m3, mean move over mean size",
        value=moved / size, unit="", note=note,
    )  # fmt: skip


def candidates(side: SideName, tensors: Mapping[str, torch.Tensor], installed: Mapping[str, str]) -> Iterator[MeasureRow]:
    """Every other backend in every form that it has, over all shapes: whether it repeats itself and is batch invariant, then its error."""
    axis = "attention.backend_reuse"
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for key, facts in tensors.items():
        if key.startswith("backend/"):
            _, name, form, _ = key.split("/", 3)
            found.setdefault((name, form), []).append(dict(zip(FACTS, facts.tolist(), strict=True)))
    for name, version in installed.items():
        if not any(candidate == name for candidate, _ in found):
            yield MeasureRow(axis=axis, side=side, what=name, value=None, note=version)
    for (name, form), shapes in found.items():
        relative = worst(f["mean_error"] / f["mean_size"] for f in shapes)
        words = ["repeats itself" if all(f["repeats"] == 1.0 for f in shapes) else "does not repeat itself"]
        words += ["batch invariant" if all(f["batch_invariant"] == 1.0 for f in shapes) else "not batch invariant"]
        note = f"{', '.join(words)}; {len(shapes)} shapes; {installed.get(name, '')}"
        yield MeasureRow(axis=axis, side=side, what=f"{name}, {form}: mean error over mean size", value=relative, unit="", note=note)


def backward(tensors: Mapping[str, torch.Tensor], *, deterministic: bool = False) -> Iterator[MeasureRow]:
    """The gradients of the live attention, each over all kept layers, worst layer first.

    deterministic: whether the trainer claims it. Then runs that differ are a defect; without the claim they are only said.
    """
    axis = "attention.backward"
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    dtype = next((x.dtype for key, x in tensors.items() if key.endswith(".q")), torch.float32)
    for key, facts in tensors.items():
        if key.startswith("backward/"):
            _, source, place = key.split("/")
            found.setdefault((source, place.rsplit(".", 1)[-1]), []).append(tuple(facts.tolist()))
    limit: float | None = FP32_GRADIENT if dtype is torch.float32 else BF16_GRADIENT
    slope_limit: float | None = SLOPE
    tokens = min((len(x) for key, x in tensors.items() if key.endswith(".q")), default=0)
    few = f"; no limit: {tokens} tokens are too few for roundings to even out" if tokens < ENOUGH else ""
    if few:
        limit = slope_limit = None
    for (source, name), per_layer in found.items():
        relative = worst(mean / size for _, mean, size, _, _ in per_layer)
        slope = worst(abs(slope - 1.0) for *_, slope, _ in per_layer)
        repeats = all(facts[-1] == 1.0 for facts in per_layer)
        note = "three runs bit-equal" if repeats else "three runs differ: the backward adds in no fixed order"
        if deterministic:
            what = f"{name} of {source}: runs of three that differ from the first, under deterministic_mode"
            yield MeasureRow(axis=axis, side="trainer", what=what, value=0.0 if repeats else 1.0, unit="", limit=0.0)
        what = f"{name} of {source}, slope over the exact one, minus 1"
        yield MeasureRow(axis=axis, side="trainer", what=what, value=slope, unit="", limit=slope_limit, note=note + few)
        what = f"{name} of {source}, mean error over mean size"
        yield MeasureRow(axis=axis, side="trainer", what=what, value=relative, unit="", limit=limit)
