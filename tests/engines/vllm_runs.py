"""Runs real rollout engines for test_vllm.py: every engine of one TP size in turn, results to one file.

    python tests/engines/vllm_runs.py FOLDER TP

FOLDER holds one checkpoint per name; rank 0 writes FOLDER/results.TP.pt. vLLM's tensor-parallel groups live as long as the process, so each
TP size has processes of its own. Nothing is judged here.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read when triton is imported; the reference implementation does not look at it.
os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlmismatch.engines.oracle import OracleEngine
from rlmismatch.engines.protocol import Arm, ArmResult, SideConfig
from rlmismatch.engines.vllm import VllmEngine
from rlmismatch.errors import RlmismatchError
from rlmismatch.pins import vllm_attention
from rlmismatch.pins.spec import PINS
from rlmismatch.tokens import Prompt, Sequence
from tests.engine_runs import ENGINE_LOG

PATHS = ("prefill", "chunked", "decode")


def _sequence(name: str, prompt: int, response: int, shift: int = 0) -> Sequence:
    ids = tuple((7 * i + 3 + shift) % 1000 for i in range(prompt))
    return Sequence(id=name, prompt_ids=ids, response_ids=tuple((i * i + 11 + shift) % 1000 for i in range(response)))


# A prompt of one token; two responses to one prompt; a chunk and a page that end just here; one longer than a page.
SEQUENCES = (
    _sequence("short", 1, 4),
    _sequence("group a", 6, 7),
    _sequence("group b", 6, 3),
    _sequence("chunk", 5, 3, 1),
    _sequence("page", 20, 12, 2),
    _sequence("long", 3, 60, 3),
)
TINY = (_sequence("tiny", 1, 2),)
PROMPTS = tuple(Prompt(id=name, token_ids=SEQUENCES[4].prompt_ids) for name in ("first", "second"))
# Together more tokens than one step takes; the first eight fit.
MANY = tuple(Prompt(id=f"many {n}", token_ids=_sequence("", 250, 0, n).prompt_ids) for n in range(10))
FLOAT32 = {
    1: ("tiny-qwen3", "tiny-llama", "qwen2-bias-wide-heads", "variant-rope-llama3", "variant-rope-linear"),
    2: ("tiny-qwen3", "variant-mqa"),
}
PLANTS = {  # TP -> (plant, checkpoint)
    1: (
        ("one_stale_tensor", "tiny-qwen3"),
        ("untied_head", "tiny-llama"),
        ("eps", "tiny-qwen3"),
        ("qk_norm_skipped", "tiny-qwen3"),
        ("rope_theta", "tiny-qwen3"),
        ("temperature_not_applied", "tiny-qwen3"),
        ("wrong_gemm_one_layer", "tiny-qwen3"),
        ("attention_bf16_accumulate", "tiny-qwen3"),
    ),
    2: (("lse_offset_log_tp", "tiny-qwen3"), ("forward_reduce_bf16_accumulate", "tiny-qwen3")),
}
NARROW_HEADS = "variant-qwen2-bias"  # heads of 8
REFUSED = (  # (slug, SideConfig fields)
    ("plant-unknown", {"plants": ("no_such_plant",)}),
    ("plant-unknown", {"plants": ("dropout_on",)}),
    ("plant-without-effect", {"plants": ("untied_head",)}),
    ("plant-without-effect", {"plants": ("temperature_not_applied",)}),
    ("plant-without-effect", {"plants": ("forward_reduce_bf16_accumulate",)}),
    ("temperature-not-positive", {"temperature": 0.0}),
    ("context-parallel-not-built", {"cp": 2}),
    ("checkpoint-does-not-fit-tp", {"tp": 3}),
)


@contextlib.contextmanager
def rollout(folder: Path, name: str, tp: int, rank: int, **changes: Any) -> Iterator[VllmEngine]:
    """A loaded engine in a process group of its own: vLLM takes the group along when it shuts down."""
    meet(folder, tp, rank)
    config = SideConfig(side="rollout", engine="vllm", ckpt=str(folder / name), tp=tp, chunk_size=8, max_model_len=256, **changes)
    engine = VllmEngine(config, rank=rank, local_rank=rank)
    engine.load()
    count_run("rollout vllm", rank)
    yield engine
    engine.close()
    del engine
    gc.collect()


_meetings = itertools.count()


def meet(folder: Path, tp: int, rank: int) -> None:
    path = folder / f"rendezvous.{tp}.{next(_meetings)}"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=tp)


def count_run(what: str, rank: int) -> None:
    """One line for the session's count of real engines."""
    log = os.environ.get(ENGINE_LOG)
    if log:
        with Path(log).open("a") as file:
            file.write(f"{what} {rank}\n")


def every_pin(engine: VllmEngine) -> frozenset[str]:
    return frozenset(PINS) - (frozenset() if hasattr(engine._live.layers[0].self_attn, "q_norm") else {"qk_norm"})


def arm(engine: VllmEngine, *, paths: tuple[str, ...] = PATHS, sequences: tuple[Sequence, ...] = SEQUENCES, **fields: Any) -> ArmResult:
    return engine.run(Arm(id="arm", paths=paths, **fields), sequences)  # type: ignore[arg-type]


def arms(engine: VllmEngine) -> dict[str, Any]:
    """Everything that one engine is asked of on the main checkpoint."""
    every = every_pin(engine)
    patched = patched_attributes(engine)
    out: dict[str, Any] = {
        "generated": engine.generate(PROMPTS, max_new_tokens=6, seed=5),
        "generated again": engine.generate(PROMPTS, max_new_tokens=6, seed=5),
        "native": arm(engine),
        "pinned": arm(engine, pins=every),
        "pinned in another order": arm(engine, pins=every, sequences=SEQUENCES[::-1]),
        "local": arm(engine, probe="local"),
        "local pinned": arm(engine, probe="local", pins=every),
        "boundary": arm(engine, probe="boundary", pins=every),
        "digests": engine.weight_digests(),
        "readings": engine.readings(),
        "provenance": engine.provenance(),
    }
    out["recorded"] = arm(engine, paths=("decode",), sequences=out["generated"])
    for name, prompts in (("many", MANY), ("few", MANY[:8])):
        with engine._scorer._steps_of(None) as steps:
            out[name] = engine.generate(prompts, max_new_tokens=2, seed=5)
        out[f"steps of {name}"] = list(steps)
        out[f"recorded {name}"] = arm(engine, paths=("decode",), sequences=out[name])
    for pin in PINS:
        out[f"only {pin}"] = arm(engine, paths=("prefill",), pins=frozenset({pin}))
    for reduce in ("allreduce_partials", "allgather_partials_fixed_merge", "allgather_logits", "guess"):
        out[f"reduce {reduce}"] = arm(engine, paths=("prefill",), settings={"logprob.reduce": reduce})
    out["pinned against the knob"] = arm(engine, pins=every, paths=("prefill",), settings={"logprob.reduce": "allgather_logits"})
    out["errors"] = {
        "token-outside-vocabulary": slug_of(lambda: arm(engine, sequences=(Sequence(id="x", prompt_ids=(1100,), response_ids=(1,)),))),
        "sequence-too-long": slug_of(lambda: arm(engine, sequences=(Sequence(id="x", prompt_ids=(1,) * 256, response_ids=(1,)),))),
        "path-unknown": slug_of(lambda: arm(engine, paths=("forward",))),
        "pin-unknown": slug_of(lambda: arm(engine, pins=frozenset({"gem"}))),
        "boundary-probe-needs-every-pin": slug_of(lambda: arm(engine, pins=every - {"rope"}, probe="boundary")),
        "prompt-needs-tokenizer": slug_of(lambda: engine.generate((Prompt(id="x", text="a"),), max_new_tokens=1, seed=0)),
    }
    for name, tokens, sequences in (
        ("in one step", 128, SEQUENCES[:5]),
        ("in two steps", 40, SEQUENCES[:5]),
        ("apart", 16, SEQUENCES[:4]),
        ("alone", 128, TINY),
    ):
        with step_of(engine, tokens), engine._scorer._steps_of(None) as steps:
            out[f"packed {name}"] = arm(engine, pins=every, paths=("prefill_packed",), sequences=sequences)
        out[f"packed {name}, steps"] = list(steps)
    out["errors"]["rollout-steps-differ"] = slug_of(lambda: one_a_step(engine))
    out["errors inside an arm"] = [raises_inside(engine, path) for path in PATHS]
    # On a CPU whose attention packs K, the pin keeps rows of its own; here that is feigned.
    known, vllm_attention._PLAIN_ISAS = vllm_attention._PLAIN_ISAS, ()  # type: ignore[misc, assignment]
    out["pinned with rows of its own"] = arm(engine, pins=every)
    vllm_attention._PLAIN_ISAS = known  # type: ignore[misc]
    out["native again"] = arm(engine)
    out["attributes left behind"] = sorted(patched_attributes(engine) - patched)
    return out


@contextlib.contextmanager
def step_of(engine: VllmEngine, tokens: int) -> Iterator[None]:
    """The scheduler's steps take so many tokens."""
    scheduler = engine._scorer.scheduler
    before = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = tokens
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before


def one_a_step(engine: VllmEngine) -> None:
    """A packed prefill in an engine that puts one sequence into a step, whatever its budget."""
    scheduler = engine._scorer.scheduler
    before = scheduler.max_num_active_reqs
    scheduler.max_num_active_reqs = 1
    try:
        arm(engine, paths=("prefill_packed",))
    finally:
        scheduler.max_num_active_reqs = before


def patched_attributes(engine: VllmEngine) -> set[str]:
    """Every instance attribute that a hook could have left on the objects that are hooked."""
    places: dict[str, Any] = {"sampler": engine._live.sampler, "scheduler": engine._scorer.scheduler}
    for name, module in engine._live.model.named_modules():
        places[name] = module
        places |= {f"{name}.{part}": getattr(module, part) for part in ("impl", "quant_method") if hasattr(module, part)}
    return {f"{name}:{attribute}" for name, place in places.items() for attribute, x in vars(place).items() if callable(x)}


def raises_inside(engine: VllmEngine, path: str) -> str:
    """What an error in the middle of a pinned step comes out as."""
    handle = engine._live.layers[1].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("half way")))
    try:
        arm(engine, pins=every_pin(engine), paths=(path,))
    except RuntimeError as error:
        return str(error)
    finally:
        handle.remove()
    return "no error"


def slug_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RlmismatchError as error:
        return error.slug
    return "no error"


def with_plant(folder: Path, name: str, tp: int, rank: int, plant: str | None) -> dict[str, Any]:
    with rollout(folder, name, tp, rank, temperature=0.7, plants=(plant,) if plant else ()) as engine:
        return {
            "native": arm(engine, paths=("prefill",)),
            "repeat": arm(engine, paths=("prefill",)),
            "pinned": arm(engine, paths=("prefill",), pins=every_pin(engine)),
            "readings": engine.readings(),
            "digests": engine.weight_digests(),
        }


def work(rank: int, folder: Path, tp: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out: dict[str, Any] = {"float32": {}, "float32 digests": {}, "plants": {}, "sound": {}, "oracle": {}, "refused": []}
    with rollout(folder, "tiny-qwen3", tp, rank) as engine:
        out["arms"] = arms(engine)
        maps = Path("/proc/self/maps").read_text().splitlines()
        out["shared memory"] = [line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line]
    with rollout(folder, "tiny-qwen3", tp, rank, impl="triton") as engine:
        out["triton"] = arm(engine, pins=every_pin(engine), sequences=TINY)
    for name in FLOAT32[tp]:
        with rollout(folder, name, tp, rank, dtype="float32") as engine:
            out["float32"][name] = arm(engine)
            out["float32 digests"][name] = engine.weight_digests()
    for plant, name in PLANTS[tp]:
        out["plants"][plant] = with_plant(folder, name, tp, rank, plant)
        if name not in out["sound"]:
            out["sound"][name] = with_plant(folder, name, tp, rank, None)
    if tp == 1:
        for _, changes in REFUSED:
            config = SideConfig(side="rollout", engine="vllm", ckpt=str(folder / "tiny-qwen3"), **changes)  # type: ignore[arg-type]
            out["refused"].append(slug_of(VllmEngine(config, rank=0, local_rank=0).load))
        meet(folder, tp, rank)
        narrow = SideConfig(side="rollout", engine="vllm", ckpt=str(folder / NARROW_HEADS), max_model_len=256)
        out["narrow heads"] = slug_of(VllmEngine(narrow, rank=0, local_rank=0).load)
    if rank == 0:
        for name in FLOAT32[tp]:
            oracle = OracleEngine(SideConfig(side="oracle", engine="oracle", ckpt=str(folder / name)))
            oracle.load()
            count_run("oracle oracle", rank)
            out["oracle"][name] = oracle.run(Arm(id="oracle", paths=("oracle",)), SEQUENCES)
        torch.save(out, folder / f"results.{tp}.pt")


if __name__ == "__main__":
    processes = int(sys.argv[2])
    mp.spawn(work, (Path(sys.argv[1]), processes), nprocs=processes)  # type: ignore[no-untyped-call]
