"""The options that every command shares, once. Names, defaults and help are the same everywhere, in YAML too (--config).

The options are data, most of it help, in one file so that no name is given twice (a little over 400 lines).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import click

from rlmismatch.commands import config_file
from rlmismatch.settings import Settings, parse_declarations, split_plant


class _Finite(click.FloatRange):
    """A range of numbers; click's own lets NaN through, and infinity where one side is open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


_LONGEST_S = 30 * 24 * 3600  # a month; the stores that wait for an engine overflow far beyond it
_LARGEST_SEED = 2**31 - 1  # numpy takes 32 bits, and the engines add to it: the number of the prompt, or a rank's offset
_DTYPES = click.Choice(["bfloat16", "float16", "float32"])
FORMATS = ("console", "text", "json", "markdown", "html", "junit")


_INPUT = [
    click.option(
        "--config",
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=config_file.as_defaults,
        help="YAML file with any of these options; the command line wins.",
    ),
    click.option(
        "--ckpt", required=True, metavar="DIR", help="Hugging Face checkpoint folder (config.json + safetensors), loaded into both engines."
    ),
    click.option("--prompts", metavar="FILE", help="JSONL with text or token_ids. Default: fixtures-like prompts that fit the checkpoint."),
    click.option("--rollout", metavar="FILE", help="JSONL with prompt_ids, response_ids and recorded logprobs; nothing is sampled then."),
    click.option("--out", metavar="DIR", help="Folder for captures, report and logs. Default: runs/DATE-COMMAND."),
    click.option("--max-new-tokens", type=click.IntRange(1), default=32, show_default=True, help="Tokens to sample per prompt."),
    click.option(
        "--seed",
        type=click.IntRange(0, _LARGEST_SEED),
        default=0,
        show_default=True,
        help="Seed of sampling, bootstrap and sampled permutations.",
    ),
]
_SIDES = [
    click.option("--trainer-tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks of the trainer."),
    click.option("--rollout-tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks of the rollout."),
    click.option(
        "--sp/--no-sp", default=False, show_default=True, help="Sequence parallelism in the trainer (needs --trainer-tp 2 or more)."
    ),
    click.option(
        "--cp", type=click.IntRange(1), default=1, show_default=True, help="Context-parallel ranks of the trainer, times --trainer-tp."
    ),
    click.option(
        "--cp-partition",
        type=click.Choice(["zigzag", "contiguous"]),
        default="zigzag",
        show_default=True,
        help="Which tokens a context-parallel rank holds.",
    ),
    click.option(
        "--cp-comm-type",
        type=click.Choice(["p2p", "all_gather", "a2a"]),
        help="How K and V travel between them. Default: p2p under --trainer-spec te, else all_gather.",
    ),
    click.option("--dtype", type=_DTYPES, default="bfloat16", show_default=True, help="Model dtype of both sides."),
    click.option("--trainer-dtype", type=_DTYPES, help="Model dtype of the trainer alone."),
    click.option("--rollout-dtype", type=_DTYPES, help="Model dtype of the rollout alone."),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="auto: cuda where a GPU is seen; printed.",
    ),
    click.option(
        "--impl",
        type=click.Choice(["auto", "reference", "triton"]),
        default="auto",
        show_default=True,
        help="Arithmetic of the pins. auto: triton on cuda, reference on cpu; printed.",
    ),
    click.option(
        "--trainer-spec",
        type=click.Choice(["local", "te"]),
        default="local",
        show_default=True,
        help="Megatron layer spec; te needs Transformer Engine and a GPU.",
    ),
    click.option("--trainer-python", metavar="PATH", help="Python of the trainer's own environment."),
    click.option("--rollout-python", metavar="PATH", help="Python of the rollout's own environment."),
    click.option("--trainer-env", multiple=True, metavar="K=V", help="Environment variable of the trainer alone (repeatable)."),
    click.option("--rollout-env", multiple=True, metavar="K=V", help="Environment variable of the rollout alone (repeatable)."),
    click.option("--nproc", type=click.IntRange(1), help="Ranks to start when not under torchrun. Default: what the larger side needs."),
    click.option("--max-model-len", type=click.IntRange(2), help="Longest sequence. Default: what the tokens need."),
    click.option("--chunk-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens per step of the chunked prefill."),
    click.option("--block-size", type=click.IntRange(1), default=32, show_default=True, help="Tokens per KV cache block."),
    click.option(
        "--sides",
        type=click.Choice(["auto", "together", "in-turn"]),
        default="auto",
        show_default=True,
        help="Both engines up at once, or each with the whole GPU in turn (loads more often). auto: by their sizes; printed.",
    ),
    click.option(
        "--gpu-memory-fraction",
        type=_Finite(0.01, 0.95),
        default=0.4,
        show_default=True,
        help="Share of a GPU for the weights and cache of the rollout's ranks on it.",
    ),
    click.option(
        "--share-gpu",
        is_flag=True,
        help="Ranks may outnumber the GPUs: they go round them, TP4 on one, say. Between rounds NCCL takes the network or sockets; slow.",
    ),
    click.option(
        "--temperature",
        type=_Finite(0.0, min_open=True),
        default=1.0,
        show_default=True,
        help="Sampling temperature that both sides apply to the logits.",
    ),
    click.option(
        "--vocab-padding-policy",
        type=click.Choice(["include", "mask"]),
        default="include",
        show_default=True,
        help="Padded vocabulary rows in the trainer's softmax: Megatron's own loss includes them.",
    ),
    click.option(
        "--compile",
        type=click.Choice(["eager", "graph", "inductor"]),
        default="eager",
        show_default=True,
        help="How the rollout runs the model: eagerly, in captured graphs, or as vLLM does by default. Most pins are inert but in eager.",
    ),
    click.option("--plant", multiple=True, metavar="ID[@SIDE]", help="Put a known fault in (repeatable); see `rlmismatch axes --plants`."),
]
_JUDGE = [
    click.option(
        "--oracle",
        type=click.Choice(["float64", "float32", "off"]),
        default="float64",
        show_default=True,
        help="Judge of who is further from the truth (transformers).",
    ),
    click.option("--budget", multiple=True, metavar="K=V|FILE", help="Limits, e.g. mean_abs=0.01 or a YAML file (repeatable)."),
    click.option(
        "--fail-on", default="contract,defect,drift", show_default=True, help="Kinds that fail the run; not comparable always does."
    ),
    click.option("--waive", multiple=True, metavar="AXIS:FIELD", help="Accept a difference by name; it is printed (repeatable)."),
    click.option("--declare", multiple=True, metavar="[SIDE.]AXIS:FIELD=V", help="Declare what no engine reports (repeatable)."),
    click.option("--axis", multiple=True, metavar="ID", help="Only this axis (repeatable)."),
    click.option("--repeat", type=click.IntRange(2), default=2, show_default=True, help="Native runs per side for the floor."),
    click.option(
        "--timeout",
        type=_Finite(1, _LONGEST_S),
        default=900,
        show_default=True,
        help="Seconds without progress after which an engine counts as hung.",
    ),
]
OUTPUT = [
    click.option(
        "--format", "format_", type=click.Choice(FORMATS), default="console", show_default=True, help="Form of the report on stdout."
    ),
    click.option("--json", "json_", is_flag=True, help="Short for --format json."),
    click.option("--verbose", is_flag=True, help="Every contract field and sequence, not only what failed."),
]


def options(*groups: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with option groups, in the order of the help page."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        flat = [option for group in groups for option in group]
        return functools.reduce(lambda f, option: option(f), reversed(flat), function)

    return decorate


@dataclasses.dataclass(frozen=True)
class Knob:
    """An option of one family's command that turns a knob. values: ``a|b|c``, or a type for a free value, or for one in a range."""

    option: str
    values: str | type[int] | type[float] | type[str] | click.IntRange
    help: str
    # each: both sides, or one alone. both: never one alone. trainer, rollout: the other has nothing of the kind, and is not asked.
    side: Literal["each", "both", "trainer", "rollout"] = "each"
    multiple: bool = False  # repeatable; its value is a comma list

    @property
    def name(self) -> str:
        return self.option.removeprefix("--").replace("-", "_")


def knob_options(family: str, knobs: Sequence[Knob]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with an option a knob, and hidden ones ``--trainer.NAME`` and ``--rollout.NAME`` for one side alone."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for knob in reversed(knobs):
            kind = (
                click.Choice(knob.values.split("|")) if isinstance(knob.values, str) else _Finite() if knob.values is float else knob.values
            )
            for side in ("trainer", "rollout") if knob.side == "each" else ():
                option = f"--{side}.{knob.option.removeprefix('--')}"
                function = click.option(option, f"{side}_knob_{knob.name}", type=kind, hidden=True, help=f"{knob.help} {side} alone.")(
                    function
                )
            several = " (repeatable)" if knob.multiple else ""
            function = click.option(
                knob.option, f"knob_{knob.name}", type=kind, multiple=knob.multiple, help=f"{knob.help.removesuffix('.')}{several}."
            )(function)
        return function

    return decorate


def split_knobs(family: str, knobs: Sequence[Knob], given: Mapping[str, Any]) -> tuple[dict[str, str | None], dict[str, Any]]:
    """(knob id -> value, the options that are no knobs). A side's own knob is ``trainer.FAMILY.NAME``."""
    ids = {f"{side}_knob_{k.name}": f"{side}.{family}.{k.name}" for k in knobs for side in ("trainer", "rollout")}
    ids |= {f"knob_{k.name}": f"{k.side}.{family}.{k.name}" if k.side in ("trainer", "rollout") else f"{family}.{k.name}" for k in knobs}
    values = {ids[name]: _knob_value(value) for name, value in given.items() if name in ids}
    return values, {name: value for name, value in given.items() if name not in ids}


def _knob_value(value: Any) -> str | None:
    if isinstance(value, tuple):
        return ",".join(map(str, dict.fromkeys(value))) or None
    return None if value is None else str(value)


@dataclasses.dataclass(frozen=True)
class OtherName:
    """A family's own name for shared options. names: side ("" for both) -> those options. values: its words -> theirs; None: a count."""

    option: str
    names: Mapping[str, tuple[str, ...]]
    values: Mapping[str, Any] | None

    def key(self, side: str) -> str:
        return "_".join(filter(None, ("other", side, self.option.removeprefix("--").replace("-", "_"))))

    def spelled(self, side: str) -> str:
        return f"--{side}.{self.option.removeprefix('--')}" if side else self.option


def other_names(names: Sequence[OtherName]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with the options of `names`; those of one side are hidden, as a knob's are."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for other in reversed(names):
            kind = click.IntRange(1) if other.values is None else click.Choice(list(other.values))
            for side in reversed(list(other.names)):
                shared = " and ".join(f"--{name.replace('_', '-')}" for name in other.names[side])
                decorator = click.option(
                    other.spelled(side), other.key(side), type=kind, hidden=bool(side), help=f"Another name: {shared}."
                )
                function = decorator(function)
        return function

    return decorate


def by_shared_names(ctx: click.Context, names: Sequence[OtherName], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with every other name as the shared option it stands for. Raises UsageError where both were given and differ."""
    from rlmismatch.errors import UsageError

    out = dict(given)
    default = click.core.ParameterSource.DEFAULT
    said = {name: f"--{name.replace('_', '-')}" for name in given if ctx.get_parameter_source(name) is not default}
    # What speaks of one side comes after what speaks of both, and may differ from it.
    for other in names:
        for side in other.names:
            value = out.pop(other.key(side))
            if value is None:
                continue
            value = value if other.values is None else other.values[value]
            for shared in other.names[side]:
                if shared in said and out[shared] != value and not (side and said[shared] == other.option):
                    raise UsageError(
                        "option-conflict",
                        f"{other.spelled(side)} and {said[shared]} are one setting, and were given two values",
                        hint="give one of them",
                    )
                out[shared], said[shared] = value, other.spelled(side)
    return out


# Knobs that a plant has to have something to break, and the value they get where none was given.
PLANT_NEEDS = {
    "soft_cap_missing": {"logprob.soft_cap": "10"},
    "cap_after_scale": {"logprob.soft_cap": "10", "logprob.logit_scale": "0.5"},
    "sink_dropped": {"attention.sink": "1.0"},
    "auto_split_under_invariance_claim": {"attention.backend_candidate": "sdpa"},
}
# Axes whose plants break the backward alone: nothing shows them but gradients.
GRADIENT_AXES = ("gemm.dgrad_reduce", "gemm.wgrad_accumulate")
HOTTEST_SAMPLING = 2.0  # vllm.SamplingParams refuses more
PLANTED_TEMPERATURE = 0.7  # at 1 a side has no temperature to leave out
SHARED = (_INPUT, _SIDES, _JUDGE, OUTPUT)


def settings_of(
    command: str, given: Mapping[str, Any], *, knobs: Mapping[str, str | None] | None = None, attribute: bool = False
) -> Settings:
    """The settings of a command line; refuses what no single option could refuse."""
    from rlmismatch import axes
    from rlmismatch.errors import UsageError

    values = {k: v for k, v in given.items() if k not in ("format_", "json_", "verbose", "compile")}
    turned = {k: v for k, v in (knobs or {}).items() if v is not None}
    if given.get("compile", "eager") != "eager":
        turned["rollout.model.compile"] = given.get("compile", "eager")
    settings = Settings(command=command, attribute=attribute, knobs=turned, **values)
    if settings.prompts and settings.rollout:
        raise UsageError("prompts-and-rollout", "--prompts and --rollout exclude each other", hint="a rollout file holds its prompts")
    if attribute and given.get("compile", "eager") != "eager":
        raise UsageError(
            "attribution-needs-eager",
            f"--attribute turns pins, which --compile {given['compile']} never calls",
            hint="attribute without --compile; --compile alone measures what compilation moves",
        )
    if settings.sp and settings.trainer_tp == 1:
        raise UsageError("sp-needs-tp", "--sp needs --trainer-tp of at least 2", hint="--trainer-tp 2, or leave --sp out")
    if settings.cp == 1 and (settings.cp_comm_type or settings.cp_partition != "zigzag"):
        raise UsageError(
            "cp-options-need-cp", "--cp-partition and --cp-comm-type need --cp of at least 2", hint="--cp 2, or leave them out"
        )
    _check_shared_gpu(settings)
    for axis in settings.axis:
        axes.by_id(axis)
    for key in (*settings.waive, *(key for side in parse_declarations(settings.declare).values() for key in side)):
        axes.field_by_key(key)
    planted = [split_plant(text) for text in settings.plant]
    for plant, side_name in planted:
        axes.plant(plant, side_name)
    if settings.temperature == 1.0 and any(plant in ("temperature_not_applied", "entropy_before_temperature") for plant, _ in planted):
        settings = dataclasses.replace(settings, temperature=PLANTED_TEMPERATURE)
    if settings.temperature > HOTTEST_SAMPLING and not settings.rollout:
        raise UsageError(
            "temperature-not-sampled",
            f"--temperature {settings.temperature:g}: vLLM samples at {HOTTEST_SAMPLING:g} at most",
            hint=f"--temperature of at most {HOTTEST_SAMPLING:g}, or --rollout FILE with tokens that are given: they are scored at any",
        )
    if any(a.id in GRADIENT_AXES for plant, _ in planted for a in axes.axes_of_plant(plant)):
        settings = dataclasses.replace(settings, grads=True)
    _check_grads(settings)
    needed = {knob: value for plant, _ in planted for knob, value in PLANT_NEEDS.get(plant, {}).items()}
    return dataclasses.replace(settings, knobs={**needed, **settings.knobs}, budget=_limits(settings))


def _check_shared_gpu(settings: Settings) -> None:
    from rlmismatch.errors import UsageError

    if not settings.share_gpu:
        return
    if settings.device == "cpu":
        raise UsageError("share-gpu-needs-cuda", "--share-gpu with --device cpu", hint="leave it out: ranks on CPUs share the host anyway")
    if settings.world_size == 1:
        raise UsageError("share-gpu-needs-ranks", "--share-gpu, and each side has one rank", hint="--trainer-tp 2, or leave it out")


def _check_grads(settings: Settings) -> None:
    from rlmismatch.errors import UsageError

    asked = sorted(k for k in settings.knobs if k.partition(".")[2] in GRADIENT_AXES or k in GRADIENT_AXES)
    if asked and not settings.grads:
        option = asked[0].rpartition(".")[2].replace("_", "-")
        raise UsageError("knob-needs-grads", f"--{option} turns the backward, and no gradient is taken", hint="add --grads")
    if settings.grads and (settings.trainer_spec == "te" or settings.cp > 1):
        raise UsageError(
            "grads-not-built",
            "gradients are taken from the trainer's local spec without context parallelism",
            hint="leave out --trainer-spec te and --cp for --grads",
        )


def _limits(settings: Settings) -> tuple[str, ...]:
    """The limits themselves, no file any more: a run is judged again without it. Refuses what nothing could be judged by."""
    from rlmismatch import verdict
    from rlmismatch.drift.budget import LIMITS, Budget

    verdict.parse_fail_on(settings.fail_on)
    budget = Budget.parse(*settings.budget)
    return tuple(f"{name}={getattr(budget, name)!r}" for name in LIMITS if name in budget.explicit)


def format_of(given: Mapping[str, Any]) -> str:
    return "json" if given["json_"] else str(given["format_"])


def command_line() -> str:
    """The command as typed, for the report; under torchrun only our part of it."""
    import shlex

    return shlex.join(["rlmismatch", *sys.argv[1:]])
