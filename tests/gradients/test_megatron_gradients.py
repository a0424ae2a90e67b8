"""Gradients of real trainers: one pinned gradient at every tensor-parallel size, and a native one that is looked at as it is.

The chain: each operation's gradient against autograd (test_gradient_ops.py, tests/kernels) -> the pinned forward under autograd gives the
log-probs that are scored -> all parameters' pinned gradients are equal over TP1, TP2, TP2+SP, TP4 and TP4+SP, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.make import write
from fixtures.recipes import FIXTURES, VARIANTS
from rlmismatch.contract import Evidence, Reading
from rlmismatch.engines.collective_order import AS_SENT, RING_DOWN
from tests.gradients.gradient_runs import FOUR, TWO, taken
from tests.logprob.gloo import on_ranks

pytestmark = pytest.mark.engines
Runs = Mapping[str, Mapping[str, Any]]
RECIPES = {**FIXTURES, **VARIANTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trainers")
    for name in {checkpoint for checkpoint, _ in (*TWO.values(), *FOUR.values())}:
        (root / name).mkdir()
        write(RECIPES[name], root / name)
    return root


@pytest.fixture(scope="module")
def two(folder: Path) -> Runs:
    return dict(on_ranks(2, taken, folder, TWO)[0])


@pytest.fixture(scope="module")
def four(folder: Path) -> Runs:
    return dict(on_ranks(4, taken, folder, FOUR)[0])


def tensors(run: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = run["result"].boundaries
    return found


def digests(run: Mapping[str, Any]) -> dict[str, bytes]:
    return {k: bytes(v.tolist()) for k, v in tensors(run).items() if k.startswith("digest/")}


def drift(run: Mapping[str, Any], players: str, parameters: str = "") -> float:
    """Relative L2 against the pinned gradient, over the parameters whose name contains `parameters`."""
    rows = torch.stack([v for k, v in tensors(run).items() if k.startswith(f"of/{players}/") and parameters in k]).sum(dim=0)
    return float((rows[4] / rows[2]).sqrt())


def reading(run: Mapping[str, Any], axis: str, field: str) -> Reading:
    found: Reading = run["readings"][axis][field]
    return found


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", "tiny-mistral", "variant-qwen2-bias"])
def test_the_pinned_gradient_is_one_at_tp1_tp2_and_sp(two: Runs, name: str) -> None:
    one = digests(two[f"{name} tp1"])
    assert len(set(one.values())) == len(one) >= 20
    assert digests(two[f"{name} tp2"]) == one
    assert digests(two[f"{name} tp2sp"]) == one


def test_the_pinned_gradient_is_one_at_tp4(four: Runs) -> None:
    one = digests(four["tp1"])
    assert digests(four["tp4"]) == one
    assert digests(four["tp4sp"]) == one
    assert digests(four["rank order"]) == one


def test_a_gradient_is_of_the_log_probs_that_are_scored_and_leaves_no_trace(two: Runs, four: Runs) -> None:
    for run in (*two.values(), *four.values()):
        assert run["back"]
        found = tensors(run)
        if "logprob/pinned" in found:
            assert torch.equal(found["logprob/pinned"], run["pinned"])
        assert found["repeat"][1] == 0
        assert not [note for note in run["result"].notes if "never called" in note]


def test_native_gradients_drift_and_the_players_explain_it(two: Runs) -> None:
    run = two["tiny-qwen3 tp2"]
    assert 1e-3 < drift(run, "native") < 0.1
    assert 0 < drift(run, "ops") < 0.2 * drift(run, "native")  # what dW's rounding leaves
    assert drift(run, "ops+wgrad_accumulate") == 0.0
    assert not [k for k in tensors(run) if "dgrad_reduce" in k]  # one addition: no player


def test_the_pinned_gradient_looks_through_the_window(two: Runs) -> None:
    """Megatron's own backward has the window: one without it is 0.7 off, rounding 0.03."""
    assert 1e-3 < drift(two["tiny-mistral tp1"], "native") < 0.1


def test_the_order_of_dx_counts_at_tp4_and_not_at_tp2(two: Runs, four: Runs) -> None:
    for name in ("tiny-qwen3 tp2", "tiny-qwen3 tp2sp"):
        sums = [v for k, v in tensors(two[name]).items() if k.startswith("dgrad/")]
        assert len(sums) == 5
        assert sum(float(s[1]) for s in sums) == 0
    for name in ("tp4", "tp4sp"):
        sums = [v for k, v in tensors(four[name]).items() if k.startswith("dgrad/")]
        assert len(sums) == 5
        assert all(0 < s[1] < s[0] and s[4] > s[5] for s in sums)  # other bits than rank order, and further from float64
        assert any(float(v[4]) > 0 for k, v in tensors(four[name]).items() if k.startswith("order/"))
        assert drift(four[name], "ops+wgrad_accumulate") == 0.0  # pinned, the order leaves nothing


def test_rank_order_as_a_knob_is_the_pin(four: Runs) -> None:
    run = four["rank order"]
    assert drift(run, "native") == drift(run, "dgrad_reduce") == drift(four["tp4"], "dgrad_reduce")
    assert run["result"].knobs["gemm.dgrad_reduce"]["status"] == "applied"


def test_how_the_engine_sums_is_read_from_the_live_trainer(two: Runs, four: Runs) -> None:
    axis = "gemm.dgrad_reduce"
    assert reading(two["tiny-qwen3 tp1"], axis, "order").evidence is Evidence.NOT_APPLICABLE
    assert reading(two["tiny-qwen3 tp2"], axis, "order").evidence is Evidence.NOT_APPLICABLE
    assert reading(two["tiny-qwen3 tp2"], axis, "acc_dtype").value == "float32"
    for name in ("tp4", "tp4sp"):
        order, dtype = (reading(four[name], axis, field) for field in ("order", "acc_dtype"))
        assert (order.evidence, dtype.value) == (Evidence.READ, AS_SENT)
        assert order.value == RING_DOWN


def test_a_lost_sum_is_no_order(two: Runs) -> None:
    run = two["not reduced, SP"]
    assert reading(run, "gemm.dgrad_reduce", "acc_dtype").evidence is Evidence.NOT_APPLICABLE
    for sums in (v for k, v in tensors(run).items() if k.startswith("dgrad/")):
        assert sums[4] > 0.1 * sums[3]
        assert sums[5] < 1e-4 * sums[3]


def test_every_way_into_main_grad(two: Runs) -> None:
    found = tensors(two["tiny-qwen3 tp2"])
    layers = {k.rsplit("/", 1)[0] for k in found if k.startswith("wgrad/")}
    assert len(layers) == 8
    for layer in layers:
        error = {way: float((v[2] / v[1]).sqrt()) for way in WAYS if (v := found[f"{layer}/{way}"]) is not None}
        assert error["explicit_fp32"] < 1e-6
        assert error["fused"] < 1e-6
        assert 1e-4 < error["explicit_rounded"] < error["bf16_main_grad"] < 2.0**-7
    assert found["stays"].tolist() == [256.0, 257.0]


WAYS = ("fused", "explicit_rounded", "explicit_fp32", "bf16_main_grad")


def test_accumulation_is_read_from_the_live_trainer(two: Runs) -> None:
    axis = "gemm.wgrad_accumulate"
    values = {name: [reading(two[name], axis, f).value for f in ("accum_dtype", "main_grad_dtype", "fusion")] for name in two}
    assert values["tiny-qwen3 tp2"] == ["float32", "float32", False]
    assert values["fused"] == ["float32", "float32", True]
    assert values["explicit"] == ["float32", "float32", False]
    assert values["bf16 main_grad"] == ["bfloat16", "bfloat16", False]


def test_knobs_turn_the_way_into_main_grad(two: Runs) -> None:
    assert digests(two["fused"]) == digests(two["explicit"]) == digests(two["tiny-qwen3 tp2"])
    assert "CPU" in two["fused"]["result"].knobs["gemm.wgrad_accumulate"]["reason"]
    # Fused, dW is not rounded: with pinned operations nothing is left.
    assert drift(two["fused"], "ops") == 0.0
    assert drift(two["explicit"], "ops") == 0.0
    assert drift(two["explicit"], "native") == drift(two["tiny-qwen3 tp2"], "wgrad_accumulate")
    assert drift(two["fused"], "native", "gate_proj") != drift(two["tiny-qwen3 tp2"], "native", "gate_proj")


def test_the_pin_heals_a_bf16_main_grad(two: Runs) -> None:
    run = two["bf16 main_grad"]
    assert digests(run) == digests(two["tiny-qwen3 tp1"])
    assert drift(run, "ops") > 1.2 * drift(two["tiny-qwen3 tp1"], "ops")


def test_a_float32_model_drifts_by_float32(two: Runs) -> None:
    assert 0 < drift(two["float32"], "native") < 1e-4


def test_ranks_that_share_a_head_are_no_claim(four: Runs) -> None:
    run = four["shared heads"]
    assert not digests(run)
    assert [n for n in run["result"].notes if n.startswith("no pinned gradient: TP4 is above the 2 key/value heads")]
    assert [k for k in tensors(run) if k.startswith("of/native/")]
