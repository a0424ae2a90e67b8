"""Time every Triton kernel beside what it replaces, in one run on one GPU: ``python tools/bench_kernels.py [--json FILE] [--only NAME]``.

Medians of repeated launches with a cold L2 (triton.testing.do_bench); for the GEMMs of CUDA-graph replays over several weights,
and beside it "eager", the same by do_bench, where a short kernel waits for the host. The rate is the kernel's own: arithmetic
that the operation needs, or bytes that it must move, over its time. Memory is the peak above what the inputs hold, where it is asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch.nn import functional

from rlmismatch.kernels import gemm, logprob, logprob_backward, logprob_linear, norm, reduce, rope, swiglu

BF16 = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 32, 8, 128, 4096, 12288, 151936  # Qwen3-8B
GEMM_ROWS = (1, 16, 33, 64, 65, 256, 300, 1024, 4096)  # batches seldom fill their blocks


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel on one shape. `work`: floating-point operations or bytes, as `unit` says."""

    kernel: str
    shape: str
    ours: Callable[[], object]
    baseline: str
    theirs: Callable[[], object]
    work: float
    unit: Literal["TFLOP/s", "GB/s"]
    graphed: bool = False
    memory: bool = False  # peak memory of both is measured as well


@dataclass(frozen=True, kw_only=True)
class Timing:
    kernel: str
    shape: str
    ours_us: float
    baseline: str
    baseline_us: float
    rate: float
    unit: str
    ours_eager_us: float | None
    baseline_eager_us: float | None
    ours_peak_mb: float | None = None
    baseline_peak_mb: float | None = None

    @property
    def speed(self) -> float:
        """Time of the baseline over ours: above 1 the kernel is faster."""
        return self.baseline_us / self.ours_us


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def _row_parallel_layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return reduce.fold([gemm.row_partial(x, weight, k_total=x.shape[-1], impl="triton")], impl="triton", out_dtype=BF16)


def _stack_and_sum(partials: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(partials).sum(0).to(BF16)


def _silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _eager_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> list[torch.Tensor]:
    angle = positions[:, None, None] * torch.cat([inv_freq, inv_freq])
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    half = inv_freq.numel()
    return [x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin for x in (q, k)]


def _rotating(op: Callable[[torch.Tensor, torch.Tensor], object], x: torch.Tensor, weights: list[torch.Tensor]) -> Callable[[], object]:
    """`op` on the next weight at every call, so that none is in L2 when its turn comes."""
    turn = itertools.cycle(weights)
    return lambda: op(x, next(turn))


def _weights(columns: int, width: int) -> list[torch.Tensor]:
    return [randn(columns, width) for _ in range(max(1, -(-300_000_000 // (2 * columns * width))))]


def _gemm_baselines() -> list[tuple[str, Callable[[torch.Tensor, torch.Tensor], object]]]:
    """cuBLAS, and the batch-invariant GEMM of each project that is installed; stderr says which are not."""
    baselines: list[tuple[str, Callable[[torch.Tensor, torch.Tensor], object]]] = [("cuBLAS", functional.linear)]
    for name, module in (("vLLM", "vllm.model_executor.layers.batch_invariant"), ("batch_invariant_ops", "batch_invariant_ops")):
        try:
            matmul = importlib.import_module(module).matmul_persistent
        except ImportError as missing:
            print(f"{name}'s batch-invariant GEMM is not timed: {missing}", file=sys.stderr)
        else:
            baselines.append((name, lambda x, w, matmul=matmul: matmul(x, w.T)))
    return baselines


def _gemm() -> Iterator[Case]:
    baselines = _gemm_baselines()
    for width, columns in ((HIDDEN, 6144), (HIDDEN, 2 * FFN), (FFN, HIDDEN), (HIDDEN, VOCAB)):
        weights = _weights(columns, width)
        for rows in GEMM_ROWS:
            x = randn(rows, width)
            for baseline, theirs in baselines:
                yield Case(
                    kernel="gemm.linear",
                    shape=f"{rows} x {width} x {columns}",
                    ours=_rotating(partial(gemm.linear, impl="triton"), x, weights),
                    baseline=baseline,
                    theirs=_rotating(theirs, x, weights),
                    work=2.0 * rows * width * columns,
                    unit="TFLOP/s",
                    graphed=True,
                )


def _row_parallel() -> Iterator[Case]:
    """The TP-invariant sum beside the plain one, which is cuBLAS and gemm.linear."""
    for width in (HIDDEN, FFN):
        weights = _weights(HIDDEN, width)
        for rows in GEMM_ROWS:
            x = randn(rows, width)
            for kernel, ours in (
                ("gemm.row_partial + reduce.fold", _row_parallel_layer),
                ("gemm.row_linear", partial(gemm.row_linear, impl="triton")),
            ):
                for baseline, theirs in (("cuBLAS", functional.linear), ("gemm.linear", partial(gemm.linear, impl="triton"))):
                    yield Case(
                        kernel=kernel,
                        shape=f"{rows} x {width} x {HIDDEN}",
                        ours=_rotating(ours, x, weights),
                        baseline=baseline,
                        theirs=_rotating(theirs, x, weights),
                        work=2.0 * rows * width * HIDDEN,
                        unit="TFLOP/s",
                        graphed=True,
                    )


def _gradients() -> Iterator[Case]:
    tokens, columns = 4096, 6144
    x, dy, weight = randn(tokens, HIDDEN), randn(tokens, columns), randn(columns, HIDDEN)
    ours = (partial(gemm.grad_input, dy, weight, impl="triton"), partial(gemm.grad_weight, dy, x, impl="triton", out_dtype=BF16))
    theirs = (partial(torch.mm, dy, weight), partial(torch.mm, dy.T, x))
    for kernel, our, their in zip(("gemm.grad_input", "gemm.grad_weight"), ours, theirs, strict=True):
        yield Case(
            kernel=kernel,
            shape=f"{tokens} x {HIDDEN} x {columns}",
            ours=our,
            baseline="cuBLAS",
            theirs=their,
            work=2.0 * tokens * HIDDEN * columns,
            unit="TFLOP/s",
            graphed=True,
        )


def _reduce() -> Iterator[Case]:
    for ranks in (2, 8):
        partials = [torch.randn(2048, HIDDEN, device="cuda") for _ in range(ranks)]
        yield Case(
            kernel="reduce.fold",
            shape=f"{ranks} x 2048 x {HIDDEN}",
            ours=partial(reduce.fold, partials, impl="triton", out_dtype=BF16),
            baseline="torch.stack.sum",
            theirs=partial(_stack_and_sum, partials),
            work=2048.0 * HIDDEN * (4 * ranks + 2),
            unit="GB/s",
        )


def _norm() -> Iterator[Case]:
    for rows, width in ((1, HIDDEN), (4096, HIDDEN), (4096 * HEADS, HEAD_DIM)):
        x, weight = randn(rows, width), randn(width)
        yield Case(
            kernel="norm.rms_norm",
            shape=f"{rows} x {width}",
            ours=partial(norm.rms_norm, x, weight, 1e-6, impl="triton"),
            baseline="F.rms_norm",
            theirs=partial(functional.rms_norm, x, (width,), weight, 1e-6),
            work=4.0 * rows * width,
            unit="GB/s",
        )


def _rope() -> Iterator[Case]:
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, HEAD_DIM, 2, device="cuda", dtype=torch.float32) / HEAD_DIM)
    for rows in (1, 4096):
        q, k, positions = randn(rows, HEADS, HEAD_DIM), randn(rows, KV_HEADS, HEAD_DIM), torch.arange(rows, device="cuda")
        yield Case(
            kernel="rope.rotary",
            shape=f"{rows} x {HEADS}/{KV_HEADS} x {HEAD_DIM}",
            ours=partial(rope.rotary, q, k, positions, inv_freq, impl="triton"),
            baseline="eager",
            theirs=partial(_eager_rope, q, k, positions, inv_freq),
            work=4.0 * rows * (HEADS + KV_HEADS) * HEAD_DIM,
            unit="GB/s",
        )


def _swiglu() -> Iterator[Case]:
    for rows in (1, 4096):
        gate_up = randn(rows, 2 * FFN)
        yield Case(
            kernel="swiglu.swiglu_packed",
            shape=f"{rows} x {FFN}",
            ours=partial(swiglu.swiglu_packed, gate_up, impl="triton"),
            baseline="F.silu, mul",
            theirs=partial(_silu_and_mul, gate_up),
            work=6.0 * rows * FFN,
            unit="GB/s",
        )


def _logprob() -> Iterator[Case]:
    for rows in (1, 2048):
        logits, targets = randn(rows, VOCAB), torch.randint(0, VOCAB, (rows,), device="cuda")
        yield Case(
            kernel="logprob.selected",
            shape=f"{rows} x {VOCAB}",
            ours=partial(logprob.selected, logits, targets, vocab_size=VOCAB, impl="triton"),
            baseline="F.cross_entropy",
            theirs=partial(functional.cross_entropy, logits, targets, reduction="none"),
            work=2.0 * rows * VOCAB,
            unit="GB/s",
        )
        yield Case(
            kernel="logprob.log_softmax",
            shape=f"{rows} x {VOCAB}",
            ours=partial(logprob.log_softmax, logits, vocab_size=VOCAB, impl="triton"),
            baseline="log_softmax, float32",
            theirs=partial(functional.log_softmax, logits, dim=-1, dtype=torch.float32),
            work=8.0 * rows * VOCAB,
            unit="GB/s",
        )


def _pair(logits: torch.Tensor, targets: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    """Log-prob and its dlogits, float32."""
    part = logprob.partials(logits, targets, vocab_start=0, vocab_size=VOCAB, impl="triton")
    normaliser = logprob_backward.normaliser([part], vocab_size=VOCAB, impl="triton")
    return logprob_backward.dlogits(logits, targets, grads, normaliser=normaliser, vocab_start=0, vocab_size=VOCAB, impl="triton")


def _cross_entropy_pair(logits: torch.Tensor, targets: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    leaf = logits.requires_grad_()
    (grad,) = torch.autograd.grad(functional.cross_entropy(leaf, targets, reduction="none"), leaf, grads.to(BF16))
    return grad


def _linear_pair(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, grads: torch.Tensor) -> logprob_linear.Gradients:
    """Hidden rows to log-prob and back, a block of the logits alive."""
    part = logprob_linear.partials(hidden, weight, targets, vocab_start=0, vocab_size=VOCAB, impl="triton")
    normaliser = logprob_backward.normaliser([part], vocab_size=VOCAB, impl="triton")
    return logprob_linear.backward(hidden, weight, targets, grads, normaliser=normaliser, vocab_start=0, vocab_size=VOCAB, impl="triton")


def _linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), targets)


LinearLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # mean loss of hidden rows, head, targets


def _forward_and_backward(loss: LinearLoss, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> object:
    """Of the mean loss: the public fused kernels take no gradient a row."""
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    return torch.autograd.grad(loss(x, w, targets), (x, w))


def _linear_baselines() -> list[tuple[str, LinearLoss]]:
    """Head and cross entropy in one, of torch and of each project that is installed; stderr says which are not."""
    baselines: list[tuple[str, LinearLoss]] = [("F.linear, F.cross_entropy", _linear_cross_entropy)]
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as missing:
        print(f"Liger's fused linear cross entropy is not timed: {missing}", file=sys.stderr)
    else:
        liger = LigerFusedLinearCrossEntropyLoss()
        baselines.append(("Liger", lambda x, w, y: liger(w, x, y)))
    try:
        from cut_cross_entropy import linear_cross_entropy
    except ImportError as missing:
        print(f"cut-cross-entropy is not timed: {missing}", file=sys.stderr)
    else:
        baselines.append(("cut-cross-entropy", linear_cross_entropy))
        baselines.append(("cut-cross-entropy, exact", partial(linear_cross_entropy, filter_eps=None)))
    return baselines


def _logprob_backward() -> Iterator[Case]:
    rows, width = 2048, HIDDEN
    targets, grads = torch.randint(0, VOCAB, (rows,), device="cuda"), torch.linspace(-1.5, 2.0, rows, device="cuda")
    logits = randn(rows, VOCAB)
    yield Case(
        kernel="logprob_backward.entropy",
        shape=f"{rows} x {VOCAB}",
        ours=partial(logprob_backward.entropy, logits, vocab_size=VOCAB, impl="triton"),
        baseline="log_softmax, float32",
        theirs=partial(functional.log_softmax, logits, dim=-1, dtype=torch.float32),
        work=2.0 * rows * VOCAB,
        unit="GB/s",
    )
    yield Case(
        kernel="logprob forward + dlogits",
        shape=f"{rows} x {VOCAB}",
        ours=partial(_pair, logits, targets, grads),
        baseline="F.cross_entropy",
        theirs=partial(_cross_entropy_pair, logits.clone(), targets, grads),
        work=8.0 * rows * VOCAB,  # read twice in bfloat16, written once in float32
        unit="GB/s",
        memory=True,
    )
    del logits
    hidden, weight = randn(rows, width), randn(VOCAB, width) * width**-0.5
    leaves = hidden.clone(), weight.clone()
    for baseline, theirs in _linear_baselines():
        yield Case(
            kernel="logprob_linear forward + backward",
            shape=f"{rows} x {width} x {VOCAB}",
            ours=partial(_linear_pair, hidden, weight, targets, grads),
            baseline=baseline,
            theirs=partial(_forward_and_backward, theirs, *leaves, targets),
            work=8.0 * rows * width * VOCAB,  # logits twice, dhidden, dweight
            unit="TFLOP/s",
            memory=True,
        )


SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "gemm": _gemm,
    "row_parallel": _row_parallel,
    "gradients": _gradients,
    "reduce": _reduce,
    "norm": _norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "logprob": _logprob,
    "logprob_backward": _logprob_backward,
}


def measure(case: Case) -> Timing:
    """Median microseconds of both, and the kernel's rate."""
    eager = [_eager_us(f) for f in (case.ours, case.theirs)]
    device = [_graph_us(f, longest_us=t) for f, t in zip((case.ours, case.theirs), eager, strict=True)] if case.graphed else eager
    return Timing(
        kernel=case.kernel,
        shape=case.shape,
        ours_us=device[0],
        baseline=case.baseline,
        baseline_us=device[1],
        rate=case.work / device[0] / (1e6 if case.unit == "TFLOP/s" else 1e3),
        unit=case.unit,
        ours_eager_us=eager[0] if case.graphed else None,
        baseline_eager_us=eager[1] if case.graphed else None,
        ours_peak_mb=_peak_mb(case.ours) if case.memory else None,
        baseline_peak_mb=_peak_mb(case.theirs) if case.memory else None,
    )


def _peak_mb(run: Callable[[], object]) -> float:
    """Largest memory in use above what was in use before, MB; the result included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def _eager_us(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=25, rep=200, quantiles=[0.5])) * 1e3


def _graph_us(run: Callable[[], object], *, longest_us: float) -> float:
    """Median over replays of one graph of as many calls as make about 5 ms."""
    calls = max(2, min(100, int(5000 / longest_us)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[1:])


def _line(t: Timing) -> str:
    line = f"{t.kernel:32}{t.shape:40}{t.ours_us:12.1f}{t.baseline_us:12.1f}  {t.baseline:22}{t.speed:8.2f}{t.rate:10.1f} {t.unit}"
    if t.ours_eager_us is not None:
        line += f"  eager {t.ours_eager_us:.1f} and {t.baseline_eager_us:.1f}"
    if t.ours_peak_mb is not None:
        line += f"  peak {t.ours_peak_mb:.0f} and {t.baseline_peak_mb:.0f} MB"
    return line


def main(suites: Mapping[str, Callable[[], Iterator[Case]]]) -> None:
    """Measure what the command line picks of `suites`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the timings there as well")
    parser.add_argument("--only", choices=sorted(suites), action="append", help="measure this suite alone; may be repeated")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the benchmark needs a CUDA GPU")
    print(f"{'kernel':32}{'shape':40}{'ours, us':>12}{'theirs, us':>12}  {'baseline':22}{'speed':>8}{'rate':>10}")
    timings = []
    for name in args.only or suites:
        for case in suites[name]():
            timings.append(measure(case))
            print(_line(timings[-1]), flush=True)
    if args.json:
        device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        args.json.write_text(json.dumps({"device": device, "timings": [dataclasses.asdict(t) for t in timings]}, indent=1) + "\n")


if __name__ == "__main__":
    main(SUITES)
