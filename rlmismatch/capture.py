"""A run's folder: what the sides wrote, sealed with digests.

    run.json            command, settings, environment            tokens.jsonl      the sequences that were scored
    trainer/ rollout/ oracle/                                     one folder a side:
        side.json       config, readings, weight digests, provenance
        arms/ID.safetensors    one arm: scores, boundaries; everything else as JSON in the header
    report.json         the assembled report                      logs/             one file a side and rank
    SEAL.json           sha256 of every file above; written last, its presence is what "complete" means

Files are written to a temporary name, flushed and renamed, so a crash leaves finished captures whole and nothing half-written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmismatch.errors import EnvironmentUnfitError, UsageError

if TYPE_CHECKING:
    from rlmismatch.engines.protocol import ArmResult, SideName
    from rlmismatch.tokens import Sequence

SCHEMA_VERSION = 1
_SEAL = "SEAL.json"
_FAILURE = "failure.json"
_CLAIM = ".claimed.tmp"  # by a run that is at work; no reader takes a *.tmp for a part of a run


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfitError(
            "output-unwritable",
            f"cannot write {path}: {error.strerror or error}",
            where=str(path),
            hint="free space, or choose another folder with --out",
        ) from error


def claim(path: Path) -> bool:
    """Make `path` the folder of this run alone, and prove that it can be written to, before an engine is started.

    False if it holds anything, or another run has claimed it; the file that says so is created in one step, on a shared file system too.
    The failure.json of a run that never got to its engines is no capture, and goes.
    """
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if {entry.name for entry in path.iterdir()} - {_FAILURE}:
            return False
        try:
            (path / _CLAIM).touch(exist_ok=False)
        except FileExistsError:
            return False
        if {entry.name for entry in path.iterdir()} - {_FAILURE, _CLAIM}:  # a run that ended between the two looks
            release(path)
            return False
        (path / _FAILURE).unlink(missing_ok=True)
    write_bytes(path / ".probe", b"x" * 65536)
    (path / ".probe").unlink()
    return True


def release(path: Path) -> None:
    """The run has ended: its folder is told apart by what it holds."""
    with contextlib.suppress(OSError):
        (path / _CLAIM).unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` so that `path` either holds all of it or is as it was before."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def remove_unfinished(run: Path) -> None:
    """Remove what a process that was stopped while it wrote has left; call it when nothing writes any more."""
    for path in run.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    write_bytes(path, (json.dumps(data, indent=1, sort_keys=False, allow_nan=True) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError("capture-unreadable", f"cannot read {path.name}: {error}", where=str(path)) from None


def _file_name(arm_id: str) -> str:
    if not re.fullmatch(r"[\w.+=@:,-]+", arm_id):
        raise ValueError(f"arm id {arm_id!r} cannot be a file name")
    # A set of many pins makes a long name; the header holds the arm itself.
    return arm_id if len(arm_id) <= 120 else f"{arm_id[:80]}-{hashlib.sha256(arm_id.encode()).hexdigest()[:16]}"


def arm_path(run: Path, side: SideName, arm_id: str) -> Path:
    return run / side / "arms" / f"{_file_name(arm_id)}.safetensors"


def write_arm(run: Path, side: SideName, result: ArmResult, sequences: tuple[Sequence, ...]) -> Path:
    """Write one arm's result. Scores are stored per path as one float64 vector over all response tokens in sequence order."""
    import torch
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    for path, by_sequence in result.scores.items():
        missing = [s.id for s in sequences if s.id not in by_sequence]
        if missing:
            raise ValueError(f"{side} arm {result.arm.id}: path {path} has no score for {missing}")
        parts = []
        for s in sequences:
            score = by_sequence[s.id]
            if score.shape != (len(s.response_ids),) or score.dtype != torch.float64:
                raise ValueError(
                    f"{side} arm {result.arm.id}, {path}, {s.id}: {score.dtype} {tuple(score.shape)}, not float64 [{len(s.response_ids)}]"
                )
            parts.append(score.cpu())
        tensors[f"scores/{path}"] = torch.cat(parts).contiguous()
    for name, value in result.boundaries.items():
        tensors[f"boundary/{name}"] = value.detach().cpu().contiguous()
    meta = {
        "schema": SCHEMA_VERSION,
        "arm": result.arm.to_json(),
        "calls": result.calls,
        "local": [dataclasses.asdict(error) for error in result.local],
        "knobs": result.knobs,
        "notes": result.notes,
        "seconds": result.seconds,
        "sequences": [[s.id, len(s.response_ids)] for s in sequences],
    }
    path_ = arm_path(run, side, result.arm.id)
    write_bytes(path_, save(tensors or {"empty": torch.zeros(1)}, metadata={"rlmismatch": json.dumps(meta)}))
    return path_


def read_arm(path: Path) -> ArmResult:
    """The arm written at `path`."""
    from safetensors import SafetensorError, safe_open

    from rlmismatch.engines.protocol import Arm, ArmResult, LocalError

    try:
        with safe_open(str(path), framework="pt") as file:
            meta = json.loads(file.metadata()["rlmismatch"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise UsageError("capture-unreadable", f"cannot read the capture {path.name}: {error}", where=str(path)) from None
    scores: dict[str, dict[str, Any]] = {}
    boundaries = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "scores":
            lengths = [length for _, length in meta["sequences"]]
            scores[rest] = {s: part for (s, _), part in zip(meta["sequences"], value.split(lengths), strict=True)}
        elif kind == "boundary":
            boundaries[rest] = value
    return ArmResult(
        arm=Arm.from_json(meta["arm"]),
        scores=scores,
        calls=meta["calls"],
        local=[LocalError(**error) for error in meta["local"]],
        boundaries=boundaries,
        knobs=meta["knobs"],
        notes=meta["notes"],
        seconds=meta["seconds"],
    )


def read_arms(run: Path, side: SideName) -> dict[str, ArmResult]:
    """Every arm that `side` finished, by arm id."""
    results = (read_arm(path) for path in sorted((run / side / "arms").glob("*.safetensors")))
    return {r.arm.id: r for r in results}


def seal(run: Path) -> None:
    """Write the digests of every file: the run is complete."""
    files = {str(p.relative_to(run)): _sha256(p) for p in _files(run)}
    write_json(run / _SEAL, {"schema": SCHEMA_VERSION, "files": files})


def check_seal(run: Path) -> None:
    """Refuse a folder that is no run, is not sealed, or was changed after it was sealed."""
    if not (run / "run.json").is_file():
        raise UsageError(
            "run-not-found", f"{run} is not a run folder", where=str(run), hint="give the folder that a run printed as its artifacts"
        )
    if not (run / _SEAL).is_file():
        why = _failure(run / "failure.json")
        raise UsageError(
            "run-not-sealed",
            f"the run did not complete ({why})",
            where=str(run),
            hint="finished captures are under */arms, logs under logs/; run it again for a report",
        )
    expected = _sealed_files(run / _SEAL)
    actual = {str(p.relative_to(run)): p for p in _files(run)}
    changed = [f"changed: {name}" for name in expected if name in actual and _sha256(actual[name]) != expected[name]]
    gone = [f"missing: {name}" for name in expected if name not in actual]
    added = [f"added: {name}" for name in actual if name not in expected]
    if changed or gone or added:
        raise UsageError(
            "run-tampered",
            f"{len(changed) + len(gone) + len(added)} file(s) differ from the seal",
            where=str(run),
            hint="; ".join(
                filter(
                    None,
                    (
                        "remove the files that were added, and write outside the folder" if added else "",
                        "captures are evidence: run it again instead of editing" if changed or gone else "",
                    ),
                )
            ),
            details=tuple(changed + gone + added),
        )
    _same_schema(read_json(run / "run.json"), run / "run.json")


def _failure(path: Path) -> str:
    """Why a run has no seal, as its driver left it; the file itself may be cut short, too."""
    if not path.is_file():
        return "it was cut short"
    error = read_json(path)
    return f"it failed: {error['what']}" if isinstance(error, dict) and "what" in error else f"it failed, and {path.name} does not say how"


def _sealed_files(path: Path) -> Mapping[str, str]:
    data = read_json(path)
    _same_schema(data, path)
    files = data.get("files")
    if not isinstance(files, dict):
        raise UsageError("capture-unreadable", f"{path.name} names no files", where=str(path), hint="captures are evidence: run it again")
    return files


def _same_schema(data: Any, path: Path) -> None:
    """Refuse a folder in another version's form: its files may mean something else."""
    if not isinstance(data, dict) or "schema" not in data:
        raise UsageError("capture-unreadable", f"{path.name} is not what a run writes", where=str(path), hint="run it again")
    if data["schema"] != SCHEMA_VERSION:
        raise UsageError(
            "capture-schema-version",
            f"{path.name} has schema version {data['schema']}; this program reads {SCHEMA_VERSION}",
            where=str(path),
            hint="use the version of rlmismatch that made the run, or run it again",
        )


def _files(run: Path) -> list[Path]:
    return sorted(p for p in run.rglob("*") if p.is_file() and p.name != _SEAL and not p.name.endswith(".tmp"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
