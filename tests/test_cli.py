"""Every bad input: one clear error, the right exit code, nothing started."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from rlmismatch import axes
from rlmismatch.cli import COMMANDS, main, render_error
from rlmismatch.commands import attention, gemm
from rlmismatch.commands.axes import command as list_axes
from rlmismatch.commands.options import settings_of
from rlmismatch.engines.worker import omp_threads
from rlmismatch.errors import EngineError, EnvironmentUnfitError, RlmismatchError, UsageError
from rlmismatch.evidence import wanted_axes
from rlmismatch.exitcodes import ExitCode
from rlmismatch.settings import Settings
from tests.cli_runs import TINY, Done, run, run_argv


def test_exit_codes_are_frozen() -> None:
    assert {c.name: c.value for c in ExitCode} == {
        "OK": 0, "USAGE": 2, "DRIFT": 3, "CONTRACT": 4, "INCONCLUSIVE": 5, "ENGINE": 6, "ENVIRONMENT": 7,
    }  # fmt: skip


def test_commands_are_frozen() -> None:
    assert list(COMMANDS) == ["probe", "gemm", "attention", "logprob", "report", "axes"]


def test_an_error_is_rendered_as_what_where_details_hint() -> None:
    error = UsageError("slug-of-it", "What happened.", where="file:3", hint="Do this.", details=("one", "two"))
    assert render_error(error) == "error[slug-of-it]: What happened.\n  where: file:3\n  | one\n  | two\n  hint:  Do this."


def test_an_error_survives_a_process_boundary() -> None:
    error = EngineError("worker-killed", "rank 1", where="log", hint="h", details=("d",))
    back = RlmismatchError.from_json(json.loads(json.dumps(error.to_json())))
    assert type(back) is EngineError
    assert back.to_json() == error.to_json()


def _write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def _refused(done: Done, slug: str, code: int = 2) -> str:
    """The message; asserts that exactly one error was printed, as text and as JSON, and no traceback."""
    assert done.code == code, done.stderr
    assert done.errors == [slug], done.stderr
    assert "Traceback" not in done.stderr
    error = json.loads(done.stdout)["error"]
    assert (error["slug"], error["exit_code"]) == (slug, code)
    return done.stderr


CASES: dict[str, tuple[list[str], str, str]] = {
    "no checkpoint": (["--ckpt", "{tmp}"], "checkpoint-no-config", "config.json"),
    "prompts empty": (["--ckpt", TINY, "--prompts", "{empty}"], "file-empty", "holds no line"),
    "prompts missing": (["--ckpt", TINY, "--prompts", "{tmp}/none.jsonl"], "file-unreadable", "none.jsonl"),
    "ids out of range": (["--ckpt", TINY, "--prompts", "{ids}"], "token-id-out-of-range", "99999"),
    "prompt too long": (["--ckpt", TINY, "--prompts", "{long}"], "prompt-too-long", "600 tokens"),
    "text without tokenizer": (["--ckpt", TINY, "--prompts", "{text}"], "tokenizer-missing", "no tokenizer"),
    "prompts and rollout": (["--ckpt", TINY, "--prompts", "{ids}", "--rollout", "{ids}"], "prompts-and-rollout", "exclude"),
    "rollout with NaN": (["--ckpt", TINY, "--rollout", "{nan}"], "rollout-not-finite", "nan"),
    "rollout of another length": (["--ckpt", TINY, "--rollout", "{short}"], "rollout-malformed", "1 recorded log-probs for 2"),
    "heads do not fit": (["--ckpt", TINY, "--trainer-tp", "3"], "checkpoint-does-not-fit-tp", "8"),
    "attribution of compiled code": (["--ckpt", TINY, "--attribute", "--compile", "inductor"], "attribution-needs-eager", "never calls"),
    "sp without tp": (["--ckpt", TINY, "--sp"], "sp-needs-tp", "--trainer-tp"),
    "shared gpu without one": (["--ckpt", TINY, "--trainer-tp", "2", "--device", "cpu", "--share-gpu"], "share-gpu-needs-cuda", "leave it"),
    "shared gpu of one rank": (["--ckpt", TINY, "--share-gpu"], "share-gpu-needs-ranks", "each side has one rank"),
    "cp options without cp": (["--ckpt", TINY, "--cp-partition", "contiguous"], "cp-options-need-cp", "--cp of at least 2"),
    "axis unknown": (["--ckpt", TINY, "--axis", "model.nrom"], "axis-unknown", "model.norm"),
    "waiver unknown": (["--ckpt", TINY, "--waive", "model.norm:epsilon"], "field-unknown", "model.norm:eps"),
    "declaration malformed": (["--ckpt", TINY, "--declare", "model.norm"], "declaration-malformed", "AXIS:FIELD=VALUE"),
    "plant unknown": (["--ckpt", TINY, "--plant", "rope_tehta"], "plant-unknown", "rope_theta"),
    "plant on the wrong side": (["--ckpt", TINY, "--plant", "dropout_on@rollout"], "plant-wrong-side", "dropout_on@trainer"),
    "plant side unknown": (["--ckpt", TINY, "--plant", "eps@actor"], "plant-side-unknown", "@trainer or"),
    "budget unknown": (["--ckpt", TINY, "--budget", "mean_abbs=1"], "budget-unknown-key", "mean_abs"),
    "budget file missing": (["--ckpt", TINY, "--budget", "{tmp}/limits.yaml"], "file-unreadable", "limits.yaml"),
    "fail-on unknown": (["--ckpt", TINY, "--fail-on", "contrat"], "fail-on-unknown", "did you mean contract"),
    "config key unknown": (["--config", "{yaml}"], "config-key-unknown", "trainer_tp"),
    "too hot to sample": (["--ckpt", TINY, "--temperature", "2.5"], "temperature-not-sampled", "--rollout FILE"),
    "too few ranks": (["--ckpt", TINY, "--trainer-tp", "2", "--nproc", "1"], "too-few-ranks", "--nproc 2"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_with_a_hint_before_any_engine(case: str, tmp_path: Path) -> None:
    options, slug, words = CASES[case]
    files = {
        "tmp": str(tmp_path),
        "empty": _write(tmp_path / "empty.jsonl"),
        "ids": _write(tmp_path / "ids.jsonl", {"id": "x", "token_ids": [5, 99999]}),
        "long": _write(tmp_path / "long.jsonl", {"id": "x", "token_ids": [5] * 600}),
        "text": _write(tmp_path / "text.jsonl", {"id": "x", "text": "hello"}),
        "nan": _write(tmp_path / "nan.jsonl", '{"id": "x", "prompt_ids": [1], "response_ids": [2], "logprobs": [NaN]}'),
        "short": _write(tmp_path / "short.jsonl", {"id": "x", "prompt_ids": [1], "response_ids": [2, 3], "logprobs": [-1.0]}),
        "yaml": _write(tmp_path / "run.yaml", f"ckpt: {TINY}", "trainer-tpp: 2"),
    }
    done = run("probe", *(o.format(**files) for o in options), out=tmp_path / "run")
    assert words in _refused(done, slug)
    assert not list((tmp_path / "run").glob("logs/*")), "an engine was started"


def test_an_axis_that_is_not_built_is_exit_7(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = dataclasses.replace(axes.by_id("gemm.kernel"), built="not_built", pins=(), measured=False)
    monkeypatch.setattr(axes, "by_id", lambda _: listed)
    with pytest.raises(EnvironmentUnfitError, match=r"gemm\.kernel") as caught:
        wanted_axes(Settings(command="gemm", ckpt=TINY, axis=("gemm.kernel",)))
    assert (caught.value.slug, caught.value.exit_code) == ("axis-not-built", 7)


@pytest.mark.parametrize(
    ("slug", "options"),
    [
        ("knob-needs-grads", ("--dgrad-reduce", "rank_order")),
        ("knob-needs-grads", ("--wgrad-accumulate", "fused")),
        ("grads-not-built", ("--grads", "--trainer-spec", "te")),
        ("grads-not-built", ("--grads", "--cp", "2")),
    ],
)
def test_the_backward_is_refused_before_an_engine_starts(slug: str, options: tuple[str, ...], tmp_path: Path) -> None:
    _refused(run("gemm", "--ckpt", TINY, *options, out=tmp_path / "run"), slug)


@pytest.mark.parametrize("size", ["0", "-3"])
@pytest.mark.parametrize("option", ["--fusion-block-size", "--fusion-chunk-size"])
def test_a_fused_loss_takes_no_block_of_nothing(option: str, size: str, tmp_path: Path) -> None:
    done = run("logprob", "--ckpt", TINY, option, size, out=tmp_path / "run")
    assert done.code == 2
    assert option in done.stderr
    assert "range x>=1" in done.stderr


def test_given_tokens_are_scored_at_any_temperature() -> None:
    assert settings_of("probe", {"ckpt": TINY, "temperature": 2.5, "rollout": "x.jsonl"}).temperature == 2.5
    assert settings_of("probe", {"ckpt": TINY, "temperature": 2.0}).temperature == 2.0


def test_an_output_folder_that_holds_something_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    _refused(run("probe", "--ckpt", TINY, out=tmp_path), "out-not-empty")
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_a_budget_file_is_read_once_and_its_limits_are_kept(tmp_path: Path) -> None:
    limits = _write(tmp_path / "limits.yaml", "mean_abs: 0.01", "max: 0.5")
    settings = settings_of("probe", {"ckpt": TINY, "budget": (limits, "max=0.25")})
    assert settings.budget == ("mean_abs=0.01", "max=0.25")


def test_options_may_stand_in_yaml_and_the_command_line_wins(tmp_path: Path) -> None:
    config = _write(tmp_path / "run.yaml", f"ckpt: {TINY}", "trainer-tp: 2", "nproc: 1", "plant: [eps@trainer]")
    done = run("probe", "--config", config, out=tmp_path / "a")
    assert "the trainer needs 2 ranks" in _refused(done, "too-few-ranks")  # trainer-tp and nproc were read
    done = run("probe", "--config", config, "--trainer-tp", "3", out=tmp_path / "b")
    _refused(done, "checkpoint-does-not-fit-tp")  # 3 won over 2


# Line of a --config file -> what the option becomes. YAML 1.1 reads on and off as booleans.
YAML_WORDS = {
    "oracle: off": ("oracle", "off"),
    "trainer.tf32: on": ("trainer_knob_tf32", "on"),
    "tf32: off": ("knob_tf32", "off"),
    "sp: true": ("sp", True),
    "trainer-tp: 2": ("trainer_tp", 2),
    "timeout: 60": ("timeout", 60.0),
    "plant: [eps@trainer]": ("plant", ("eps@trainer",)),
    "waive: model.norm:eps": ("waive", ("model.norm:eps",)),
}


def _options_of(config: Path) -> dict[str, Any]:
    return gemm.command.make_context("gemm", ["--config", str(config), "--ckpt", TINY]).params


@pytest.mark.parametrize("line", YAML_WORDS)
def test_yaml_values_are_what_the_command_line_would_make_of_them(line: str, tmp_path: Path) -> None:
    name, value = YAML_WORDS[line]
    (tmp_path / "run.yaml").write_text(line)
    assert _options_of(tmp_path / "run.yaml")[name] == value


def test_yaml_may_say_attention_off(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("attention: off")
    context = attention.command.make_context("attention", ["--config", str(tmp_path / "run.yaml"), "--ckpt", TINY])
    assert context.params["attention"] == "off"


@pytest.mark.parametrize("line", ["trainer-tp: 1.9", "seed: 1.9", "max-new-tokens: true", "sp: 2", "oracle: on"])
def test_a_yaml_value_that_the_command_line_refuses_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(line)
    with pytest.raises(click.BadParameter) as caught:
        _options_of(tmp_path / "run.yaml")
    assert line.partition(":")[0] in caught.value.format_message()


@pytest.mark.parametrize(
    ("text", "slug", "key"),
    [
        ("seed:", "config-value-missing", "seed"),
        ("plant: [eps, ~]", "config-value-missing", "plant"),
        ("trainer_tp: 2\ntrainer-tp: 1", "config-key-twice", "trainer"),
        ("seed: 1\nseed: 2", "config-key-twice", "seed"),
        ("seed: [1]", "config-value-malformed", "seed"),
        ("budget: {mean_abs: 1}", "config-value-malformed", "budget"),
        ("out: on", "config-value-malformed", "out"),
    ],
)
def test_a_yaml_line_that_says_nothing_or_two_things_is_refused(text: str, slug: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UsageError, match=key) as caught:
        _options_of(tmp_path / "run.yaml")
    assert caught.value.slug == slug


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_output_cannot_encode_is_escaped(encoding: str, tmp_path: Path) -> None:
    """An id may hold anything, a lone surrogate too; and a report has signs of its own."""
    main = "import rlmismatch.cli as c; c.root = lambda **_: print('id \\u2264 \\ud800'); c.main()"
    done = run_argv([sys.executable, "-c", main], out=tmp_path, env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})
    assert (done.code, done.stdout) == (0, "id \\u2264 \\ud800\n"), done.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--timeout", value) for value in ("nan", "inf", "1e300", "0")),
        *(("--temperature", value) for value in ("nan", "inf", "0")),
        ("--gpu-memory-fraction", "nan"),
        ("--seed", "-1"),
        ("--seed", str(2**65)),
        ("--seed", str(2**32)),  # numpy's seeds have 32 bits
        ("--sink", "nan"),
    ],
)
def test_a_number_that_no_engine_takes_is_refused(option: str, value: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        attention.command.make_context("attention", ["--ckpt", TINY, option, value])
    assert option in caught.value.format_message()


@pytest.mark.parametrize(("text", "threads"), [("2", 2), ("2,1", 2), (" 3 , 1", 3), ("0", 1), ("", 1), ("many", 1)])
def test_omp_num_threads_may_be_a_list(text: str, threads: int) -> None:
    assert omp_threads(text) == threads


@pytest.mark.parametrize(
    ("env", "slug"),
    [
        ({"RANK": "3"}, "checkpoint-no-config"),  # a rank without a world is none
        ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun-variable-missing"),
        ({"RANK": "3", "WORLD_SIZE": "4"}, "torchrun-variable-missing"),
    ],
)
def test_a_rank_that_torchrun_did_not_start_speaks(env: dict[str, str], slug: str, tmp_path: Path) -> None:
    _refused(run("probe", "--ckpt", str(tmp_path), out=tmp_path / "run", env=env), slug)


@pytest.mark.parametrize("axis", [a.id for a in axes.ALL if not a.plants])
def test_an_axis_without_a_plant_says_so(axis: str) -> None:
    done = CliRunner().invoke(list_axes, [axis, "--plants"], catch_exceptions=False)
    assert (done.exit_code, done.output.startswith(f"{axis} has no plant")) == (0, True)
    assert CliRunner().invoke(list_axes, [axis, "--plants", "--json"], catch_exceptions=False).output == "[]\n"


@pytest.mark.parametrize(
    ("options", "lines", "slug"),
    [
        (["--trainer-tp", "0", "--json"], "", "command-line"),
        (["--no-such-option", "--format=json"], "", "command-line"),
        (["--trainer-tp", "0"], "json: true", "command-line"),
        (["--sp"], "format: json", "sp-needs-tp"),
        ([], "json: true\ntrainer-tpp: 2", "config-key-unknown"),
    ],
)
def test_json_is_what_an_error_is_printed_as_where_it_was_asked_for(
    options: list[str], lines: str, slug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"ckpt: {TINY}\nout: {tmp_path}/run\n{lines}")
    monkeypatch.setattr(sys, "argv", ["rlmismatch", "probe", "--config", str(config), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert (ended.value.code, error["slug"], error["exit_code"]) == (2, slug, 2)
    assert error["what"] in said.err


def test_the_command_line_has_the_last_word_on_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "run.yaml").write_text("format: json")
    monkeypatch.setattr(sys, "argv", ["rlmismatch", "probe", "--config", f"{tmp_path}/run.yaml", "--format", "text", "--sp"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == ""
