"""The root command, and the one place where an error becomes words and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import os
import sys
from typing import Any, NoReturn

import click

from rlmismatch import __version__, torchrun_exit
from rlmismatch.errors import RlmismatchError, UsageError
from rlmismatch.exitcodes import ExitCode

# name -> one line of help. The modules are imported when a command is run: `--help` costs no torch.
COMMANDS = {
    "probe": "Are the two engines comparable, how far apart are they, and which axis is it?",
    "gemm": "The GEMM family: kernels and the sums over tensor-parallel ranks.",
    "attention": "The attention family: core attention, RoPE, KV cache, prefill against decode.",
    "logprob": "The log-prob family: head, vocabulary, softmax, transform chain.",
    "report": "Render, judge again or compare finished runs; needs no engine.",
    "axes": "List what can differ: question, knob, pin and state of every axis.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"rlmismatch.commands.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from rlmismatch.settings import nearest

            ctx.fail(f"no command {args[0]!r}; {nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="rlmismatch")
def root() -> None:
    """Measure, attribute and gate the log-probability drift between a Megatron-core trainer and a vLLM rollout engine.

    Loads one checkpoint into both real engines, says whether they may be compared, measures the drift per token, turns one knob at a
    time against a deterministic path, and names the axis that moved the number.

    Exit codes: 0 in order · 2 usage · 3 drift over budget · 4 contract broken or not comparable · 5 inconclusive · 6 an engine failed ·
    7 this machine cannot run it.
    """


def main() -> NoReturn:
    """Console entry point."""
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal, or a log in another encoding, does not have must not cost a run that is complete.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    speaks = torchrun_exit.speaks(os.environ)
    try:
        code = root(standalone_mode=False)
    except RlmismatchError as error:
        if speaks:
            _show(error)
        code = error.exit_code
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        if speaks:
            if _wants_json(sys.argv):
                print(json.dumps({"error": UsageError("command-line", error.format_message()).to_json()}), flush=True)
            error.show()
        code = ExitCode.USAGE
    except (KeyboardInterrupt, click.Abort):
        if speaks:
            print("interrupted: every worker was stopped; finished captures are kept", file=sys.stderr)
        code = 130
    sys.exit(int(code or 0))


def render_error(error: RlmismatchError) -> str:
    """An error as text: what, where, details, what to do."""
    lines = [f"error[{error.slug}]: {error.what}"]
    if error.where:
        lines.append(f"  where: {error.where}")
    lines += [f"  | {detail}" for detail in error.details]
    if error.hint:
        lines.append(f"  hint:  {error.hint}")
    return "\n".join(lines)


def _show(error: RlmismatchError) -> None:
    if _wants_json(sys.argv):
        print(json.dumps({"error": error.to_json()}))
    print(render_error(error), file=sys.stderr)


def _wants_json(argv: list[str]) -> bool:
    """Whether the command line, or its --config file, asks for JSON. Read anew: the error may be that neither could be read as a whole."""
    config = _config_of(argv)
    form = _last(argv, "--format") or config.get("format")
    return "--json" in argv or form == "json" or str(config.get("json")).lower() == "true"


def _last(argv: list[str], option: str) -> str | None:
    """The last value of an option, in either spelling."""
    spelled = [after for word, after in itertools.pairwise([*argv, ""]) if word == option]
    joined = [word.partition("=")[2] for word in argv if word.startswith(f"{option}=")]
    return next(iter((*reversed(joined), *reversed(spelled))), None)


def _config_of(argv: list[str]) -> dict[Any, Any]:
    """What stands in the --config file, or nothing: that it cannot be read is an error of its own."""
    path = _last(argv, "--config")
    if not path:
        return {}
    import yaml

    with contextlib.suppress(OSError, ValueError, yaml.YAMLError), open(path, encoding="utf-8") as file:
        data = yaml.safe_load(file)
        return data if isinstance(data, dict) else {}
    return {}
