"""Captures: whole or absent, and refused when touched."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rlmismatch import capture
from rlmismatch.engines.protocol import Arm, ArmResult, LocalError
from rlmismatch.errors import EnvironmentUnfitError, UsageError
from rlmismatch.tokens import Sequence

SEQUENCES = (
    Sequence(id="a", prompt_ids=(1, 2), response_ids=(3, 4, 5)),
    Sequence(id="b", prompt_ids=(1,), response_ids=(7,)),
)


def _result() -> ArmResult:
    return ArmResult(
        arm=Arm(id="pins=norm+rope", pins=frozenset({"rope", "norm"}), paths=("prefill",), settings={"logprob.reduce": "allgather_logits"}),
        scores={"prefill": {"a": torch.tensor([-1.0, -0.1, -3e-17], dtype=torch.float64), "b": torch.tensor([-2.5], dtype=torch.float64)}},
        calls={"norm": 5, "rope": 2},
        local=[
            LocalError(
                boundary="layers.0.q_proj", pin="gemm", rows=3, count=6, unequal=1, native_vs_pin_max=0.5, native_vs_pin_mean=0.1,
                native_vs_fp64_max=0.2, native_vs_fp64_mean=0.1, pin_vs_fp64_max=0.1, pin_vs_fp64_mean=0.05, fp64_scale=1.0,
            )
        ],
        boundaries={"layers.0.input_norm": torch.randn(3, 4).to(torch.bfloat16)},
        knobs={"logprob.reduce": {"requested": "allgather_logits", "actual": "allgather_logits", "status": "applied", "reason": ""}},
        notes=["a note"],
        seconds=0.5,
    )  # fmt: skip


def test_an_arm_comes_back_bit_for_bit(tmp_path: Path) -> None:
    written = _result()
    capture.write_arm(tmp_path, "rollout", written, SEQUENCES)
    read = capture.read_arms(tmp_path, "rollout")["pins=norm+rope"]
    assert read.arm == written.arm
    assert (read.calls, read.local, read.knobs, read.notes, read.seconds) == (
        written.calls,
        written.local,
        written.knobs,
        written.notes,
        0.5,
    )
    for s in SEQUENCES:
        assert torch.equal(read.scores["prefill"][s.id], written.scores["prefill"][s.id])
    assert torch.equal(read.boundaries["layers.0.input_norm"], written.boundaries["layers.0.input_norm"])


def test_a_missing_sequence_or_a_wrong_shape_or_dtype_is_not_written(tmp_path: Path) -> None:
    result = _result()
    del result.scores["prefill"]["b"]
    with pytest.raises(ValueError, match=r"no score for \['b'\]"):
        capture.write_arm(tmp_path, "rollout", result, SEQUENCES)
    for wrong in (torch.zeros(2, dtype=torch.float64), torch.zeros(3, dtype=torch.float32)):
        result = _result()
        result.scores["prefill"]["a"] = wrong
        with pytest.raises(ValueError, match="not float64"):
            capture.write_arm(tmp_path, "rollout", result, SEQUENCES)
    assert capture.read_arms(tmp_path, "rollout") == {}


def _sealed(folder: Path) -> Path:
    capture.write_json(folder / "run.json", {"schema": 1})
    capture.write_arm(folder, "trainer", _result(), SEQUENCES)
    capture.seal(folder)
    return folder


def test_a_sealed_run_passes(tmp_path: Path) -> None:
    capture.check_seal(_sealed(tmp_path))


@pytest.mark.parametrize("what", ["changed", "missing", "added"])
def test_a_run_that_was_touched_is_refused_and_says_which_file(tmp_path: Path, what: str) -> None:
    arm = next(_sealed(tmp_path).rglob("*.safetensors"))
    if what == "changed":
        data = bytearray(arm.read_bytes())
        data[-1] ^= 1  # one bit of one score
        arm.write_bytes(bytes(data))
    elif what == "missing":
        arm.unlink()
    else:
        (arm.parent / "better.safetensors").write_bytes(arm.read_bytes())
    with pytest.raises(UsageError) as caught:
        capture.check_seal(tmp_path)
    assert caught.value.slug == "run-tampered"
    assert len(caught.value.details) == 1
    assert caught.value.details[0].startswith(what)
    assert ("remove" in caught.value.hint, "run it again" in caught.value.hint) == (what == "added", what != "added")


def test_a_run_that_did_not_finish_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        capture.check_seal(tmp_path)
    assert caught.value.slug == "run-not-found"
    capture.write_json(tmp_path / "run.json", {})
    capture.write_json(tmp_path / "failure.json", {"what": "rollout rank 1 was killed by SIGKILL"})
    with pytest.raises(UsageError, match="SIGKILL") as caught:
        capture.check_seal(tmp_path)
    assert caught.value.slug == "run-not-sealed"


@pytest.mark.parametrize("text", [b"[]", b"{}", b'"x"'])
def test_a_failure_that_says_nothing_is_a_failure_all_the_same(tmp_path: Path, text: bytes) -> None:
    capture.write_json(tmp_path / "run.json", {})
    (tmp_path / "failure.json").write_bytes(text)
    with pytest.raises(UsageError, match="it failed") as caught:
        capture.check_seal(tmp_path)
    assert caught.value.slug == "run-not-sealed"


@pytest.mark.parametrize("text", [b"{}", b"[]", b"", b'{"schema": 1}', b'{"schema": 1, "files": []}', b'{"schema": "\xff"}'])
def test_a_damaged_seal_is_an_error_of_its_own(tmp_path: Path, text: bytes) -> None:
    (_sealed(tmp_path) / "SEAL.json").write_bytes(text)
    with pytest.raises(UsageError, match=r"SEAL\.json") as caught:
        capture.check_seal(tmp_path)
    assert caught.value.slug == "capture-unreadable"


def test_another_versions_run_is_refused_with_a_hint(tmp_path: Path) -> None:
    _sealed(tmp_path)
    capture.write_json(tmp_path / "run.json", {"schema": 2})
    capture.seal(tmp_path)
    with pytest.raises(UsageError, match=r"run\.json has schema version 2; this program reads 1") as caught:
        capture.check_seal(tmp_path)
    assert (caught.value.slug, bool(caught.value.hint)) == ("capture-schema-version", True)
    capture.write_json(tmp_path / "SEAL.json", {"schema": 0, "files": {}})
    with pytest.raises(UsageError, match=r"SEAL\.json has schema version 0"):
        capture.check_seal(tmp_path)


def test_a_truncated_capture_is_an_error_not_an_empty_arm(tmp_path: Path) -> None:
    path = capture.write_arm(tmp_path, "trainer", _result(), SEQUENCES)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError) as caught:
        capture.read_arms(tmp_path, "trainer")
    assert caught.value.slug == "capture-unreadable"


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    capture.write_json(path, {"a": 1})

    def no_space(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(EnvironmentUnfitError, match="No space left") as caught:
        capture.write_json(path, {"a": 2})
    assert caught.value.slug == "output-unwritable"
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_what_a_stopped_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    arm = capture.write_arm(tmp_path, "trainer", _result(), SEQUENCES)
    (arm.parent / f".{arm.name}.123.tmp").write_bytes(b"half")
    capture.remove_unfinished(tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [arm]


def test_long_arm_ids_stay_apart_in_file_names(tmp_path: Path) -> None:
    long = "pins=" + "+".join(f"pin{i:03}" for i in range(40))
    assert capture.arm_path(tmp_path, "trainer", long + "a") != capture.arm_path(tmp_path, "trainer", long + "b")
    with pytest.raises(ValueError, match="file name"):
        capture.arm_path(tmp_path, "trainer", "../up")


def test_a_folder_is_one_runs_alone(tmp_path: Path) -> None:
    out = tmp_path / "a/run"
    assert capture.claim(out)
    assert not capture.claim(out)  # however early the second run looks
    capture.release(out)
    assert capture.claim(out)
    capture.release(out)
    (out / "tokens.jsonl").touch()
    assert not capture.claim(out)
    assert [p.name for p in out.iterdir()] == ["tokens.jsonl"]


def test_of_many_that_claim_a_folder_at_once_one_has_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for n in range(20):
            assert sum(pool.map(capture.claim, [tmp_path / str(n)] * 8)) == 1


def test_why_a_run_failed_before_its_engines_does_not_keep_the_folder(tmp_path: Path) -> None:
    capture.write_json(tmp_path / "failure.json", {"what": "no such checkpoint"})
    assert capture.claim(tmp_path)
    assert not (tmp_path / "failure.json").exists()
