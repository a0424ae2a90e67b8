"""The order of a merge: arrival moves bits from three shards on, the global index never; and the script that asks NCCL."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlmismatch.errors import ContractError
from rlmismatch.kernels import logprob
from rlmismatch.kernels.logprob import VocabPartials
from rlmismatch.pins.collectives import TpGroup
from tests.logprob.gloo import on_ranks

ROWS, WIDTH = 64, 128
SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "merge_order.py"


def logits_of(shards: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, shards * WIDTH, generator=generator) * 3, torch.randint(0, shards * WIDTH, (ROWS,), generator=generator)


def part_of(rank: int, shards: int) -> VocabPartials:
    logits, targets = logits_of(shards)
    own = logits[:, rank * WIDTH : (rank + 1) * WIDTH]
    return logprob.partials(own, targets, vocab_start=rank * WIDTH, vocab_size=shards * WIDTH, impl="reference")


def arriving(tp: TpGroup) -> dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]:
    """Order of arrival -> (sum of exponentials added as it came, the fixed merge of what came)."""
    logits, _ = logits_of(tp.size)
    own = part_of(tp.rank, tp.size)
    sumexp_RT = tp.gathered(logits[:, tp.rank * WIDTH : (tp.rank + 1) * WIDTH].exp().sum(1))
    mine = (own.max_TJ, own.sumexp_TJ, own.target_T, own.owns_T.to(torch.uint8), torch.tensor([own.first_tile]))
    max_RTJ, sum_RTJ, target_RT, owns_RT, tile_R1 = map(tp.gathered, mine)
    parts = [
        VocabPartials(max_TJ=m, sumexp_TJ=s, target_T=t, owns_T=o.bool(), first_tile=int(j))
        for m, s, t, o, j in zip(max_RTJ, sum_RTJ, target_RT, owns_RT, tile_R1, strict=True)
    ]
    out = {}
    for order in itertools.permutations(range(tp.size)):
        as_it_came = torch.zeros(ROWS)
        for rank in order:
            as_it_came = as_it_came + sumexp_RT[rank]
        by_index = sorted((parts[rank] for rank in order), key=lambda p: p.first_tile)
        out[order] = (as_it_came, logprob.merge(by_index, vocab_size=tp.size * WIDTH, impl="reference"))
    return out


def test_four_ranks_in_every_order_of_arrival() -> None:
    logits, targets = logits_of(4)
    whole = logprob.selected(logits, targets, vocab_size=4 * WIDTH, impl="reference")
    for rank in on_ranks(4, arriving):
        assert len(rank) == 24
        first, _ = rank[0, 1, 2, 3]
        assert sum(not torch.equal(came, first) for came, _ in rank.values()) >= 12  # in float32 the order of additions shows
        assert all(torch.equal(merged, whole) for _, merged in rank.values())


def test_two_shards_have_no_order() -> None:
    logits, _ = logits_of(2)
    a, b = logits[:, :WIDTH].exp().sum(1), logits[:, WIDTH:].exp().sum(1)
    assert torch.equal(a + b, b + a)


def test_parts_out_of_order_are_refused_not_merged() -> None:
    parts = [part_of(rank, 3) for rank in (0, 2, 1)]
    with pytest.raises(ContractError, match="rank 1 starts at tile 4, expected 2"):
        logprob.merge(parts, vocab_size=3 * WIDTH, impl="reference")


def test_the_script_runs_each_setting_in_processes_of_its_own() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--nproc", "2", "--cpu"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sums = json.loads(done.stdout.splitlines()[0])["sums"]
    assert len(sums) == 6
    assert all(way["repeats"] for way in sums.values())
    assert all(sums[way]["max_error"] <= 3e-6 for way in ("all-reduced log-probs", "fixed merge of log-probs"))
    # One rounding to bfloat16 of sums below 8 in size, in either way: two ranks make one addition.
    assert all(way["max_error"] <= 2**-6 for name, way in sums.items() if "rows" in name)
    assert sums["all-reduced rows, decode"]["digest"] == sums["fixed order of rows, decode"]["digest"]
    assert "1 of 1 settings ran" in done.stdout


def test_a_setting_that_did_not_run_is_no_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("merge_order", SCRIPT)
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    fine = {"sums": {"fixed merge": {"digest": "a", "repeats": True}}}
    monkeypatch.setattr(sys, "argv", ["merge_order.py", "--nproc", "4"])
    for answers, code in (([fine] * 6, 0), ([fine] * 5 + [{"error": "no answer in 120 s"}], 1), ([{"error": "refused"}] * 6, 1)):
        given = iter(answers)
        monkeypatch.setattr(script, "_run", lambda *_, given=given, **__: next(given))
        assert script.main() == code
    assert "5 of 6 settings ran" in capsys.readouterr().out
