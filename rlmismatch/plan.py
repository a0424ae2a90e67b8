"""Which arms are run, in which order, on which side: drives the engines and leaves captures behind.

Nothing is judged here but what decides whether to go on: numbers of sides that are not comparable are void, so they are not taken.

More than 400 lines: one run, told in its order; which arms come next depends on what those before them left in the folder.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from rlmismatch import __version__, attribution, axes, capture, tokens
from rlmismatch.arms import (
    ALL,
    ATTENTION,
    BOUNDARY,
    COMPILE,
    EAGER,
    FORCED,
    GEMM,
    GRADS,
    LOCAL,
    LOGITS,
    NATIVE,
    ORACLE,
    PAGED,
    PAGED_PINNED,
    RETURN,
    arm_id,
    base_pins,
    compiled,
    engine_knobs,
    repeat_id,
    rollout_paths,
)
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.axes.base import Axis
from rlmismatch.checkpoint.head import UnusedRows, unused_rows
from rlmismatch.engines import attention_forced, attention_sinks, gemm_knobs
from rlmismatch.engines.fleet import Fleet
from rlmismatch.engines.launch import Controller
from rlmismatch.engines.logprob_knobs import CHAIN_KNOBS
from rlmismatch.engines.node import SideLaunch
from rlmismatch.engines.protocol import Arm, ScorePath, SideConfig, SideName
from rlmismatch.errors import InconclusiveError, UsageError
from rlmismatch.evidence import Evidence, wanted_axes
from rlmismatch.inputs import Inputs, token_texts
from rlmismatch.settings import Settings, parse_env, split_plant
from rlmismatch.tokens import Sequence


class Progress(Protocol):
    """Told what is going on; the terminal's progress bar implements it."""

    def step(self, text: str) -> None: ...

    def arms(self, text: str, total: int) -> None: ...

    def arm_done(self, side: SideName, arm: str) -> None: ...


@dataclasses.dataclass(kw_only=True)
class Run:
    """One run: the controller, the folder, and what was checked before."""

    settings: Settings
    inputs: Inputs
    folder: Path
    controller: Controller
    progress: Progress
    command_line: str
    sequences: tuple[Sequence, ...] = ()
    _digests: dict[str, str] = dataclasses.field(default_factory=dict, init=False)
    _unused_rows: UnusedRows | None = dataclasses.field(default=None, init=False)
    _fleet: Fleet = dataclasses.field(init=False)

    def execute(self) -> None:
        """Run every arm the command needs and leave the captures in `folder`. The caller seals."""
        started = time.time()
        self._write_run(started, finished=None)
        sides = self._launches()
        self.progress.step("hashing the checkpoint's tensors")
        self._digests = self.inputs.checkpoint.digests(dtype=self.settings.dtype)
        self._unused_rows = unused_rows(self.inputs.checkpoint)
        engines = " and ".join(f"{s.config.engine} ({s.config.layout})" for s in sides)
        self.progress.step(f"starting {engines}{'' if self.inputs.together else ', one after the other'}")
        self._fleet = Fleet(self.controller, sides, together=self.inputs.together)
        self._fleet.start()
        self._make_sequences()
        self._describe()
        if not Evidence(self.folder).void:
            self._measure()
        self._fleet.close()
        self._write_run(started, finished=time.time())

    def _launches(self) -> tuple[SideLaunch, ...]:
        s, i = self.settings, self.inputs
        shared: dict[str, Any] = {
            "ckpt": str(i.checkpoint.path),
            "device": i.device,
            "impl": i.impl,
            "seed": s.seed,
            "max_model_len": i.max_model_len,
            "block_size": s.block_size,
            "chunk_size": s.chunk_size,
            "gpu_memory_fraction": s.gpu_memory_fraction / i.ranks_per_gpu(s.rollout_tp),
            "temperature": s.temperature,
            "bos_token_id": i.checkpoint.config.bos_token_id,
            "try_backends": self._tries_backends,
        }
        trainer = SideConfig(
            side="trainer",
            engine="megatron",
            tp=s.trainer_tp,
            sp=s.sp,
            cp=s.cp,
            cp_partition=s.cp_partition,
            cp_comm_type=s.cp_comm_type,
            dtype=s.trainer_dtype or s.dtype,
            trainer_spec=s.trainer_spec,
            vocab_padding_policy=s.vocab_padding_policy,
            plants=s.plants_of("trainer"),
            knobs=engine_knobs(s, "trainer"),
            grads=s.grads,
            ranks_per_gpu=i.ranks_per_gpu(s.trainer_tp * s.cp),
            **shared,
        )
        rollout = SideConfig(
            side="rollout",
            engine="vllm",
            tp=s.rollout_tp,
            dtype=s.rollout_dtype or s.dtype,
            plants=s.plants_of("rollout"),
            knobs=engine_knobs(s, "rollout"),
            ranks_per_gpu=i.ranks_per_gpu(s.rollout_tp),
            **shared,
        )
        out = [
            SideLaunch(config=trainer, python=s.trainer_python or sys.executable, env=self._environment(trainer, s.trainer_env)),
            SideLaunch(config=rollout, python=s.rollout_python or sys.executable, env=self._environment(rollout, s.rollout_env)),
        ]
        if s.oracle != "off":
            transforms = {k: v for k, v in engine_knobs(s, "oracle").items() if k in CHAIN_KNOBS | {attention_sinks.KNOB}}
            judge = SideConfig(side="oracle", engine="oracle", dtype=s.dtype, oracle_dtype=s.oracle, knobs=transforms, **shared)
            out.append(SideLaunch(config=judge, python=s.trainer_python or sys.executable))
        return tuple(out)

    def _environment(self, config: SideConfig, given: Seq[str]) -> dict[str, str]:
        """What the side's knobs need in the environment, and over it what the person gave."""
        return gemm_knobs.environment(config) | parse_env(given, f"--{config.side}-env")

    def _write_run(self, started: float, finished: float | None) -> None:
        config = self.inputs.checkpoint.config
        capture.write_json(
            self.folder / "run.json",
            {
                "schema": capture.SCHEMA_VERSION,
                "tool_version": __version__,
                "command_line": self.command_line,
                "settings": self.settings.to_json(),
                "resolved": {
                    "device": self.inputs.device,
                    "impl": self.inputs.impl,
                    "max_model_len": self.inputs.max_model_len,
                    "sides": "together" if self.inputs.together else "in-turn",
                },
                "world_size": self.controller.node.world.size,
                "torchrun": self.controller.node.world.torchrun,
                "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(timespec="seconds"),
                "seconds": None if finished is None else finished - started,
                "checkpoint": {
                    "path": str(self.inputs.checkpoint.path.resolve()),
                    "architecture": config.architecture,
                    "num_layers": config.num_layers,
                    "num_heads": config.num_heads,
                    "num_kv_heads": config.num_kv_heads,
                    "qk_norm": config.qk_norm,
                    "vocab_size": config.vocab_size,
                    "tied": config.tied,
                    "digests": self._digests,
                    "unused_rows": self._unused_rows.to_json() if self._unused_rows else None,
                },
                "host": host_facts(),
            },
        )

    def _make_sequences(self) -> None:
        """Take the rollout file's sequences, or let the rollout engine sample them; then every side gets the same ids."""
        s = self.settings
        if self.inputs.sequences:
            self.sequences = self.inputs.sequences
        else:
            self.progress.step(f"sampling {len(self.inputs.prompts)} responses with vLLM")
            request = {
                "op": "generate",
                "prompts": [dataclasses.asdict(p) for p in self.inputs.prompts],
                "max_new_tokens": s.max_new_tokens,
                "seed": s.seed,
            }
            answer = self._fleet.ask({"rollout": [request]})["rollout"]
            self.sequences = tuple(tokens.sequence_from_json(row, "the rollout engine's answer") for row in answer["sequences"])
            config = self.inputs.checkpoint.config
            tokens.check_ids(self.sequences, vocab_size=config.vocab_size, max_positions=config.max_positions, source=s.prompts or "")
        if not sum(len(x.response_ids) for x in self.sequences):
            raise InconclusiveError("nothing-to-score", "no sequence has a response token: nothing can be compared")
        if s.grads and len(self.sequences) < 2:
            raise UsageError("grads-need-microbatches", "--grads needs at least two sequences: each is a microbatch")
        tokens.write_rollout(self.folder / "tokens.jsonl", self.sequences)
        texts = token_texts(self.inputs.checkpoint, self.sequences)
        if texts:
            capture.write_json(self.folder / "token_texts.json", texts)

    def _describe(self) -> None:
        compiling = self._tries_backends and self.inputs.device == "cuda"
        tries = "; attention backends that compile at their first call on a machine do so now" if compiling else ""
        self.progress.step(f"reading contracts and weights back from the live engines{tries}")
        self._fleet.give(self.sequences)
        self._fleet.ask({name: [{"op": "describe"}] for name in self._fleet.names})

    def _measure(self) -> None:
        s = self.settings
        base = base_pins(s)
        every = ALL
        forms = rollout_paths(s)
        repeated = tuple(path for path in ("prefill", "decode") if path in forms)
        full: list[tuple[str, frozenset[str], tuple[ScorePath, ...]]] = [(NATIVE, base, forms)]
        full += [(repeat_id(n), base, repeated) for n in range(1, s.repeat)]
        full += [(arm_id(every, base), every, forms)]
        for axis in () if compiled(s) else self._measured_axes():
            pins = frozenset(axis.pins)
            paths: tuple[ScorePath, ...] = forms if axis.ratio == "prefill/decode" else ("prefill",)
            full += [(arm_id(base | pins, base), base | pins, paths), (arm_id(every - pins, base), every - pins, paths)]
        merged: dict[str, tuple[frozenset[str], tuple[ScorePath, ...]]] = {}
        for name, pins, paths in full:
            merged[name] = (pins, max(paths, merged.get(name, (pins, ()))[1], key=len))
        if compiled(s):  # pins are inert there: one arm shows which, and one what the compilation moves
            self._run_compiled([Arm(id=name, pins=pins, paths=paths) for name, (pins, paths) in merged.items()])
            return
        probes = [Arm(id=LOCAL, pins=base, probe="local", paths=("prefill",))]
        planted = {split_plant(text)[0] for text in s.plant}
        if s.command == "logprob" or any(a.family == "logprob" for p in planted for a in axes.axes_of_plant(p)):
            probes.append(Arm(id=LOGITS, pins=every - {"head_gemm", "logprob"} | base, probe="logits", paths=("prefill",)))
        # What that probe simulates is full causal attention without a sink.
        sunk = any(attention_sinks.KNOB in s.knobs_of(name) for name in self._fleet.names)
        other = sunk or self.inputs.checkpoint.config.sliding_window is not None
        if not other and (s.command == "attention" or any(a.family == "attention" for p in planted for a in axes.axes_of_plant(p))):
            probes.append(Arm(id=ATTENTION, pins=every - {"attention"} | base, probe="attention", paths=("prefill",)))
        gemm = s.command == "gemm" or any(a.family == "gemm" for p in planted for a in axes.axes_of_plant(p))
        if gemm or Evidence(self.folder).promised:
            probes.append(Arm(id=GEMM, pins=base, probe="gemm", paths=("prefill",)))
        if s.attribute:
            probes.append(Arm(id=BOUNDARY, pins=every, probe="boundary", paths=("prefill",)))
        arms = [Arm(id=name, pins=pins, paths=paths) for name, (pins, paths) in merged.items()]
        oracle = self._oracle_arms()
        # In the process that had the pins in force: a side that was loaded anew would have its native bits in any case.
        lifted = Arm(id=RETURN, pins=base, paths=("prefill",))
        alone: dict[SideName, Seq[Arm]] = {
            "trainer": [] if other else self._forced("trainer", base, ("forward",)),
            "rollout": [*self._paged(base), *([] if other else self._forced("rollout", base, repeated))],
        }
        self._run_arms("measuring", [*arms, *probes, lifted], oracle, alone)
        if s.grads:
            self.progress.arms("taking the trainer's gradients, native and pinned", 1)
            gradients = Arm(id=GRADS, pins=base, probe="grads", paths=("forward",))
            self._fleet.ask({"trainer": [{"op": "run", "arms": [gradients.to_json()]}]})
        if s.attribute:
            self._attribute(base)
            if self.inputs.together:
                self._run_arms("checking once more that native bits return", [lifted])

    def _run_compiled(self, arms: list[Arm]) -> None:
        """The arms in the rollout's own mode; then the rollout is loaded once more, to run eagerly what it ran compiled."""
        base = base_pins(self.settings)
        self._run_arms("measuring", [*arms, Arm(id=RETURN, pins=base, paths=("prefill",))], self._oracle_arms())
        launch = self._fleet.launches["rollout"]
        knobs = {k: v for k, v in launch.config.knobs.items() if k != COMPILE}
        self.progress.step("starting the rollout once more, eagerly")
        self._fleet.replace(dataclasses.replace(launch, config=dataclasses.replace(launch.config, knobs=knobs)))
        eager = Arm(id=EAGER, pins=base, paths=rollout_paths(self.settings))
        self._fleet.ask({"rollout": [{"op": "run", "arms": [eager.to_json()]}]})

    def _oracle_arms(self) -> list[Arm]:
        return [Arm(id=ORACLE, paths=("oracle", "plain"))] if "oracle" in self._fleet.names else []

    def _paged(self, base: frozenset[str]) -> list[Arm]:
        """Arms of the rollout alone, in which pages lie elsewhere and prefixes come from the cache; beside each the same without."""
        s = self.settings
        if s.command != "attention" or (s.axis and not {"attention.paged_kv", "attention.layout"} & set(s.axis)):
            return []
        cached = s.knobs_of("rollout").get("attention.prefix_cache") != "off"
        paths: tuple[ScorePath, ...] = ("prefill", "prefill_shuffled", "prefill_packed", "decode", "decode_shuffled")
        paths = (*paths, "decode_hit") if cached else paths
        return [Arm(id=PAGED, pins=ALL - {"attention"} | base, paths=paths), Arm(id=PAGED_PINNED, pins=ALL, paths=paths)]

    @property
    def _tries_backends(self) -> bool:
        return self._forces_backends or self._asks_for("attention.backend_reuse")

    @property
    def _forces_backends(self) -> bool:
        return self._asks_for("attention.provenance") and self.settings.cp == 1

    def _asks_for(self, axis: str) -> bool:
        return self.settings.command == "attention" and (not self.settings.axis or axis in self.settings.axis)

    def _forced(self, side: SideName, base: frozenset[str], paths: tuple[ScorePath, ...]) -> list[Arm]:
        """Arms of one side whose attention another backend computes: each that its trial ran."""
        if not self._forces_backends or "attention" in base:
            return []
        described = Evidence(self.folder).side(side)
        known = described.provenance.get("attention_forced", {}) if described else {}
        return [
            Arm(id=FORCED + name, pins=base, paths=paths, settings={attention_forced.SETTING: name})
            for name, version in known.items()
            if not version.startswith("not run")
        ]

    def _measured_axes(self) -> list[Axis]:
        """Axes with a pin that this command gives numbers to, structural zeros left out."""
        setup = Evidence(self.folder).setup
        wanted = () if self.settings.command == "probe" and not self.settings.axis else wanted_axes(self.settings)
        return [a for a in wanted if a.pins and a.built in ("complete", "pin_only") and not a.structural_zero(setup)]

    def _attribute(self, base: frozenset[str]) -> None:
        evidence = Evidence(self.folder)
        if evidence.broken:
            return  # the report says why: a broken contract is no rounding
        players, floor = evidence.players(), ScoreBook(evidence).floor()
        while True:
            table = ScoreBook(Evidence(self.folder)).drift_table()
            missing = attribution.next_arms(table, players, floor=floor, seed=self.settings.seed)
            if not missing:
                return
            arms = [Arm(id=arm_id(base | pins, base), pins=base | pins, paths=("prefill",)) for pins in missing]
            left = attribution.expected_arms(table, players, floor=floor, seed=self.settings.seed) - len(table)
            self._run_arms(f"attributing (at most {left} arms left)", arms)

    def _run_arms(
        self, text: str, arms: Iterable[Arm], oracle: Seq[Arm] = (), alone: Mapping[SideName, Seq[Arm]] = MappingProxyType({})
    ) -> None:
        """Both engines run the same arms at the same time; the trainer has one path, its forward."""
        both = list(arms)
        trainer = [*(dataclasses.replace(arm, paths=("forward",)) for arm in both), *alone.get("trainer", ())]
        rollout = [*both, *alone.get("rollout", ())]
        self.progress.arms(text, len(rollout) + len(trainer) + len(oracle))
        arms_of: dict[SideName, Seq[Arm]] = {"trainer": trainer, "rollout": rollout, "oracle": oracle}
        self._fleet.ask({side: [{"op": "run", "arms": [arm.to_json() for arm in wanted]}] for side, wanted in arms_of.items() if wanted})


def host_facts() -> dict[str, Any]:
    """What of this machine can move a number."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "cpu_count": os.cpu_count(),
        "gpu_driver": _gpu_driver(),
        "env": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENV_PREFIXES)},
    }
    commit = _commit()
    return {**facts, "commit": commit} if commit else facts


_ENV_PREFIXES: Final = (
    "NCCL_",
    "CUBLAS_",
    "CUDA_",
    "NVTE_",
    "VLLM_",
    "OMP_",
    "MKL_",
    "ONEDNN_",
    "TORCH_",
    "TRITON_",
    "NVSHMEM_",
    "OPENBLAS_",
    "GLOO_",
)


def _gpu_driver() -> str | None:
    """The NVIDIA kernel driver's version as the kernel itself reports it; None without one."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[0] if found else None


def _commit() -> str | None:
    """The git commit of this tool's source tree, if it runs from one."""
    import subprocess

    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
