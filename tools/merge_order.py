"""Does the collective's algorithm move a log-prob? The same vocabulary shards, merged under every NCCL_ALGO x NCCL_PROTO.

    python tools/merge_order.py --nproc 4            on GPUs; each setting in processes of its own, because NCCL reads it once
    python tools/merge_order.py --nproc 4 --cpu      gloo, which has one algorithm: proves the script, not the claim

Prints one JSON object a setting: digests of the log-probs by all-reduced partials and by the fixed merge, and the largest error of each
against float64. Exit 0 if the fixed merge gave one set of bits everywhere and every run of a setting repeated itself, 1 if not. At most
two ranks make one addition, which has no order: the first digest cannot move there either.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from typing import Any

_ALGOS, _PROTOS = ("Ring", "Tree"), ("LL", "LL128", "Simple")
_ROWS, _WIDTH, _REPEATS = 256, 8192, 3  # rows, columns a rank, runs within one process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, required=True, help="ranks")
    parser.add_argument("--cpu", action="store_true", help="gloo on the CPU")
    options = parser.parse_args()
    settings: list[dict[str, str]] = (
        [{}] if options.cpu else [{"NCCL_ALGO": a, "NCCL_PROTO": p} for a, p in itertools.product(_ALGOS, _PROTOS)]
    )
    results = [_run(options.nproc, setting, cpu=options.cpu) for setting in settings]
    for result in results:
        print(json.dumps(result))
    ran = [r for r in results if "error" not in r]
    one = len({r["fixed_merge"]["digest"] for r in ran}) == 1
    repeated = all(r[way]["repeats"] for r in ran for way in ("allreduce", "fixed_merge"))
    distinct = len({r["allreduce"]["digest"] for r in ran})
    print(f"{len(ran)} of {len(results)} settings ran; all-reduce: {distinct} sets of bits; fixed merge: {'one' if one else 'several'}")
    return 0 if ran and one and repeated else 1


def _run(nproc: int, setting: dict[str, str], *, cpu: bool) -> dict[str, Any]:
    """One setting in fresh processes; an ``error`` where NCCL refuses it (an algorithm without that protocol)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), __file__, "--worker"]
    env = {**os.environ, **setting, "MERGE_ORDER_CPU": "1" if cpu else ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {**setting, "error": _reason(done.stderr)}
    return {**setting, **json.loads(lines[-1])}


def _reason(stderr: str) -> str:
    """The last line that names an error; torchrun's own frame comes after it."""
    named = [line.strip() for line in stderr.splitlines() if re.search(r"\b\w*Error: |NCCL WARN|invalid usage", line)]
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
    ways = {
        "allreduce": lambda: logprob_ways.selected(own, targets, start=shard.start, way=way, tp=tp),
        "fixed_merge": lambda: merged_logprob(own, targets, vocab, chain=Chain(), shard=shard, impl="reference" if cpu else "triton"),
    }
    out = {}
    for name, run in ways.items():
        runs = [run().cpu() for _ in range(_REPEATS)]
        out[name] = {
            "digest": hashlib.sha256(runs[0].numpy().tobytes()).hexdigest()[:16],
            "repeats": all(torch.equal(runs[0], other) for other in runs[1:]),
            "max_error_nats": float((runs[0].double() - exact).abs().max()),
        }
    if rank == 0:
        print(json.dumps(out), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "--worker" in sys.argv:
        _worker()
    else:
        sys.exit(main())
