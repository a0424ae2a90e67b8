"""``rlmismatch attention`` on both real engines: the forms, pages and prefixes of a rollout, and knobs that an engine cannot take.

The chain: with every pin in force a run closes (trainer = all four forms, bit for bit); runs of other chunk sizes, page sizes and TP on the
same tokens then have the same numbers, so no form, page, prefix, chunk or rank moves a bit.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmismatch import axes, capture
from rlmismatch.cli import root
from rlmismatch.errors import UsageError
from tests.cli_runs import MASK, MID, QUICK, TINY, TP2, WINDOW, Done, run, selected, side_by_side

ROLLOUT = [{"id": f"s{n}", "prompt_ids": [(7 * i + n) % 1000 for i in range(n)], "response_ids": [(i * i + n) % 1000 for i in range(m)]}
           for n, m in ((5, 34), (40, 6), (67, 3))]  # fmt: skip
OFF = ("--attention", "off")
RUNS: Mapping[str, tuple[str, ...]] = {
    "TP2": (TINY, *TP2, *OFF),
    "TP1, chunks of 7, pages of 64": (TINY, *OFF, "--chunk-size", "7", "--block-size", "64"),
    "TP1, chunks of 1": (TINY, *OFF, "--chunk-size", "1"),
    "refused": (TINY, "--split-kv-policy", "1", "--trainer.split-kv-policy", "4", "--materialization", "decode", "--prefix-cache", "off"),
    "short": (TINY, "--materialization", "paged_prefill", "--block-size", "96"),
    "window": (
        WINDOW,
        *OFF,
        "--sink",
        "1.5",
        "--fail-on",
        "contract,defect",
    ),  # responses that nobody sampled drift more than a budget for real ones
    # Natively this rollout's prefill and decode differ: vLLM's CPU kernels choose by the number of rows.
    "benign": (MID, "--axis", "attention.materialization", "--fail-on", "contract,defect"),
    "pages of 16": (TINY, "--block-size", "16"),
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, preloaded: str) -> Iterator[Mapping[str, Future[Done]]]:
    folder, chosen = tmp_path_factory.mktemp("attention"), selected(request, "name")
    tokens = folder / "rollout.jsonl"
    tokens.write_text("".join(json.dumps(row) + "\n" for row in ROLLOUT))
    given = ("--rollout", str(tokens), *MASK, *QUICK[:2])
    jobs = {
        name: functools.partial(run, "attention", "--ckpt", ckpt, *given, *options, out=folder / f"run{i}", python=preloaded)
        for i, (name, (ckpt, *options)) in enumerate(RUNS.items())
        if name in chosen
    }
    with side_by_side(jobs) as started:
        yield started


def of(done: Done, kind: str, **wanted: str) -> list[dict[str, Any]]:
    return [row for row in done.report[kind] if all(row[k] == v for k, v in wanted.items())]


def closed(done: Done) -> None:
    done.exits(0)
    assert [row["name"].rsplit(" ", 1)[-1] for row in done.report["closure"]] == ["prefill", "chunked", "paged", "decode"]
    assert {row["unequal"] for row in done.report["closure"]} == {0}


def pinned(folder: Path) -> torch.Tensor:
    """float64 [paths, tokens]: every score set of a run in which all pins are in force."""
    trainer, rollout = (capture.read_arms(folder, side) for side in ("trainer", "rollout"))  # type: ignore[arg-type]
    sets = [trainer["pins=all"].scores["forward"], *rollout["pins=all"].scores.values(), *rollout["paged.pinned"].scores.values()]
    return torch.stack([torch.cat([scores[row["id"]] for row in ROLLOUT]) for scores in sets])


@pytest.mark.engines
@pytest.mark.parametrize("name", ["TP2"])
def test_every_axis_has_its_row_and_nothing_moves_with_forms_and_pages(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    closed(done)
    assert [row["axis"] for row in done.report["axes"]] == [a.id for a in axes.family("attention")]
    for ratio in ("prefill/chunked", "prefill/paged", "prefill/decode"):
        assert done.ratio(ratio)["mean_abs"] == 0
    assert done.ratio("trainer/prefill")["mean_abs"] > 0  # the other operations are native
    pages = of(done, "measures", axis="attention.paged_kv")
    assert [m["value"] for m in pages if m["limit"] == 0.0] == [0.0] * 3
    (cascade,) = [m for m in of(done, "measures", axis="attention.merge_order") if m["what"] == "cascade attention"]
    assert (cascade["value"], cascade["note"]) == (None, "not used: this vLLM's CPU_ATTN has none")
    (table,) = of(done, "contract", axis="attention.paged_kv", field="page_table")
    plain, shuffled = table["rollout"]["value"]["as handed out"], table["rollout"]["value"]["shuffled"]
    assert plain == sorted(plain) != shuffled
    assert shuffled != sorted(shuffled)
    (survived,) = [m for m in pages if m["unit"] == "tokens"]
    assert survived["value"] == 64  # vLLM keeps a prefix over a weight update, until it is told to reset
    layout = of(done, "measures", axis="attention.layout")
    assert {m["value"] for m in layout} == {0.0}
    assert [m["what"].partition(",")[0] for m in layout if m["limit"] == 0.0] == [
        "our kernel on strided views of one Q",
        "all sequences packed into one prefill",
    ]
    exported = of(done, "measures", axis="attention.lse")
    assert [m["value"] is None for m in exported] == [True, False, False] * 2  # on CPUs no engine's kernel exports one
    assert all(0 < m["value"] < 1e-3 for m in exported if m["value"] is not None)
    seen = [(r["side"], r["layer"], r["phase"], r["calls"]) for r in done.report["attention_ran"]]
    assert seen == [
        *(("trainer", layer, "forward", 1) for layer in range(2)),
        *(("rollout", layer, "prefill", 1) for layer in range(2)),
        *(("rollout", layer, "decode", 2) for layer in range(2)),
    ]
    assert {(r["mask"], r["window"], r["soft_cap"], r["sink"], r["kv_dtype"]) for r in done.report["attention_ran"]} == {
        ("causal", 0, 0.0, None, "bfloat16")
    }
    turned = of(done, "measures", axis="attention.rope")
    assert len(turned) == 4
    assert all(0 < m["value"] < 10 for m in turned)  # native cos and sin are rounded to bfloat16


@pytest.mark.engines
@pytest.mark.parametrize("name", ["TP1, chunks of 7, pages of 64", "TP1, chunks of 1"])
def test_pinned_bits_depend_on_no_chunk_page_prefix_or_rank(name: str, runs: Mapping[str, Future[Done]]) -> None:
    here, there = runs[name].result(), runs["TP2"].result()
    closed(here)
    first, second = pinned(here.folder), pinned(there.folder)
    assert first.shape == second.shape
    assert first.shape[0] == 1 + 4 + 6
    assert torch.equal(first, second)
    assert torch.equal(first, first[:1].expand_as(first))


@pytest.mark.engines
@pytest.mark.parametrize("name", ["refused"])
def test_what_an_engine_cannot_take_is_no_pass(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result().exits(5)
    got = {(k["knob"], k["side"]): (k["actual"], k["status"]) for k in done.report["knobs"]}
    assert got == {
        ("attention.split_kv_policy", "trainer"): ("1", "unsupported"),
        ("attention.split_kv_policy", "rollout"): ("1", "applied"),
        ("attention.materialization", "rollout"): ("decode", "applied"),
        ("attention.prefix_cache", "rollout"): ("off", "applied"),
    }
    forced = {(m["side"], m["what"].partition(":")[0]): m["value"] for m in of(done, "measures", axis="attention.provenance")}
    assert forced.keys() == {
        *(("trainer", f"{name} forced, forward") for name in ("sdpa_math", "sdpa_flash")),
        *(("rollout", f"{name} forced, {path}") for name in ("sdpa_math", "sdpa_flash", "vec16") for path in ("prefill", "decode")),
        *((side, "sdpa_efficient forced") for side in ("trainer", "rollout")),
    }
    assert {what for (_, what), value in forced.items() if value is None} == {"sdpa_efficient forced"}
    assert all(forced["trainer", f"{name} forced, forward"] > 0 for name in ("sdpa_math", "sdpa_flash"))  # the trainer rounds its scores
    taken = {row["name"] for row in done.report["ratios"] if row["drift"]}
    assert "prefill/decode" in taken
    assert taken.isdisjoint({"prefill/paged", "prefill/chunked"})


@pytest.mark.engines
@pytest.mark.parametrize("name", ["short"])
def test_a_form_that_never_took_place_is_no_pass(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result().exits(5)
    (knob,) = of(done, "knobs", knob="attention.materialization")
    assert knob["status"] == "fell_back"
    assert "no sequence is longer than a page of 96 tokens" in knob["reason"]


@pytest.mark.engines
@pytest.mark.parametrize("name", ["window"])
def test_a_window_and_a_sink_close_in_every_form(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    closed(done)
    (field,) = of(done, "contract", axis="attention.provenance", field="sliding_window")
    assert (field["trainer"]["value"], field["rollout"]["value"]) == (24, 24)
    (field,) = of(done, "contract", axis="attention.provenance", field="sinks")
    assert (field["trainer"]["value"], field["rollout"]["value"]) == (True, True)
    assert {(k["knob"], k["status"]) for k in done.report["knobs"]} >= {("attention.sink", "applied")}


@pytest.mark.engines
@pytest.mark.parametrize("name", ["benign"])
def test_forms_that_differ_natively_are_no_breach(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    closed(done)
    (ratio,) = of(done, "ratios", name="prefill/decode")
    assert ratio["drift"]["mean_abs"] > 0
    assert ratio["note"].startswith("no breach of the contract: with every axis pinned the two forms are bit-equal")
    (chunked,) = of(done, "ratios", name="prefill/chunked")
    assert (chunked["drift"]["mean_abs"], chunked["note"]) == (0, "")


@pytest.mark.engines
@pytest.mark.parametrize("name", ["pages of 16"])
def test_pages_that_the_engine_does_not_have(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result().exits(2)
    assert done.errors == ["block-size-unsupported"]


def test_paged_prefill_without_a_cache_is_a_contradiction() -> None:
    asked = ["attention", "--ckpt", TINY, "--materialization", "paged_prefill", "--prefix-cache", "off"]
    with pytest.raises(UsageError) as error:
        root.main(asked, standalone_mode=False)
    assert error.value.slug == "paged-prefill-needs-cache"
