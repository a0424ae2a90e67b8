"""The real rollout. Every engine of this file runs once, at TP1 and at TP2 (vllm_runs.py); the tests read what they wrote.

Chain: in float32 the scores of every path equal the float64 oracle's on every architecture -> weights, RoPE, cache and positions are read
right -> with every op pinned prefill, chunked prefill and decode give one score bit for bit, at TP1 and at TP2, in any batch. Native bits
return after every arm, so arms may be compared with each other.
A little over 400 lines, because every test reads the runs of this one file, which start each engine once.
"""

from __future__ import annotations

import dataclasses
import importlib.util
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
from rlmismatch.checkpoint import Checkpoint
from rlmismatch.contract import Evidence, Reading
from rlmismatch.engines import vllm_readings_gemm
from rlmismatch.engines.protocol import NOT_PACKED, ArmResult
from rlmismatch.pins.spec import PINS, boundary_names
from tests.engines import vllm_runs
from tests.engines.vllm_runs import FLOAT32, MANY, NARROW_HEADS, PATHS, PLANTS, REFUSED, SEQUENCES, TINY

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
TPS = (1, 2)
LAYERS = 2
# float32 has 24 bits; logits reach 24 in these checkpoints, and 64 columns and two layers add up: a few ULP of 24.
FLOAT32_NATS = 4e-5
Runs = Mapping[int, Mapping[str, Any]]
_BIAS = VARIANTS["variant-qwen2-bias"]
RECIPES = {
    **FIXTURES,
    **VARIANTS,
    # vLLM's CPU attention has no heads of 8.
    "qwen2-bias-wide-heads": dataclasses.replace(_BIAS, config=dataclasses.replace(_BIAS.config, num_heads=2, num_kv_heads=1, head_dim=32)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rollouts")
    for name in {NARROW_HEADS, *(name for names in FLOAT32.values() for name in names)}:
        (root / name).mkdir()
        write(RECIPES[name], root / name)
    return root


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    results = {}
    for tp in TPS:
        command = [sys.executable, vllm_runs.__file__, str(folder), str(tp)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        results[tp] = torch.load(folder / f"results.{tp}.pt", weights_only=False)
    return results


def scores(result: ArmResult, path: str = "prefill") -> torch.Tensor:
    """All sequences' scores, one after the other."""
    by_id = result.scores[path]
    return torch.cat([by_id[s.id] for s in (TINY if "tiny" in by_id else SEQUENCES)])


def value(readings: Mapping[str, Mapping[str, Reading]], key: str) -> Any:
    axis, field = key.split(":")
    return readings[axis][field].value


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tp", TPS)
def test_scores_are_those_of_the_response_tokens(runs: Runs, tp: int, path: str) -> None:
    by_id = runs[tp]["arms"]["native"].scores[path]
    assert {s.id: len(s.response_ids) for s in SEQUENCES} == {name: len(x) for name, x in by_id.items()}
    assert all(x.dtype == torch.float64 and bool((x < 0).all()) for x in by_id.values())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("tp", "name"), [(tp, name) for tp in TPS for name in FLOAT32[tp]])
def test_float32_agrees_with_the_oracle(runs: Runs, tp: int, name: str, path: str) -> None:
    oracle = scores(runs[tp]["oracle"][name], "oracle")
    assert float((scores(runs[tp]["float32"][name], path) - oracle).abs().max()) <= FLOAT32_NATS


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tp", TPS)
def test_all_pinned_is_one_number_in_every_form_and_at_every_tp(runs: Runs, tp: int, path: str) -> None:
    assert torch.equal(scores(runs[tp]["arms"]["pinned"], path), scores(runs[1]["arms"]["pinned"]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tp", TPS)
def test_all_pinned_by_triton_is_one_number_in_every_form_and_at_every_tp(runs: Runs, tp: int, path: str) -> None:
    assert torch.equal(scores(runs[tp]["triton"], path), scores(runs[1]["triton"]))


def test_memory_that_ranks_share_has_no_name_that_could_be_left_behind(runs: Runs) -> None:
    segments = runs[2]["shared memory"]
    assert len([name for name in segments if "-tp:" in name]) == 2  # of the collectives, one a rank
    assert any("/psm_" in name for name in segments)  # of broadcasts
    assert [name for name in segments if not name.endswith("(deleted)")] == []


@pytest.mark.parametrize("tp", TPS)
def test_pinned_bits_do_not_depend_on_the_batch(runs: Runs, tp: int) -> None:
    arms = runs[tp]["arms"]
    assert torch.equal(scores(arms["pinned in another order"], "decode"), scores(arms["pinned"], "decode"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tp", TPS)
def test_attention_over_packed_keys_gives_the_same_bits(runs: Runs, tp: int, path: str) -> None:
    arms = runs[tp]["arms"]
    assert torch.equal(scores(arms["pinned with rows of its own"], path), scores(arms["pinned"], path))


def test_native_differs_over_tp_and_from_the_pins(runs: Runs) -> None:
    one, two = runs[1]["arms"], runs[2]["arms"]
    assert not torch.equal(scores(one["native"]), scores(two["native"]))
    assert all(not torch.equal(scores(arms["native"]), scores(arms["pinned"])) for arms in (one, two))


@pytest.mark.parametrize("tp", TPS)
def test_native_bits_return_after_every_arm_and_after_errors(runs: Runs, tp: int) -> None:
    arms = runs[tp]["arms"]
    assert arms["errors inside an arm"] == ["half way"] * len(PATHS)
    assert all(torch.equal(scores(arms["native again"], path), scores(arms["native"], path)) for path in PATHS)
    assert arms["attributes left behind"] == []


@pytest.mark.parametrize("tp", TPS)
def test_every_requested_pin_counts_its_calls(runs: Runs, tp: int) -> None:
    arms, n = runs[tp]["arms"], len(SEQUENCES)
    expected = {
        "norm": n * (2 * LAYERS + 1),
        "qk_norm": n * 2 * LAYERS,
        "gemm": n * 4 * LAYERS,
        "forward_reduce": n * 2 * LAYERS,
        "rope": n * LAYERS,
        "attention": n * LAYERS,
        "activation": n * LAYERS,
        "head_gemm": n * 2,  # the prompt's rows, and the row of the token that vLLM always samples
        "logprob": n,
    }
    assert {pin: arms[f"only {pin}"].calls[pin] for pin in PINS} == expected
    assert set(arms["pinned"].calls) == set(PINS)
    assert arms["pinned"].notes == []
    assert arms["native"].calls == arms["local"].calls == {}


@pytest.mark.parametrize("tp", TPS)
def test_decoding_given_ids_repeats_what_was_recorded(runs: Runs, tp: int) -> None:
    arms = runs[tp]["arms"]
    for generated, recorded in (("generated", "recorded"), ("many", "recorded many"), ("few", "recorded few")):
        for sequence in arms[generated]:
            found = arms[recorded].scores["decode"][sequence.id]
            assert torch.equal(found, torch.tensor(sequence.recorded_logprobs, dtype=torch.float64))


@pytest.mark.parametrize("tp", TPS)
def test_a_prompt_that_no_step_holds_beside_others_waits_and_is_not_cut(runs: Runs, tp: int) -> None:
    """A CPU's generator cannot be set back behind a piece of a prompt."""
    arms = runs[tp]["arms"]
    assert arms["steps of many"] == [8 * 250, 2 * 250 + 8, 2]
    assert arms["steps of few"] == [8 * 250, 8]
    assert [s.prompt_ids for s in arms["many"]] == [p.token_ids for p in MANY]


@pytest.mark.parametrize("tp", TPS)
def test_sequences_are_packed_as_far_as_steps_hold_two_whole_ones(runs: Runs, tp: int) -> None:
    arms = runs[tp]["arms"]
    lengths = [len(s.token_ids) for s in SEQUENCES[:5]]
    assert arms["packed in one step, steps"] == [sum(lengths)]
    assert arms["packed in two steps, steps"] == [sum(lengths[:4]), lengths[4]]
    for name in ("in one step", "in two steps"):
        found = arms[f"packed {name}"]
        assert found.notes == []
        for s in SEQUENCES[:5]:
            assert torch.equal(found.scores["prefill_packed"][s.id], arms["pinned"].scores["prefill"][s.id])


@pytest.mark.parametrize("tp", TPS)
def test_what_cannot_be_packed_is_left_out_and_says_why(runs: Runs, tp: int) -> None:
    arms = runs[tp]["arms"]
    for name, why in (
        ("packed apart", "a step takes 16 tokens, and no two sequences in a row have fewer than 17"),
        ("packed alone", "one sequence has no other to share a step with"),
    ):
        assert arms[name].notes[0] == NOT_PACKED + why
        assert arms[name].scores == {}
        assert arms[f"{name}, steps"] == []
    assert arms["errors"]["rollout-steps-differ"] == "rollout-steps-differ"


@pytest.mark.parametrize("tp", TPS)
def test_generation_follows_the_seed_and_differs_between_equal_prompts(runs: Runs, tp: int) -> None:
    first, second = runs[tp]["arms"]["generated"]
    assert runs[tp]["arms"]["generated again"] == (first, second)
    assert first.prompt_ids == second.prompt_ids
    assert first.response_ids != second.response_ids
    assert {len(s.response_ids) for s in (first, second)} == {6}
    assert all(0 <= t < 1100 for s in (first, second) for t in s.response_ids)


@pytest.mark.parametrize("tp", TPS)
def test_local_probe_looks_on_without_touching_the_result(runs: Runs, tp: int) -> None:
    arms = runs[tp]["arms"]
    assert all(torch.equal(scores(arms["local"], path), scores(arms["native"], path)) for path in PATHS)
    assert all(torch.equal(scores(arms["local pinned"], path), scores(arms["pinned"], path)) for path in PATHS)


@pytest.mark.parametrize("tp", TPS)
def test_local_probe_judges_every_operation_against_float64(runs: Runs, tp: int) -> None:
    errors = {(e.boundary, e.pin): e for e in runs[tp]["arms"]["local pinned"].local}
    sums = {key for key in errors if key[1] == "forward_reduce"}
    assert {boundary for boundary, _ in errors} == set(boundary_names(LAYERS))
    assert len(sums) == (2 * LAYERS if tp > 1 else 0)
    tokens = sum(len(s.token_ids) for s in SEQUENCES)
    for error in errors.values():
        assert error.count > 0
        # One rounding to bfloat16 is 2^-9 of an element, and elements reach some ten times the mean; the log-prob is float32.
        assert error.pin_vs_fp64_mean <= 2**-8 * error.fp64_scale, error
        assert error.native_vs_fp64_mean <= 2**-7 * error.fp64_scale, error
    # prefill, chunked prefill, and decode, which never feeds the last token back.
    assert errors["layers.0.q_proj", "gemm"].rows == 3 * tokens - len(SEQUENCES)
    assert errors["layers.0.q_proj", "gemm"].count == (3 * tokens - len(SEQUENCES)) * 8 * 32


def test_boundaries_are_whole_and_canonical(runs: Runs) -> None:
    tokens = len(SEQUENCES[0].token_ids)
    heads, kv_heads = (tokens, 8, 32), (tokens, 2, 32)
    shapes = {
        "input_norm": (tokens, 64),
        "q_proj": heads,
        "k_proj": kv_heads,
        "v_proj": kv_heads,
        "q_norm": heads,
        "k_norm": kv_heads,
        "q_rope": heads,
        "k_rope": kv_heads,
        "attention": heads,
        "o_proj": (tokens, 64),
        "post_attention_norm": (tokens, 64),
        "gate_proj": (tokens, 128),
        "up_proj": (tokens, 128),
        "activation": (tokens, 128),
        "down_proj": (tokens, 64),
        "final_norm": (tokens, 64),
        "lm_head": (tokens, 1100),
        "logprob": (tokens - 1,),
    }
    for tp in TPS:
        kept = runs[tp]["arms"]["boundary"].boundaries
        assert {name: tuple(x.shape) for name, x in kept.items()} == {n: shapes[n.rsplit(".", 1)[-1]] for n in boundary_names(LAYERS)}
        assert {x.dtype for name, x in kept.items() if name != "logprob"} == {torch.bfloat16}
    # Equal inputs: an operation that no rank shares is the same native operation at both TP sizes.
    one, two = (runs[tp]["arms"]["boundary"].boundaries for tp in TPS)
    assert all(torch.equal(one[name], two[name]) for name in one if name.endswith("norm"))


@pytest.mark.parametrize("tp", TPS)
def test_reduce_knob_moves_only_the_last_bits_and_says_what_ran(runs: Runs, tp: int) -> None:
    arms = runs[tp]["arms"]
    for asked in ("allreduce_partials", "allgather_partials_fixed_merge", "allgather_logits"):
        result = arms[f"reduce {asked}"]
        assert (result.knobs["logprob.reduce"]["actual"], result.knobs["logprob.reduce"]["status"]) == (asked, "applied")
        assert float((scores(result) - scores(arms["native"])).abs().max()) <= 4e-6
    assert torch.equal(scores(arms["reduce allgather_logits"]), scores(arms["native"]))
    assert torch.equal(scores(arms["reduce allgather_partials_fixed_merge"]), scores(arms["only logprob"]))
    assert arms["reduce guess"].knobs["logprob.reduce"]["status"] == "unsupported"
    assert torch.equal(scores(arms["reduce guess"]), scores(arms["native"]))
    assert arms["pinned against the knob"].knobs["logprob.reduce"]["status"] == "fell_back"
    assert torch.equal(scores(arms["pinned against the knob"]), scores(arms["pinned"]))


@pytest.mark.parametrize("tp", TPS)
def test_live_weights_are_the_checkpoint_s(runs: Runs, folder: Path, tp: int) -> None:
    digests = dict(runs[tp]["arms"]["digests"])
    assert digests.pop("tied") == "false"
    assert digests == Checkpoint.open(folder / "tiny-qwen3").digests()
    for name in FLOAT32[tp]:
        live = dict(runs[tp]["float32 digests"][name])
        checkpoint = Checkpoint.open(folder / name)
        assert live.pop("tied") == ("true" if checkpoint.config.tied else "false")
        assert live == checkpoint.digests(dtype="float32")


@pytest.mark.parametrize("tp", TPS)
def test_errors_say_what_is_wrong(runs: Runs, tp: int) -> None:
    assert {slug: slug for slug in runs[tp]["arms"]["errors"]} == runs[tp]["arms"]["errors"]


def test_what_can_not_start_is_refused(runs: Runs) -> None:
    assert runs[1]["refused"] == [slug for slug, _ in REFUSED]
    assert runs[1]["narrow heads"] == "attention-head-dim-unsupported"


@pytest.mark.parametrize("tp", TPS)
def test_readings_are_those_of_the_model(runs: Runs, tp: int) -> None:
    readings = runs[tp]["arms"]["readings"]
    expected = {
        "gemm.runtime_flags:compute_dtype": "bfloat16",
        "gemm.runtime_flags:tensor_parallel_size": tp,
        "attention.provenance:num_query_heads": 8,
        "attention.provenance:num_kv_heads": 2,
        "attention.provenance:head_dim": 32,
        "attention.provenance:mask": "causal",
        "attention.provenance:softmax_scale": float(torch.tensor(32**-0.5, dtype=torch.float32)),
        "attention.rope:theta": 1e6,
        "attention.rope:scaling": "default",
        "attention.layout:tp_head_ownership": [[0, 8]] if tp == 1 else [[0, 4], [4, 8]],
        "attention.paged_kv:block_size": 32,
        "logprob.vocab_padding:vocab_padding_policy": "mask",
        "logprob.vocab_padding:padded_vocab_size": 1152,
        "logprob.vocab_padding:num_pad_rows": 52,
        "logprob.vocab_padding:pad_row_init": "zeros",
        "logprob.vocab_shards:boundaries": [[0, 1152]] if tp == 1 else [[0, 576], [576, 1152]],
        "logprob.transform_chain:transform_chain": [],
        "logprob.precision:head_dtype": "bfloat16",
        "model.weights:tied_head": False,
        "model.norm:eps": 1e-6,
        "model.qk_norm:present": True,
        "model.mode:hidden_dropout": 0.0,
        "model.compile:mode": "eager",
    }
    assert {key: value(readings, key) for key in expected} == expected


@pytest.mark.parametrize("tp", TPS)
def test_nothing_the_contract_compares_is_unknown(runs: Runs, tp: int) -> None:
    unknown = {
        f"{a}:{f}" for a, fields in runs[tp]["arms"]["readings"].items() for f, r in fields.items() if r.evidence is Evidence.UNKNOWN
    }
    assert unknown == {"logprob.head_gemm:tile_split_k"}  # recorded only
    assert all(r.source for fields in runs[tp]["arms"]["readings"].values() for r in fields.values())


@pytest.mark.parametrize("tp", TPS)
def test_splits_that_the_kernel_chooses_are_not_called_one(runs: Runs, tp: int) -> None:
    splits = runs[tp]["arms"]["readings"]["attention.merge_order"]["split_kv_policy"]
    assert (splits.value, splits.evidence) == ("auto", Evidence.READ)


@pytest.mark.parametrize("tp", TPS)
def test_no_other_attention_backend_is_tried_unasked(runs: Runs, tp: int) -> None:
    assert runs[tp]["arms"]["provenance"]["attention_forced"] == {}


def test_provenance_names_the_all_reduce_that_ran(runs: Runs) -> None:
    one, two = (runs[tp]["arms"]["provenance"] for tp in TPS)
    assert one["all_reduces"] == {}
    (calls,) = two["all_reduces"].values()
    # One after the embedding and two a layer; a step of one decoded token sends 64 bfloat16.
    assert sum(calls.values()) % (2 * LAYERS + 1) == 0
    assert calls["128"] > 0
    assert two["runner"].startswith("vllm.v1.worker.")
    assert two["eager"] is True


# What each plant must change in the readings ("" : nothing, another gate finds it), and whether pins heal it.
SHOWS: Mapping[str, tuple[str, Any, bool]] = {
    "one_stale_tensor": ("", None, False),
    "untied_head": ("model.weights:tied_head", False, False),
    "eps": ("model.norm:eps", 1e-6 * 10, True),
    "qk_norm_skipped": ("model.qk_norm:present", False, True),
    "rope_theta": ("attention.rope:theta", 1e5, True),
    "temperature_not_applied": ("logprob.transform_chain:transform_chain", [], True),
    "wrong_gemm_one_layer": ("", None, True),
    "attention_bf16_accumulate": ("attention.precision:accum_dtype", "bfloat16", True),
    "lse_offset_log_tp": ("logprob.reduce:order", "log-sum-exp off by +0.6931", True),
    "forward_reduce_bf16_accumulate": ("gemm.forward_reduce:acc_dtype", "bfloat16", True),
}
CASES = [(tp, plant, name) for tp in TPS for plant, name in PLANTS[tp]]


@pytest.mark.parametrize(("tp", "plant", "name"), CASES)
def test_a_plant_shows_where_it_must_and_nowhere_else(runs: Runs, tp: int, plant: str, name: str) -> None:
    key, planted, _ = SHOWS[plant]
    wrong, sound = runs[tp]["plants"][plant]["readings"], runs[tp]["sound"][name]["readings"]
    changed = {
        f"{axis}:{field}"
        for axis, fields in wrong.items()
        for field, reading in fields.items()
        if reading.value != sound[axis][field].value and axis != "rollout.all_reduce_backend"
    }
    mirrors = {
        "attention.provenance:rope_identity",
        "logprob.provenance:transform_chain",
        "logprob.transform_chain:temperature_applied",
        "logprob.transform_chain:logprobs_mode",
        "attention.paged_kv:page_table",  # physical pages, which differ from one request to the next
        "logprob.provenance:actual_backend",  # told by the bits of what ran, which a fault in the log-softmax changes
    }
    assert changed - mirrors == ({key} if key else set())
    if key:
        assert value(wrong, key) == planted


@pytest.mark.parametrize(("tp", "plant", "name"), CASES)
def test_a_plant_changes_native_scores_and_a_pin_of_its_operation_heals_it(runs: Runs, tp: int, plant: str, name: str) -> None:
    wrong, sound = runs[tp]["plants"][plant], runs[tp]["sound"][name]
    heals = SHOWS[plant][2]
    same = torch.equal(scores(wrong["native"]), scores(sound["native"]))
    # Two partials that are bfloat16 already have one sum, whatever dtype it runs in: there only the declaration differs.
    assert same == (plant == "forward_reduce_bf16_accumulate")
    assert torch.equal(scores(wrong["repeat"]), scores(wrong["native"]))
    assert torch.equal(scores(wrong["pinned"]), scores(sound["pinned"])) == heals


@pytest.mark.parametrize(("tp", "plant", "name"), CASES)
def test_only_a_changed_weight_changes_a_digest(runs: Runs, tp: int, plant: str, name: str) -> None:
    wrong, sound = runs[tp]["plants"][plant]["digests"], runs[tp]["sound"][name]["digests"]
    changed = {tensor for tensor in wrong.keys() | sound.keys() if wrong.get(tensor) != sound.get(tensor)}
    assert changed == {
        "one_stale_tensor": {"model.layers.0.post_attention_layernorm.weight"},
        "untied_head": {"lm_head.weight", "tied"},
    }.get(plant, set())


def test_products_of_the_batch_invariant_mode_go_through_what_is_hooked() -> None:
    """The mode itself needs a GPU; the functions that the hook looks for must be this vLLM's."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    files = [Path(spec.origin).parents[1] / f"{name.replace('.', '/')}.py" for name in vllm_readings_gemm.BATCH_INVARIANT]
    (source,) = [file.read_text() for file in files if file.is_file()]
    assert any(f"def {name}(" in source for name in vllm_readings_gemm.OWN_PRODUCTS)
