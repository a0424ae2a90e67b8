"""The options of a YAML file (--config) as the defaults of the command line, judged by click as words typed there would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlmismatch.settings import read_config


def as_defaults(ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    if value:
        # By the option's own name: that of a knob, or of one side's, is not its parameter's.
        options = {
            o.removeprefix("--").replace("-", "_"): p for p in ctx.command.params if p.name not in ("config", "help") for o in p.opts
        }
        given = {str(options[key].name): _as_text(options[key], key, v) for key, v in read_config(Path(value), options).items()}
        ctx.default_map = {**(ctx.default_map or {}), **given}
    return value


def _as_text(option: click.Parameter, key: str, value: Any) -> Any:
    """A value of a YAML file as the text that the command line would hold, so that click judges both alike: an integer is never cut."""
    from rlmismatch.errors import UsageError

    if getattr(option, "multiple", False):
        return [_scalar(option, key, v) for v in (value if isinstance(value, list) else [value])]
    if isinstance(value, (list, dict)):
        raise UsageError("config-value-malformed", f"{key!r} takes one value, not {value!r}", where="--config")
    return _scalar(option, key, value)


def _scalar(option: click.Parameter, key: str, value: Any) -> Any:
    from rlmismatch.errors import UsageError

    if isinstance(value, bool):
        if isinstance(option.type, click.Choice) and {"on", "off"} & set(option.type.choices):
            return "on" if value else "off"  # how YAML reads these two words where they are not quoted
        if isinstance(option.type, click.types.StringParamType):
            raise UsageError("config-value-malformed", f"YAML reads the value of {key!r} as {value}", where="--config", hint="quote it")
        return value if getattr(option, "is_flag", False) else str(value).lower()
    if isinstance(value, (list, dict)):
        raise UsageError("config-value-malformed", f"{key!r} takes plain values, not {value!r}", where="--config")
    return str(value)
