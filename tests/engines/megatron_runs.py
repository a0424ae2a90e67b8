"""Runs real trainers for test_megatron.py: two processes, every engine in turn, results to one file.

    python tests/engines/megatron_runs.py FOLDER

FOLDER holds one checkpoint per name; the results go to FOLDER/results.pt. A trainer at TP1 runs twice, once per process. Nothing is
judged here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read when triton is imported; the reference implementation does not look at it.
os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlmismatch.engines.megatron import MegatronEngine
from rlmismatch.engines.oracle import OracleEngine
from rlmismatch.engines.protocol import Arm, ArmResult, SideConfig
from rlmismatch.errors import RlmismatchError
from rlmismatch.pins.spec import PINS
from rlmismatch.tokens import Sequence
from tests.engine_runs import ENGINE_LOG

SETUPS = {"tp1": (1, False), "tp2": (2, False), "tp2sp": (2, True)}
# Lengths that no TP size divides, a prompt of one token, and one long enough for a rope scaling to show.
SEQUENCES = tuple(
    Sequence(id=name, prompt_ids=tuple((7 * i + 3) % 1000 for i in range(p)), response_ids=tuple((i * i + 11) % 1000 for i in range(r)))
    for name, p, r in (("short", 1, 4), ("odd", 6, 7), ("long", 3, 60))
)
TINY = (Sequence(id="tiny", prompt_ids=(5,), response_ids=(17, 903)),)
EXACT_IN_FLOAT32 = ("tiny-qwen3", "tiny-llama", "variant-qwen2-bias", "variant-rope-llama3", "variant-rope-linear", "variant-mqa")
PLANTS = (  # (plant, checkpoint, setup)
    ("one_stale_tensor", "tiny-qwen3", "tp1"),
    ("untied_head", "tiny-llama", "tp1"),
    ("eps", "tiny-qwen3", "tp1"),
    ("qk_norm_skipped", "tiny-qwen3", "tp1"),
    ("rope_theta", "tiny-qwen3", "tp1"),
    ("dropout_on", "tiny-qwen3", "tp1"),
    ("temperature_not_applied", "tiny-qwen3", "tp1"),
    ("pad_rows_nonzero", "tiny-qwen3", "tp2"),
    ("wrong_gemm_one_layer", "tiny-qwen3", "tp1"),
    ("lse_offset_log_tp", "tiny-qwen3", "tp2"),
    ("attention_bf16_accumulate", "tiny-qwen3", "tp1"),
    ("forward_reduce_bf16_accumulate", "tiny-qwen3", "tp2"),
)
REFUSED = (  # (what is wrong, SideConfig fields)
    ("plant-unknown", {"plants": ("no_such_plant",)}),
    ("plant-without-effect", {"plants": ("untied_head",)}),
    ("plant-without-effect", {"plants": ("temperature_not_applied",)}),
    ("plant-without-effect", {"plants": ("forward_reduce_bf16_accumulate",)}),
    ("context-parallel-does-not-fit", {"cp": 2, "cp_comm_type": "p2p"}),
    ("checkpoint-does-not-fit-tp", {"tp": 3}),
    ("transformer-engine-not-usable", {"trainer_spec": "te"}),
    ("transformer-engine-not-usable", {"trainer_spec": "te", "knobs": {"gemm.batch_invariant": "on"}}),
)
FORWARD = ("forward",)


def every_pin(engine: MegatronEngine) -> frozenset[str]:
    return frozenset(PINS) - (frozenset() if engine.model.qk_norm else {"qk_norm"})


@contextlib.contextmanager
def trainer(folder: Path, name: str, setup: str, rank: int, **changes: Any) -> Iterator[MegatronEngine]:
    tp, sp = SETUPS[setup]
    config = SideConfig(side="trainer", engine="megatron", ckpt=str(folder / name), **{"tp": tp, "sp": sp, **changes})
    engine = MegatronEngine(config, rank=rank, local_rank=rank)
    try:
        engine.load()
        count_run("trainer megatron", rank)
        yield engine
    finally:
        engine.close()


def count_run(what: str, rank: int) -> None:
    """One line for the session's count of real engines."""
    log = os.environ.get(ENGINE_LOG)
    if log:
        with Path(log).open("a") as file:
            file.write(f"{what} {rank}\n")


def native(engine: MegatronEngine, **settings: Any) -> ArmResult:
    return engine.run(Arm(id="native", paths=FORWARD, settings=settings), SEQUENCES)


def arms(engine: MegatronEngine) -> dict[str, Any]:
    """Everything that one engine is asked of on the main checkpoint."""
    every = every_pin(engine)
    out: dict[str, Any] = {
        "native": native(engine),
        "pinned": engine.run(Arm(id="pinned", pins=every, paths=FORWARD), SEQUENCES),
        "local": engine.run(Arm(id="local", paths=FORWARD, probe="local"), SEQUENCES),
        "local pinned": engine.run(Arm(id="local pinned", pins=every, paths=FORWARD, probe="local"), SEQUENCES),
        "boundary": engine.run(Arm(id="boundary", pins=every, paths=FORWARD, probe="boundary"), SEQUENCES),
        "readings": engine.readings(),
        "digests": engine.weight_digests(),
        "provenance": engine.provenance(),
    }
    for pin in ("gemm", "forward_reduce", "logprob"):
        out[f"only {pin}"] = engine.run(Arm(id=pin, pins=frozenset({pin}), paths=FORWARD), SEQUENCES)
        out[f"all but {pin}"] = engine.run(Arm(id=f"-{pin}", pins=every - {pin}, paths=FORWARD), SEQUENCES)
    for reduce in ("allreduce_partials", "allgather_partials_fixed_merge", "allgather_logits", "guess"):
        out[f"reduce {reduce}"] = native(engine, **{"logprob.reduce": reduce})
    out["pinned against the knob"] = engine.run(
        Arm(id="knob", pins=every, paths=FORWARD, settings={"logprob.reduce": "allgather_logits"}), SEQUENCES
    )
    out["errors"] = {
        "token-outside-vocabulary": slug_of(
            lambda: engine.run(Arm(id="a", pins=every), (Sequence(id="x", prompt_ids=(1100,), response_ids=(1,)),))
        ),
        "sequence-too-long": slug_of(
            lambda: engine.run(Arm(id="a", pins=every), (Sequence(id="x", prompt_ids=(1,) * 513, response_ids=(1,)),))
        ),
        "path-unknown": slug_of(lambda: engine.run(Arm(id="a", paths=("decode",)), SEQUENCES)),
        "pin-unknown": slug_of(lambda: engine.run(Arm(id="a", pins=frozenset({"gem"})), SEQUENCES)),
        "boundary-probe-needs-every-pin": slug_of(lambda: engine.run(Arm(id="a", pins=every - {"rope"}, probe="boundary"), SEQUENCES)),
        "trainer-does-not-generate": slug_of(lambda: engine.generate((), max_new_tokens=1, seed=0)),
    }
    out["error inside an arm"] = raises_inside(engine)
    out["native again"] = native(engine)
    out["patched attributes left"] = [
        name for name, module in engine.gpt.named_modules() for hooked in ("forward", "_forward_impl") if hooked in vars(module)
    ]
    return out


def raises_inside(engine: MegatronEngine) -> str:
    """What an error in the middle of a pinned forward comes out as."""
    engine.gpt.decoder.layers[1].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("half way")))
    try:
        engine.run(Arm(id="broken", pins=every_pin(engine), paths=FORWARD), SEQUENCES)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.gpt.decoder.layers[1].mlp._forward_pre_hooks.clear()
    return "no error"


def slug_of(call: Any) -> str:
    try:
        call()
    except RlmismatchError as error:
        return error.slug
    return "no error"


def plant(folder: Path, rank: int, plant: str | None, name: str, setup: str) -> dict[str, Any]:
    changes: dict[str, Any] = {"vocab_padding_policy": "include", "temperature": 0.7, "plants": (plant,) if plant else ()}
    with trainer(folder, name, setup, rank, **changes) as engine:
        return {
            "native": native(engine),
            "repeat": native(engine),
            "pinned": engine.run(Arm(id="pinned", pins=every_pin(engine), paths=FORWARD), SEQUENCES),
            "local": engine.run(Arm(id="local", probe="local"), SEQUENCES[:1]),
            "readings": engine.readings(),
            "digests": engine.weight_digests(),
        }


def work(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    out: dict[str, Any] = {"arms": {}, "mask": {}, "triton": {}, "float32": {}, "plants": {}, "sound": {}, "refused": []}
    for setup in SETUPS:
        with trainer(folder, "tiny-qwen3", setup, rank) as engine:
            out["arms"][setup] = arms(engine)
        with trainer(folder, "tiny-qwen3", setup, rank, vocab_padding_policy="mask", temperature=0.7) as engine:
            out["mask"][setup] = {"native": native(engine), "readings": engine.readings()}
        with trainer(folder, "tiny-qwen3", setup, rank, impl="triton") as engine:
            out["triton"][setup] = engine.run(Arm(id="pinned", pins=every_pin(engine), paths=FORWARD), TINY)
        for name in EXACT_IN_FLOAT32:
            with trainer(folder, name, setup, rank, dtype="float32", vocab_padding_policy="mask") as engine:
                out["float32"][name, setup] = native(engine)
    for bad, name, setup in PLANTS:
        out["plants"][bad] = plant(folder, rank, bad, name, setup)
        if (name, setup) not in out["sound"]:
            out["sound"][name, setup] = plant(folder, rank, None, name, setup)
    for _, changes in REFUSED:
        config = SideConfig(side="trainer", engine="megatron", ckpt=str(folder / "tiny-qwen3"), **changes)  # type: ignore[arg-type]
        out["refused"].append(slug_of(MegatronEngine(config, rank=rank, local_rank=rank).load))
    if rank == 0:
        out["oracle"] = {}
        for name in EXACT_IN_FLOAT32:
            oracle = OracleEngine(SideConfig(side="oracle", engine="oracle", ckpt=str(folder / name)))
            oracle.load()
            count_run("oracle oracle", rank)
            out["oracle"][name] = oracle.run(Arm(id="oracle", paths=("oracle",)), SEQUENCES)
        torch.save(out, folder / "results.pt")
    dist.barrier()


if __name__ == "__main__":
    mp.spawn(work, (Path(sys.argv[1]),), nprocs=2)  # type: ignore[no-untyped-call]
