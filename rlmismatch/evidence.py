"""What a run's captures say, before anyone judges: sides, arms, contract comparison, gates. A pure function of the folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlmismatch import axes, capture, contract, tokens
from rlmismatch.arms import base_pins
from rlmismatch.axes.base import Axis, Setup
from rlmismatch.contract import Evidence as Known
from rlmismatch.contract import FieldComparison, Reading, Tier, read, unknown
from rlmismatch.engines.protocol import ArmResult, SideConfig, SideName
from rlmismatch.errors import EnvironmentUnfitError
from rlmismatch.pins.spec import PINS
from rlmismatch.settings import Settings, parse_declarations
from rlmismatch.tokens import Sequence

GATES: Final = ("model.tokens", "model.weights", "model.mode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideEvidence:
    """What one side wrote."""

    config: SideConfig
    readings: dict[str, dict[str, Reading]]
    weights: dict[str, str]
    provenance: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A run's folder, read on demand."""

    folder: Path
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings of `rlmismatch report`

    @functools.cached_property
    def run(self) -> dict[str, Any]:
        data: dict[str, Any] = capture.read_json(self.folder / "run.json")
        return data

    @functools.cached_property
    def settings(self) -> Settings:
        given = Settings.from_json(self.run["settings"])
        return dataclasses.replace(given, **{k: v for k, v in self.overrides.items() if v not in (None, ())})

    @functools.cached_property
    def sequences(self) -> tuple[Sequence, ...]:
        return tokens.read_rollout(self.folder / "tokens.jsonl")

    @functools.cached_property
    def token_texts(self) -> dict[str, str]:
        """Token id (as text) -> what it decodes to; empty without a tokenizer."""
        path = self.folder / "token_texts.json"
        return dict(capture.read_json(path)) if path.is_file() else {}

    def side(self, name: SideName) -> SideEvidence | None:
        """The side's description, or None when the side did not run."""
        return self._sides.get(name)

    @functools.cached_property
    def _sides(self) -> dict[SideName, SideEvidence]:
        out: dict[SideName, SideEvidence] = {}
        names: tuple[SideName, ...] = ("trainer", "rollout", "oracle")
        for name in names:
            path = self.folder / name / "side.json"
            if path.is_file():
                data = capture.read_json(path)
                out[name] = SideEvidence(
                    config=SideConfig.from_json(data["config"]),
                    readings=contract.readings_from_json(data["readings"]),
                    weights=data["weights"],
                    provenance=data["provenance"],
                )
        return out

    def arms(self, name: SideName) -> dict[str, ArmResult]:
        """The side's finished arms by id."""
        return capture.read_arms(self.folder, name)

    @property
    def setup(self) -> Setup:
        """The shape of the run, for structural zeros."""
        s, checkpoint = self.settings, self.run["checkpoint"]
        trainer = self.side("trainer")
        pad = trainer.readings.get("logprob.vocab_padding", {}).get("num_pad_rows", Reading()) if trainer else Reading()
        # Rank order takes the partials of dX as they are sent, so the two sums differ at most in what the engine adds in.
        summed = trainer.readings.get("gemm.dgrad_reduce", {}).get("acc_dtype", Reading()) if trainer else Reading()
        return Setup(
            trainer_tp=s.trainer_tp,
            rollout_tp=s.rollout_tp,
            sp=s.sp,
            cp=s.cp,
            device=self.run["resolved"]["device"],
            num_heads=checkpoint["num_heads"],
            num_kv_heads=checkpoint["num_kv_heads"],
            has_qk_norm=checkpoint["qk_norm"],
            pad_rows=pad.value if isinstance(pad.value, int) else 0,
            trainer_spec=s.trainer_spec,
            rollout_kv_splits=self._rollout_kv_splits,
            equal_payload=summed.value in ("float32", "as sent"),
        )

    @property
    def _rollout_kv_splits(self) -> int | None:
        """KV splits of the rollout's attention: 1 where it reads so; None where it is another number, the kernel's choice, or not known."""
        rollout = self.side("rollout")
        reading = rollout.readings.get("attention.merge_order", {}).get("split_kv_policy", Reading()) if rollout else Reading()
        return 1 if str(reading.value) == "1" else None

    @functools.cached_property
    def comparisons(self) -> tuple[FieldComparison, ...]:
        """Every contract field of every axis that is built, compared."""
        declared = parse_declarations(self.settings.declare)
        if self.settings.cp > 1:  # what the command line says of the ranks' tokens must not be untrue of the live ranks
            declared["trainer"].setdefault("attention.merge_order:cp_partition", self.settings.cp_partition)
            if self.settings.trainer_spec == "local":  # attention is ours, in a fixed order
                declared["trainer"].setdefault("attention.merge_order:merge_order", "ascending global block index")
                declared["trainer"].setdefault("attention.lse:lse_base", "e")
        for side_name, fields in declared.items():  # a sink that was asked for and has no effect is a fault, also where no side has one
            if "attention.sink" in self.settings.knobs_of(side_name):
                fields.setdefault("attention.provenance:sinks", True)
        sides: dict[SideName, dict[str, dict[str, Reading]]] = {}
        contradictions: set[str] = set()
        names: tuple[SideName, ...] = ("trainer", "rollout")
        for name in names:
            side = self.side(name)
            readings = {axis: dict(fields) for axis, fields in side.readings.items()} if side else {}
            if side:
                readings["model.weights"] = {**readings.get("model.weights", {}), **_weight_readings(side)}
                if "forward_reduce" in self.base_pins:
                    readings["gemm.forward_reduce"] = _held_sum(readings.get("gemm.forward_reduce", {}), side.config)
            sides[name], against = contract.declare(readings, declared[name])
            contradictions.update(against)
        contradictions.update(axes.unreported_fallbacks(sides["trainer"], sides["rollout"]))
        built = axes.built()
        waivers = set(self.settings.waive)
        return contract.compare(
            sides["trainer"],
            sides["rollout"],
            axes.contract_fields(built),
            waivers=waivers | (axes.implied_waivers(waivers, sides["trainer"], sides["rollout"]) - contradictions),
            contradictions=contradictions,
            one_sided=axes.one_sided(built),
        )

    @property
    def void(self) -> tuple[FieldComparison, ...]:
        """IDENTICAL fields that failed: the sides are not comparable and no number counts."""
        return tuple(c for c in self.comparisons if c.fails is Tier.IDENTICAL)

    @property
    def broken(self) -> tuple[FieldComparison, ...]:
        """Fields that failed at any tier."""
        return tuple(c for c in self.comparisons if c.fails in (Tier.IDENTICAL, Tier.SEMANTIC))

    @functools.cached_property
    def weight_differences(self) -> dict[str, str]:
        """Logical tensor -> which side is not what the checkpoint holds; over all names of both sides and the checkpoint."""
        expected: dict[str, str] = self.run["checkpoint"]["digests"]
        out = {}
        trainer, rollout = self.side("trainer"), self.side("rollout")
        if trainer is None or rollout is None:
            return {}
        for name in sorted(set(expected) | set(trainer.weights) | set(rollout.weights)):
            t, r, e = trainer.weights.get(name), rollout.weights.get(name), expected.get(name)
            if name not in expected and t == r:
                continue  # a flag such as "tied" that both engines report alike
            if t == r == e:
                continue
            wrong = [side for side, digest in (("trainer", t), ("rollout", r)) if digest != e] if e else ["trainer and rollout differ"]
            missing = [side for side, digest in (("trainer", t), ("rollout", r)) if digest is None]
            out[name] = (
                f"missing in the {' and '.join(missing)}"
                if missing
                else f"{' and '.join(wrong)} not as in the checkpoint"
                if e
                else wrong[0]
            )
        return out

    @functools.cached_property
    def promised(self) -> dict[SideName, str]:
        """Side -> where it promises batch invariance: that no row's bits depend on the other rows. Asked for by knob, or read back."""
        out: dict[SideName, str] = {}
        names: tuple[SideName, ...] = ("trainer", "rollout")
        for name in names:
            if self.settings.knobs_of(name).get("gemm.batch_invariant") == "on":
                out[name] = "--batch-invariant on"
            for c in self.comparisons:
                reading = c.trainer if name == "trainer" else c.rollout
                if c.field == "batch_invariant" and reading.value is True:
                    out.setdefault(name, f"{c.key}, {reading.source}")
        return out

    @property
    def base_pins(self) -> frozenset[str]:
        return base_pins(self.settings)

    def players(self) -> tuple[str, ...]:
        """Pins that attribution may turn: those of axes that are built, not a structural zero here, and not held by a knob."""
        setup, live = self.setup, []
        for pin in PINS:
            owners = [a for a in axes.ALL if pin in a.pins and a.built in ("complete", "pin_only")]
            if owners and pin not in self.base_pins and not all(a.structural_zero(setup) for a in owners):
                live.append(pin)
        return tuple(live)


def _held_sum(fields: Mapping[str, Reading], config: SideConfig) -> dict[str, Reading]:
    """gemm.forward_reduce where a knob has the pin in every arm: what the engine does by itself is not what runs. Knobs tell if it did."""
    source = "the pin forward_reduce, held by a knob in every arm"
    # One addition of two, rounded once, is one number whether float32 or float64 holds it.
    dtype = "float32" if config.tp == 2 or config.impl == "triton" else "float64"
    held = {"order": read("rank order, by halves", source), "acc_dtype": read(dtype, source), "engine": read("rank_order", source)}
    applies = {name: reading for name, reading in held.items() if fields.get(name, Reading()).evidence is not Known.NOT_APPLICABLE}
    return {**fields, **applies}


def _weight_readings(side: SideEvidence) -> dict[str, Reading]:
    """The digest over all logical tensors as one IDENTICAL field."""
    tensors = {k: v for k, v in side.weights.items() if k != "tied" and not k.startswith("buffers.")}
    if not tensors:
        return {"tensor_digests": unknown("the engine reported no weight")}
    value = hashlib.sha256(json.dumps(sorted(tensors.items())).encode()).hexdigest()
    return {"tensor_digests": read(value, f"{len(tensors)} live tensors, un-sharded and un-fused")}


def axis_of(comparisons: tuple[FieldComparison, ...], axis: str) -> tuple[FieldComparison, ...]:
    """The comparisons of one axis, by its id."""
    return tuple(c for c in comparisons if c.axis == axis)


def wanted_axes(settings: Settings) -> tuple[Axis, ...]:
    """The axes a command speaks of. An axis asked for by name that is not built yet is an error (exit 7)."""
    if settings.axis:
        chosen = tuple(axes.by_id(a) for a in settings.axis)
        missing = [a.id for a in chosen if a.built == "not_built"]
        if missing:
            raise EnvironmentUnfitError(
                "axis-not-built", f"{', '.join(missing)}: not built yet", hint="see `rlmismatch axes` for what can run"
            )
        return chosen
    return axes.ALL if settings.command == "probe" else axes.family(settings.command)
