"""What a person asked for, as one frozen value: the same for a command line, a YAML file and a capture that is judged again."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlmismatch.errors import UsageError

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every shared option. Field names are the option names with underscores; help texts stand in commands/options.py."""

    command: str
    ckpt: str
    prompts: str | None = None
    rollout: str | None = None
    out: str | None = None
    trainer_tp: int = 1
    rollout_tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_partition: Literal["zigzag", "contiguous"] = "zigzag"
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] | None = None
    dtype: Dtype = "bfloat16"
    trainer_dtype: Dtype | None = None
    rollout_dtype: Dtype | None = None
    device: Device = "auto"
    impl: Literal["auto", "reference", "triton"] = "auto"
    trainer_spec: Literal["local", "te"] = "local"
    trainer_python: str | None = None
    rollout_python: str | None = None
    trainer_env: tuple[str, ...] = ()
    rollout_env: tuple[str, ...] = ()
    nproc: int | None = None
    max_new_tokens: int = 32
    max_model_len: int | None = None
    chunk_size: int = 16
    block_size: int = 32
    gpu_memory_fraction: float = 0.4
    share_gpu: bool = False
    sides: Literal["auto", "together", "in-turn"] = "auto"
    temperature: float = 1.0
    vocab_padding_policy: Literal["include", "mask"] = "include"
    oracle: Literal["float64", "float32", "off"] = "float64"
    budget: tuple[str, ...] = ()
    fail_on: str = "contract,defect,drift"
    waive: tuple[str, ...] = ()
    declare: tuple[str, ...] = ()
    axis: tuple[str, ...] = ()
    repeat: int = 2
    timeout: float = 900.0
    seed: int = 0
    plant: tuple[str, ...] = ()
    attribute: bool = False
    grads: bool = False
    knobs: Mapping[str, str] = field(
        default_factory=dict
    )  # family knobs that were given, e.g. {"logprob.reduce": ..., "trainer.logprob.head_dtype": ...}

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        known = {f.name for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known}
        return cls(**values)

    @property
    def world_size(self) -> int:
        """Ranks that the larger side needs."""
        return max(self.trainer_tp * self.cp, self.rollout_tp)

    def knobs_of(self, side: str) -> dict[str, str]:
        """Knob -> value on `side`: those for both sides, and over them those given for this side (``trainer.logprob.head_dtype``)."""
        both = {k: v for k, v in self.knobs.items() if k.partition(".")[0] not in ("trainer", "rollout")}
        return both | {k.partition(".")[2]: v for k, v in self.knobs.items() if k.partition(".")[0] == side}

    def plants_of(self, side: str) -> tuple[str, ...]:
        """Ids of the plants on `side`."""
        return tuple(plant for plant, where in map(split_plant, self.plant) if where == side)


def split_plant(text: str) -> tuple[str, Literal["trainer", "rollout"]]:
    """``ID@side`` -> (ID, side). Without a side the fault goes to the rollout."""
    plant, _, side = text.partition("@")
    if side in ("", "rollout"):
        return plant, "rollout"
    if side == "trainer":
        return plant, "trainer"
    raise UsageError("plant-side-unknown", f"--plant {text}: the side is {side!r}", hint="ID@trainer or ID@rollout")


def parse_declarations(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """``[trainer.|rollout.]AXIS:FIELD=VALUE`` -> side -> "axis:field" -> value; VALUE is JSON, or else a string. Without a side: both."""
    import json

    out: dict[str, dict[str, Any]] = {"trainer": {}, "rollout": {}}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or ":" not in key:
            raise UsageError(
                "declaration-malformed",
                f"--declare {text}",
                hint="[trainer.|rollout.]AXIS:FIELD=VALUE, e.g. trainer.logprob.precision:accum_dtype=float32",
            )
        side, dot, rest = key.partition(".")
        sides, name = ([side], rest) if dot and side in out else (list(out), key)
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        for one in sides:
            out[one][name] = parsed
    return out


def parse_env(texts: Iterable[str], option: str) -> dict[str, str]:
    """``KEY=VALUE`` pairs."""
    out = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError("env-malformed", f"{option} {text}", hint="KEY=VALUE")
        out[key] = value
    return out


def nearest(word: str, known: Iterable[str]) -> str:
    """ "did you mean ...?" for an unknown word, or a list of the known ones."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


def read_config(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Options from a YAML file by their names in `known`: one mapping, keys with - or _, each once and none of them empty."""
    import yaml

    try:
        text = path.read_text()
        data, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("file-unreadable", f"cannot read {path}: {error}", where=str(path)) from None
    except yaml.YAMLError as error:
        raise UsageError("config-malformed", f"not YAML: {error}", where=str(path)) from None
    if not isinstance(data, dict) or not isinstance(node, yaml.MappingNode):
        raise UsageError("config-malformed", "the file must hold one mapping of options", where=str(path))
    # YAML's own reader keeps the last of two equal keys and says nothing, so the keys are counted as they were written.
    written = Counter(str(key.value).replace("-", "_") for key, _ in node.value)
    out = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UsageError("config-key-unknown", f"unknown option {key!r}", where=str(path), hint=nearest(name, known))
        if written[name] > 1:
            raise UsageError("config-key-twice", f"{key!r} is given {written[name]} times", where=str(path), hint="- and _ are one key")
        if value is None or (isinstance(value, list) and None in value):
            raise UsageError("config-value-missing", f"{key!r} has no value", where=str(path), hint="leave the line out for the default")
        out[name] = value
    return out
