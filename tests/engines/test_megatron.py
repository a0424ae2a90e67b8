"""The real trainer. Every engine of this file runs once, in two processes (megatron_runs.py); the tests read what they wrote.

Chain: in float32 the scores equal the float64 oracle's on every architecture -> weights, RoPE and positions are mapped right -> with every
op pinned TP1, TP2 and TP2+SP give one score bit for bit -> what differs natively is rounding in the pinned ops. Native bits return
after every arm, so arms may be compared with each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.make import write
from fixtures.recipes import FIXTURES, VARIANTS
from rlmismatch import axes
from rlmismatch.checkpoint import Checkpoint
from rlmismatch.contract import Evidence, Reading
from rlmismatch.engines.protocol import ArmResult
from rlmismatch.pins.spec import PINS, boundary_names
from tests.engines import megatron_runs
from tests.engines.megatron_runs import EXACT_IN_FLOAT32, PLANTS, REFUSED, SEQUENCES, SETUPS, TINY

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
# float32 has 24 bits; logits reach 24 in these checkpoints, and 64 columns and two layers add up: a few ULP of 24.
FLOAT32_NATS = 4e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trainers")
    for name in EXACT_IN_FLOAT32:
        (root / name).mkdir()
        write({**FIXTURES, **VARIANTS}[name], root / name)
    return root


@pytest.fixture(scope="module")
def runs(folder: Path) -> Mapping[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, megatron_runs.__file__, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results: Mapping[str, Any] = torch.load(folder / "results.pt", weights_only=False)
    return results


def scores(result: ArmResult) -> torch.Tensor:
    """All sequences' scores, one after the other."""
    return torch.cat([result.scores["forward"][s.id] for s in (TINY if "tiny" in result.scores["forward"] else SEQUENCES)])


def value(readings: Mapping[str, Mapping[str, Reading]], key: str) -> Any:
    axis, field = key.split(":")
    return readings[axis][field].value


def test_scores_are_those_of_the_response_tokens(runs: Mapping[str, Any]) -> None:
    by_id = runs["arms"]["tp1"]["native"].scores["forward"]
    assert {s.id: len(s.response_ids) for s in SEQUENCES} == {name: len(x) for name, x in by_id.items()}
    assert all(x.dtype == torch.float64 and bool((x < 0).all()) for x in by_id.values())


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", EXACT_IN_FLOAT32)
def test_float32_agrees_with_the_oracle(runs: Mapping[str, Any], name: str, setup: str) -> None:
    oracle = torch.cat([runs["oracle"][name].scores["oracle"][s.id] for s in SEQUENCES])
    assert float((scores(runs["float32"][name, setup]) - oracle).abs().max()) <= FLOAT32_NATS


@pytest.mark.parametrize("setup", SETUPS)
def test_all_pinned_is_one_number_at_every_tp(runs: Mapping[str, Any], setup: str) -> None:
    assert torch.equal(scores(runs["arms"][setup]["pinned"]), scores(runs["arms"]["tp1"]["pinned"]))


@pytest.mark.parametrize("setup", SETUPS)
def test_all_pinned_by_triton_is_one_number_at_every_tp(runs: Mapping[str, Any], setup: str) -> None:
    assert torch.equal(scores(runs["triton"][setup]), scores(runs["triton"]["tp1"]))


def test_native_differs_over_tp_and_from_the_pins(runs: Mapping[str, Any]) -> None:
    arms = runs["arms"]
    assert not torch.equal(scores(arms["tp1"]["native"]), scores(arms["tp2"]["native"]))
    assert all(not torch.equal(scores(arms[s]["native"]), scores(arms[s]["pinned"])) for s in SETUPS)


@pytest.mark.parametrize("setup", SETUPS)
def test_native_bits_return_after_every_arm_and_after_an_error(runs: Mapping[str, Any], setup: str) -> None:
    arms = runs["arms"][setup]
    assert arms["error inside an arm"] == "half way"
    assert torch.equal(scores(arms["native again"]), scores(arms["native"]))
    assert arms["patched attributes left"] == []


@pytest.mark.parametrize("setup", SETUPS)
def test_every_requested_pin_counts_its_calls(runs: Mapping[str, Any], setup: str) -> None:
    layers, n = 2, len(SEQUENCES)
    expected = {
        "norm": n * (2 * layers + 1),
        "qk_norm": n * 2 * layers,
        "gemm": n * 4 * layers,
        "forward_reduce": n * 2 * layers,
        "rope": n * 2 * layers,
        "attention": n * layers,
        "activation": n * layers,
        "head_gemm": n,
        "logprob": n,
    }
    arms = runs["arms"][setup]
    assert arms["pinned"].calls == expected
    assert set(expected) == set(PINS)
    assert arms["pinned"].notes == []
    assert arms["native"].calls == {}
    assert arms["local"].calls == {}


def test_gemm_and_sum_over_ranks_are_separate_pins(runs: Mapping[str, Any]) -> None:
    """Partials rounded before the sum make TP2 differ from TP1; only both pins together take that away."""
    tp1, tp2 = runs["arms"]["tp1"], runs["arms"]["tp2"]
    for left_out in ("gemm", "forward_reduce"):
        assert not torch.equal(scores(tp2[f"all but {left_out}"]), scores(tp2["pinned"]))
    # One rank has nothing to sum.
    assert torch.equal(scores(tp1["only forward_reduce"]), scores(tp1["native"]))
    assert torch.equal(scores(tp1["all but forward_reduce"]), scores(tp1["pinned"]))


@pytest.mark.parametrize("setup", SETUPS)
def test_local_probe_looks_on_without_touching_the_result(runs: Mapping[str, Any], setup: str) -> None:
    arms = runs["arms"][setup]
    assert torch.equal(scores(arms["local"]), scores(arms["native"]))
    assert torch.equal(scores(arms["local pinned"]), scores(arms["pinned"]))


@pytest.mark.parametrize("setup", SETUPS)
def test_local_probe_counts_every_element_of_every_boundary_once(runs: Mapping[str, Any], setup: str) -> None:
    local = {(x.boundary, x.pin): x for x in runs["arms"][setup]["local"].local}
    whole = {(x.boundary, x.pin): x for x in runs["arms"]["tp1"]["local"].local}
    names = [boundary for boundary, pin in local if pin != "forward_reduce"]
    assert sorted(names) == sorted(boundary_names(2))
    assert {key: (x.rows, x.count) for key, x in local.items() if key in whole} == {key: (x.rows, x.count) for key, x in whole.items()}
    tokens = sum(len(s.token_ids) for s in SEQUENCES)
    assert local["layers.0.q_proj", "gemm"].rows == tokens
    assert local["lm_head", "head_gemm"].count == tokens * 1100
    assert local["logprob", "logprob"].count == tokens - len(SEQUENCES)
    extra = {boundary for boundary, pin in local if pin == "forward_reduce"}
    assert extra == (set() if setup == "tp1" else {f"layers.{i}.{x}_proj" for i in range(2) for x in ("o", "down")})


@pytest.mark.parametrize("setup", SETUPS)
def test_pins_are_no_worse_than_a_few_roundings(runs: Mapping[str, Any], setup: str) -> None:
    """bfloat16 keeps 8 bits: one rounding is off by 2^-9 of the value at most, and no pin rounds more than twice."""
    for error in runs["arms"][setup]["local"].local:
        assert error.pin_vs_fp64_mean <= 2 * 2.0**-9 * error.fp64_scale, error


@pytest.mark.parametrize("setup", SETUPS)
def test_boundaries_are_native_outputs_in_global_layout(runs: Mapping[str, Any], setup: str) -> None:
    found, whole = runs["arms"][setup]["boundary"].boundaries, runs["arms"]["tp1"]["boundary"].boundaries
    assert tuple(found) == boundary_names(2)
    t = len(SEQUENCES[0].token_ids)
    shapes = {name.removeprefix("layers.1."): tuple(x.shape) for name, x in found.items() if not name.startswith("layers.0.")}
    assert shapes == {
        "input_norm": (t, 64),
        "q_proj": (t, 8, 32),
        "k_proj": (t, 2, 32),
        "v_proj": (t, 2, 32),
        "q_norm": (t, 8, 32),
        "k_norm": (t, 2, 32),
        "q_rope": (t, 8, 32),
        "k_rope": (t, 2, 32),
        "attention": (t, 8, 32),
        "o_proj": (t, 64),
        "post_attention_norm": (t, 64),
        "gate_proj": (t, 128),
        "up_proj": (t, 128),
        "activation": (t, 128),
        "down_proj": (t, 64),
        "final_norm": (t, 64),
        "lm_head": (t, 1100),
        "logprob": (t - 1,),
    }
    # On equal inputs only the sum over ranks and the padded denominator can tell TP2 from TP1.
    differ = {name for name in found if not torch.equal(found[name], whole[name])}
    assert all(name.endswith(("o_proj", "down_proj", "logprob")) for name in differ)


@pytest.mark.parametrize("setup", SETUPS)
def test_reduce_knob_moves_only_the_last_bits_and_says_what_ran(runs: Mapping[str, Any], setup: str) -> None:
    arms = runs["arms"][setup]
    for value_asked in ("allreduce_partials", "allgather_partials_fixed_merge", "allgather_logits"):
        arm = arms[f"reduce {value_asked}"]
        assert float((scores(arm) - scores(arms["native"])).abs().max()) <= 5e-6
        assert (arm.knobs["logprob.reduce"]["actual"], arm.knobs["logprob.reduce"]["status"]) == (value_asked, "applied")
    assert torch.equal(scores(arms["reduce allreduce_partials"]), scores(arms["native"]))
    assert not torch.equal(scores(arms["reduce allgather_partials_fixed_merge"]), scores(arms["native"]))
    assert arms["reduce guess"].knobs["logprob.reduce"]["status"] == "unsupported"
    assert arms["pinned against the knob"].knobs["logprob.reduce"]["status"] == "fell_back"
    assert torch.equal(scores(arms["pinned against the knob"]), scores(arms["pinned"]))


@pytest.mark.parametrize("setup", SETUPS)
def test_padded_rows_count_unless_masked(runs: Mapping[str, Any], setup: str) -> None:
    included = runs["arms"][setup]["readings"]
    assert value(included, "logprob.vocab_padding:vocab_padding_policy") == "include"
    assert value(runs["mask"][setup]["readings"], "logprob.vocab_padding:vocab_padding_policy") == "mask"
    padded = value(included, "logprob.vocab_padding:padded_vocab_size")
    assert padded == {"tp1": 1152, "tp2": 1280, "tp2sp": 1280}[setup]
    assert value(included, "logprob.vocab_padding:num_pad_rows") == padded - 1100
    assert value(included, "logprob.vocab_padding:pad_row_init") == "zeros"
    # Padding can only take probability away, and the pin leaves it out: a bias of one sign.
    bias = scores(runs["arms"][setup]["native"]) - scores(runs["arms"][setup]["only logprob"])
    assert float(bias.max()) <= 2e-6
    assert float(bias.mean()) < -1e-6


@pytest.mark.parametrize("setup", SETUPS)
def test_temperature_is_applied_and_read_back(runs: Mapping[str, Any], setup: str) -> None:
    run = runs["mask"][setup]
    assert value(run["readings"], "logprob.transform_chain:transform_chain") == ["temperature(0.7)"]
    assert value(run["readings"], "logprob.transform_chain:temperature_applied") == 0.7
    assert not torch.equal(scores(run["native"]), scores(runs["arms"][setup]["native"]))


@pytest.mark.parametrize("setup", SETUPS)
def test_the_backward_is_read_from_a_gradient_that_was_taken(runs: Mapping[str, Any], setup: str) -> None:
    for run in ("arms", "mask"):  # as it comes; masked and with a temperature
        readings = runs[run][setup]["readings"]
        assert {f: r.value for f, r in readings["logprob.backward"].items()} == {
            "dlogits": "softmax minus one-hot, float32",
            "entropy_reduction": "fixed_merge, after temperature",
            "grad_downcast_at": "final_write",
            "autograd_path": ["megatron.core.tensor_parallel.cross_entropy._VocabParallelCrossEntropy"],
        }


@pytest.mark.parametrize("setup", SETUPS)
def test_live_weights_digest_to_the_checkpoint(runs: Mapping[str, Any], folder: Path, setup: str) -> None:
    digests = Checkpoint.open(folder / "tiny-qwen3").digests()
    assert runs["arms"][setup]["digests"] == {**digests, "tied": "false"}


@pytest.mark.parametrize("setup", SETUPS)
def test_readings_cover_the_contract(runs: Mapping[str, Any], setup: str) -> None:
    readings = runs["arms"][setup]["readings"]
    for axis in axes.ALL:
        if axis.side == "rollout" or axis.id in ("model.tokens", "attention.paged_kv"):
            continue
        missing = {f.name for f in axis.fields} - set(readings[axis.id]) - {"tensor_digests"}
        assert not missing, axis.id
    unknown = [(a, f) for a, fields in readings.items() for f, r in fields.items() if r.evidence is Evidence.UNKNOWN]
    assert unknown == [("logprob.head_gemm", "tile_split_k")]
    assert all(r.source for fields in readings.values() for r in fields.values())


def test_readings_say_how_the_trainer_is_set_up(runs: Mapping[str, Any]) -> None:
    readings = runs["arms"]["tp2sp"]["readings"]
    assert {
        key: value(readings, key)
        for key in (
            "gemm.runtime_flags:compute_dtype",
            "gemm.runtime_flags:tensor_parallel_size",
            "gemm.runtime_flags:sequence_parallel",
            "gemm.forward_reduce:collective",
            "attention.provenance:num_query_heads",
            "attention.provenance:num_kv_heads",
            "attention.provenance:head_dim",
            "attention.provenance:rope_identity",
            "attention.layout:tp_head_ownership",
            "logprob.vocab_shards:boundaries",
            "model.norm:eps",
            "model.qk_norm:present",
            "model.mode:attention_dropout",
            "model.activation:kind",
        )
    } == {
        "gemm.runtime_flags:compute_dtype": "bfloat16",
        "gemm.runtime_flags:tensor_parallel_size": 2,
        "gemm.runtime_flags:sequence_parallel": True,
        "gemm.forward_reduce:collective": "reduce_scatter",
        "attention.provenance:num_query_heads": 8,
        "attention.provenance:num_kv_heads": 2,
        "attention.provenance:head_dim": 32,
        "attention.provenance:rope_identity": "theta=1000000.0,scaling=default,factor=1.0",
        "attention.layout:tp_head_ownership": [[0, 4], [4, 8]],
        "logprob.vocab_shards:boundaries": [[0, 640], [640, 1280]],
        "model.norm:eps": 1e-6,
        "model.qk_norm:present": True,
        "model.mode:attention_dropout": 0.0,
        "model.activation:kind": "swiglu",
    }


# plant -> (readings that must change, digests that must change, whether all pins give the sound scores again)
EXPECTED: Mapping[str, tuple[dict[str, Any], set[str], bool]] = {
    "one_stale_tensor": ({}, {"model.layers.0.mlp.down_proj.weight"}, False),
    "untied_head": ({"model.weights:tied_head": False}, {"tied", "lm_head.weight"}, False),
    "eps": ({"model.norm:eps": 1e-5}, set(), True),
    "qk_norm_skipped": ({"model.qk_norm:present": False}, set(), True),
    "rope_theta": (
        {"attention.rope:theta": 1e5, "attention.provenance:rope_identity": "theta=100000.0,scaling=default,factor=1.0"},
        set(),
        True,
    ),
    "dropout_on": ({"model.mode:attention_dropout": 0.1, "model.mode:hidden_dropout": 0.1, "model.mode:training_flag": True}, set(), False),
    "temperature_not_applied": (
        {
            "logprob.transform_chain:transform_chain": [],
            "logprob.transform_chain:temperature_applied": 1.0,
            "logprob.transform_chain:logprobs_mode": "raw_logprobs",
            "logprob.provenance:transform_chain": [],
        },
        set(),
        True,
    ),
    "pad_rows_nonzero": ({}, set(), True),
    "wrong_gemm_one_layer": ({}, set(), True),
    "lse_offset_log_tp": ({"logprob.reduce:order": "log-sum-exp off by +0.6931"}, set(), True),
    "attention_bf16_accumulate": ({"attention.precision:accum_dtype": "bfloat16"}, set(), True),
    "forward_reduce_bf16_accumulate": ({"gemm.forward_reduce:acc_dtype": "bfloat16"}, set(), True),
}


@pytest.mark.parametrize(("plant", "name", "setup"), PLANTS)
def test_plant_shows_where_it_is_and_its_pin_heals_it(runs: Mapping[str, Any], plant: str, name: str, setup: str) -> None:
    sick, sound = runs["plants"][plant], runs["sound"][name, setup]
    changed, digests, healed = EXPECTED[plant]
    pad_row_init = "logprob.vocab_padding:pad_row_init"
    seen = {
        f"{axis}:{field}": reading.value
        for axis, fields in sick["readings"].items()
        for field, reading in fields.items()
        if reading.value != sound["readings"][axis][field].value
    }
    if plant == "pad_rows_nonzero":
        assert seen.pop(pad_row_init).startswith("up to ")
    if plant == "dropout_on":  # attention's gradient is taken under it, too
        backward = {key: seen.pop(key) for key in list(seen) if key.startswith("attention.backward:")}
        assert backward["attention.backward:deterministic"] is False
        assert seen.pop("attention.layout:segment_boundaries") is None  # a trainer that does not repeat itself shows nothing
    if plant == "temperature_not_applied":  # no entropy that is known here is the live one
        assert seen.pop("logprob.backward:entropy_reduction") is None
    assert seen == changed
    names = sick["digests"].keys() | sound["digests"].keys()
    assert {n for n in names if sick["digests"].get(n) != sound["digests"].get(n)} == digests
    assert torch.equal(scores(sick["pinned"]), scores(sound["pinned"])) is healed


@pytest.mark.parametrize("plant", sorted(set(EXPECTED) - {"forward_reduce_bf16_accumulate"}))
def test_plant_moves_the_native_scores(runs: Mapping[str, Any], plant: str) -> None:
    """Two bfloat16 partials have one sum whatever adds them: that one plant is a promise broken, not a number moved."""
    (name, setup) = next((n, s) for p, n, s in PLANTS if p == plant)
    assert not torch.equal(scores(runs["plants"][plant]["native"]), scores(runs["sound"][name, setup]["native"]))


def test_only_dropout_breaks_the_repeat(runs: Mapping[str, Any]) -> None:
    broken = {p for p, run in runs["plants"].items() if not torch.equal(scores(run["native"]), scores(run["repeat"]))}
    assert broken == {"dropout_on"}


def test_wrong_gemm_stands_out_in_the_local_probe(runs: Mapping[str, Any]) -> None:
    errors = {x.boundary: x.native_vs_fp64_mean / x.fp64_scale for x in runs["plants"]["wrong_gemm_one_layer"]["local"].local}
    assert errors["layers.0.gate_proj"] > 10 * errors["layers.1.gate_proj"]


def test_what_cannot_run_is_refused_by_name(runs: Mapping[str, Any]) -> None:
    assert runs["refused"] == [slug for slug, _ in REFUSED]
    for setup in SETUPS:
        errors = runs["arms"][setup]["errors"]
        assert errors == {slug: slug for slug in errors}
