"""The trainer on one GPU: both layer specs, one process, NCCL over one rank.

Chain: under TE the local probe takes the module apart and still gives native bits -> norm and GEMM may be pinned apart there -> all
pinned, the local and the TE spec give one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.make import write
from fixtures.recipes import FIXTURES
from rlmismatch.contract import Evidence
from rlmismatch.engines.megatron import MegatronEngine
from rlmismatch.engines.megatron_model import have_transformer_engine
from rlmismatch.engines.protocol import Arm, ArmResult, SideConfig
from rlmismatch.pins.spec import PINS, boundary_names
from rlmismatch.tokens import Sequence

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

NAME = "mid-qwen3"
SEQUENCES = tuple(
    Sequence(id=name, prompt_ids=tuple((7 * i + 3) % 1000 for i in range(p)), response_ids=tuple((i * i + 11) % 1000 for i in range(r)))
    for name, p, r in (("short", 1, 4), ("long", 6, 95))
)
ALL = frozenset(PINS)
FORWARD = ("forward",)


def run_spec(spec: str, folder: Path) -> dict[str, Any]:
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/{spec}", rank=0, world_size=1)
    config = SideConfig(side="trainer", engine="megatron", ckpt=str(folder / NAME), device="cuda", impl="triton", trainer_spec=spec)  # type: ignore[arg-type]
    engine = MegatronEngine(config, rank=0, local_rank=0)
    try:
        engine.load()
        arms = {
            "native": Arm(id="native", paths=FORWARD),
            "pinned": Arm(id="pinned", paths=FORWARD, pins=ALL),
            "norm": Arm(id="norm", paths=FORWARD, pins=frozenset({"norm"})),
            "gemm": Arm(id="gemm", paths=FORWARD, pins=frozenset({"gemm"})),
            "local": Arm(id="local", paths=FORWARD, probe="local"),
            "boundary": Arm(id="boundary", paths=FORWARD, pins=ALL, probe="boundary"),
            "native again": Arm(id="native again", paths=FORWARD),
        }
        out: dict[str, Any] = {name: engine.run(arm, SEQUENCES) for name, arm in arms.items()}
        return {**out, "readings": engine.readings(), "digests": engine.weight_digests(), "provenance": engine.provenance()}
    finally:
        engine.close()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("trainer")
    (folder / NAME).mkdir()
    write(FIXTURES[NAME], folder / NAME)
    return {spec: run_spec(spec, folder) for spec in (["local", "te"] if have_transformer_engine() else ["local"])}


@pytest.fixture(params=["local", "te"])
def run(request: pytest.FixtureRequest, runs: Mapping[str, Any]) -> Mapping[str, Any]:
    if request.param not in runs:
        pytest.skip("transformer_engine does not import here")
    found: Mapping[str, Any] = runs[request.param]
    return found


def scores(result: ArmResult) -> torch.Tensor:
    return torch.cat(list(result.scores["forward"].values()))


def test_native_bits_return(run: Mapping[str, Any]) -> None:
    assert torch.equal(scores(run["native again"]), scores(run["native"]))
    assert not torch.equal(scores(run["pinned"]), scores(run["native"]))


def test_the_local_probe_gives_native_bits(run: Mapping[str, Any]) -> None:
    assert torch.equal(scores(run["local"]), scores(run["native"]))


def test_norm_and_gemm_are_separate_pins(run: Mapping[str, Any]) -> None:
    assert not torch.equal(scores(run["norm"]), scores(run["gemm"]))
    assert run["norm"].calls == {"norm": 9 * len(SEQUENCES)}
    assert run["gemm"].calls == {"gemm": 16 * len(SEQUENCES)}


def test_every_pin_runs_and_every_boundary_is_seen(run: Mapping[str, Any]) -> None:
    assert min(run["pinned"].calls.values()) > 0
    assert run["pinned"].notes == []
    assert tuple(run["boundary"].boundaries) == boundary_names(4)


def test_readings_are_known(run: Mapping[str, Any]) -> None:
    unknown = [(a, f) for a, fields in run["readings"].items() for f, r in fields.items() if r.evidence is Evidence.UNKNOWN]
    assert unknown == [("logprob.head_gemm", "tile_split_k")]


def test_both_specs_are_one_number_when_pinned(runs: Mapping[str, Any]) -> None:
    if "te" not in runs:
        pytest.skip("transformer_engine does not import here")
    assert torch.equal(scores(runs["te"]["pinned"]), scores(runs["local"]["pinned"]))
    assert runs["te"]["digests"] == runs["local"]["digests"]
