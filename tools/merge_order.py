"""Does the collective's algorithm move a sum? The same shards and partials, summed under every NCCL_ALGO x NCCL_PROTO.

    python tools/merge_order.py --nproc 4               on GPUs; each setting in processes of its own, because NCCL reads it once
    python tools/merge_order.py --nproc 4 --share-gpu   all ranks on one GPU, over sockets
    python tools/merge_order.py --nproc 4 --cpu         gloo, which has one algorithm: proves the script, not the claim

Prints one JSON object a setting: digests of the log-probs by all-reduced partials and by the fixed merge, of row-parallel bf16 sums by
all-reduce and in rank order, at decode and at training row counts, and the largest error of each against float64. Exit 0 if every
setting ran, each fixed way gave one set of bits in all of them and every run of a setting repeated itself, 1 if not. At most two ranks
make one addition, which has no order: no digest can move there.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from rlmismatch.pins.collectives import TpGroup

# All-gather has no tree, and NCCL refuses a collective that is left without an algorithm: the tree is asked for the all-reduce alone.
_ALGOS, _PROTOS = ("Ring", "Ring;AllReduce:Tree"), ("LL", "LL128", "Simple")
_ROWS, _WIDTH, _REPEATS = 256, 8192, 3  # rows, columns a rank, runs within one process
_LIMIT_S = 120  # for one setting
_SUMS = {"decode": (4, 1024), "training": (2048, 1024)}  # rows and columns of row-parallel partials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, required=True, help="ranks")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cpu", action="store_true", help="gloo on the CPU")
    where.add_argument("--share-gpu", action="store_true", help="every rank on the first GPU, a host each to NCCL")
    options = parser.parse_args()
    settings: list[dict[str, str]] = (
        [{}] if options.cpu else [{"NCCL_ALGO": a, "NCCL_PROTO": p} for a, p in itertools.product(_ALGOS, _PROTOS)]
    )
    results = []
    for setting in settings:
        results.append(_run(options.nproc, setting, cpu=options.cpu, share=options.share_gpu))
        print(json.dumps(results[-1]), flush=True)  # before the next one, which may hang
    ran = [r["sums"] for r in results if "error" not in r]
    print(f"{len(ran)} of {len(results)} settings ran")
    bits = {way: len({sums[way]["digest"] for sums in ran}) for way in (ran[0] if ran else ())}
    for way, sets in bits.items():
        print(f"{way}: {sets} {'set' if sets == 1 else 'sets'} of bits")
    fixed = all(sets == 1 for way, sets in bits.items() if way.startswith("fixed"))
    return 0 if ran and len(ran) == len(results) and fixed and all(way["repeats"] for sums in ran for way in sums.values()) else 1


def _run(nproc: int, setting: dict[str, str], *, cpu: bool, share: bool) -> dict[str, Any]:
    """One setting in fresh processes; an ``error`` where NCCL refuses it (an algorithm without that protocol)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), __file__, "--worker"]
    env = {**os.environ, **setting, "MERGE_ORDER_CPU": "1" if cpu else "", "MERGE_ORDER_SHARE": "1" if share else ""}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        stdout, stderr = process.communicate(timeout=_LIMIT_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return {**setting, "error": f"no answer in {_LIMIT_S} s"}
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return {**setting, "error": _reason(stderr)}
    return {**setting, **json.loads(lines[-1])}


def _reason(stderr: str) -> str:
    """The last line that names an error, but for what torchrun says of its ranks."""
    named = [line.strip() for line in stderr.splitlines() if re.search(r"\b\w*Error: |^Error : |NCCL WARN|invalid usage", line)]
    named = [line for line in named if "ChildFailedError" not in line]
    return named[-1] if named else "no output"


def _worker() -> None:
    import torch
    import torch.distributed as dist

    from rlmismatch.pins import logprob_ways
    from rlmismatch.pins.collectives import TpGroup
    from rlmismatch.pins.logprob_ways import Way
    from rlmismatch.pins.megatron_logprob import VocabShard, merged_logprob
    from rlmismatch.transforms import Chain

    cpu = bool(os.environ["MERGE_ORDER_CPU"])
    if os.environ["MERGE_ORDER_SHARE"]:  # a host a rank, to NCCL, which refuses two ranks on one GPU of one host
        os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank{os.environ['RANK']}"}
    dist.init_process_group("gloo" if cpu else "nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu") if cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not cpu:
        torch.cuda.set_device(device)
    assert dist.group.WORLD is not None
    tp = TpGroup(group=dist.group.WORLD, size=size, rank=rank)
    vocab = size * _WIDTH
    logits = torch.randn(_ROWS, vocab, generator=torch.Generator().manual_seed(0)) * 3
    targets = torch.randint(0, vocab, (_ROWS,), generator=torch.Generator().manual_seed(1))
    exact = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    own, targets = logits[:, rank * _WIDTH : (rank + 1) * _WIDTH].to(device), targets.to(device)
    shard = VocabShard(tp=tp, vocab_size=vocab, padded_vocab_size=vocab)
    way = Way(reduce="allreduce_partials", gather="masked_sum_allreduce")
    impl: Literal["reference", "triton"] = "reference" if cpu else "triton"
    ways: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {
        "all-reduced log-probs": (lambda: logprob_ways.selected(own, targets, start=shard.start, way=way, tp=tp), exact),
        "fixed merge of log-probs": (lambda: merged_logprob(own, targets, vocab, chain=Chain(), shard=shard, impl=impl), exact),
    }
    for name, shape in _SUMS.items():
        parts = torch.randn(size, *shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        mine, total = parts[rank].to(device), parts.double().sum(0)
        ways[f"all-reduced rows, {name}"] = (partial(_all_reduced, mine), total)
        ways[f"fixed order of rows, {name}"] = (partial(_in_rank_order, mine, tp, impl), total)
    out = {}
    for name, (run, truth) in ways.items():
        runs = [run().cpu() for _ in range(_REPEATS)]
        out[name] = {
            "digest": hashlib.sha256(runs[0].float().numpy().tobytes()).hexdigest()[:16],
            "repeats": all(torch.equal(runs[0], other) for other in runs[1:]),
            "max_error": float((runs[0].double() - truth).abs().max()),
        }
    if rank == 0:
        print(json.dumps({"sums": out}), flush=True)
    dist.destroy_process_group()


def _all_reduced(x: torch.Tensor) -> torch.Tensor:
    import torch.distributed as dist

    total = x.clone()
    dist.all_reduce(total)
    return total


def _in_rank_order(x: torch.Tensor, tp: TpGroup, impl: Literal["reference", "triton"]) -> torch.Tensor:
    from rlmismatch.kernels import reduce

    return reduce.fold(tp.gathered(x), impl=impl, out_dtype=x.dtype)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        _worker()
    else:
        sys.exit(main())
