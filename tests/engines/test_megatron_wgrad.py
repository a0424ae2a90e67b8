"""Who adds dW inside the GEMM on a GPU without Apex: Transformer Engine where it loads, nobody where it does not."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlmismatch.engines import megatron_wgrad

CUDA = torch.device("cuda")
# As much of its GEMM as the call needs: out [N, K] += B [T, N]^T A [T, K] under layout NT.
GEMM = """
def general_gemm(A, B, *, out_dtype, layout, out, accumulate, grad):
    assert (layout, accumulate, grad, out_dtype) == ("NT", True, True, out.dtype)
    out += (B.float().T @ A.float()).to(out.dtype)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the code of transformer_engine.pytorch.cpp_extensions goes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that neither Apex nor Transformer Engine is here
        importlib.import_module("megatron.core.tensor_parallel.layers")  # before it sees one, and takes it for whole
    folder = tmp_path / "transformer_engine" / "pytorch"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        (place / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    yield folder / "cpp_extensions.py"
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def test_its_gemm_is_called_as_its_own_layers_call_it(package: Path) -> None:
    package.write_text(GEMM)
    assert megatron_wgrad.available(CUDA).startswith("Transformer Engine's GEMM")
    x_TK, dy_TN, main_NK = torch.ones(5, 3), torch.full((5, 2), 2.0), torch.ones(2, 3)
    megatron_wgrad.kernel(CUDA).wgrad_gemm_accum_fp32(x_TK, dy_TN, main_NK)
    assert torch.equal(main_NK, torch.full((2, 3), 11.0))


@pytest.mark.parametrize("error", ["OSError('libcudnn: undefined symbol')", "ImportError('no')", "RuntimeError('other build')"])
def test_one_that_does_not_load_is_nobody(package: Path, error: str) -> None:
    package.write_text(f"raise {error}")
    assert megatron_wgrad.available(CUDA) == ""
