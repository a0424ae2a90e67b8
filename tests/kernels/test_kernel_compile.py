"""The kernels compile for the GPU they are meant for, within its limits and without what would break their promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_SHARED_BYTES = 227 * 1024  # of one program, on sm_90
_KERNELS = {
    "_descriptor_kernel",
    "_pointer_kernel",
    "_chunks_hopper_kernel",
    "_one_sum_hopper_kernel",
    "_join_kernel",
    "_sum_kernel",
    "_rms_norm_kernel",
    "_rotary_kernel",
    "_swiglu_kernel",
    "_tiles_kernel",
    "_gather_kernel",
    "_fold_kernel",
    "_log_softmax_kernel",
    "_pick_kernel",
    "_rows_kernel",
    "_dlogits_kernel",
    "_entropy_tiles_kernel",
    "_fold_entropy_kernel",
    "_attention_kernel",
    "_attention_hopper_kernel",
    "_attention_merge_kernel",
    "_delta_kernel",
    "_dkdv_kernel",
    "_dq_kernel",
    "_gradients_hopper_kernel",
    "_round_dq_kernel",
    "_dsinks_kernel",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, str]]:
    """(kernel, bytes of shared memory, PTX) of every specialisation."""
    root = Path(__file__).parents[2]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_sm90"], env=env, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [(k["kernel"], k["shared_bytes"], k["ptx"]) for k in map(json.loads, done.stdout.splitlines())]


def test_every_kernel_compiles_and_fits(compiled: list[tuple[str, int, str]]) -> None:
    assert {name for name, _, _ in compiled} == _KERNELS
    assert {name: shared for name, shared, _ in compiled if shared > _SHARED_BYTES} == {}


def test_no_atomics_no_tf32_no_approximate_division(compiled: list[tuple[str, int, str]]) -> None:
    """An atomic has no order; TF32 drops 13 bits; div.full, rcp, sqrt and rsqrt in .approx form are off by an ulp or two."""
    atomics = r"\b(atom|red)\.(global|shared|async|relaxed)|cp\.reduce"
    banned = re.compile(rf"{atomics}|tf32|div\.(full|approx)|(rcp|sqrt|rsqrt|lg2|sin|cos)\.approx")
    found = {name: {m.group() for m in banned.finditer(ptx)} for name, _, ptx in compiled if banned.search(ptx)}
    # Its atomics have an order: an integer ticket, and additions that take turns.
    assert found.pop("_gradients_hopper_kernel") == {"atom.global", "cp.reduce"}
    assert found == {}


def test_additions_that_take_turns_wait_and_pass_on(compiled: list[tuple[str, int, str]]) -> None:
    """Before the one place that adds: an acquire; behind it, once the addition is complete and not only read: a release."""
    for ptx in (ptx for name, _, ptx in compiled if name == "_gradients_hopper_kernel"):
        assert ptx.index("ld.acquire.gpu") < ptx.index("cp.reduce") < ptx.index("cp.async.bulk.wait_group 0") < ptx.index("st.release.gpu")
        assert "red.global" not in ptx
        assert not re.search(r"atom\.global\.\S*f(16|32|64)", ptx)


def test_matrix_products_use_the_tensor_cores(compiled: list[tuple[str, int, str]]) -> None:
    on_tensor_cores = [name for name, _, ptx in compiled if "mma.sync" in ptx or "wgmma.mma_async" in ptx]
    assert on_tensor_cores.count("_descriptor_kernel") == 16
    assert on_tensor_cores.count("_chunks_hopper_kernel") == 3
    assert on_tensor_cores.count("_one_sum_hopper_kernel") == 5
    assert on_tensor_cores.count("_pointer_kernel") == 3
    assert on_tensor_cores.count("_attention_kernel") == 5
    assert on_tensor_cores.count("_attention_hopper_kernel") == 3
    assert on_tensor_cores.count("_gradients_hopper_kernel") == 2
    assert {"_dkdv_kernel", "_dq_kernel"} <= set(on_tensor_cores)
