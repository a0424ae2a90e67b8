"""``rlmismatch report``: render a finished run again, judge it under another budget, or compare two runs. Imports no engine."""

from __future__ import annotations

from pathlib import Path

import click

from rlmismatch.commands import options


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False)
@click.option("--budget", multiple=True, metavar="K=V|FILE", help="Judge under other limits than the run's (repeatable).")
@click.option("--fail-on", help="Kinds that fail; not comparable always does.")
@click.option("--waive", multiple=True, metavar="AXIS:FIELD", help="Accept a difference by name; it is printed (repeatable).")
@options.options(options.OUTPUT)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run: Path,
    other: Path | None,
    budget: tuple[str, ...],
    fail_on: str | None,
    waive: tuple[str, ...],
    format_: str,
    json_: bool,
    verbose: bool,
) -> None:
    """Render the run in folder RUN again; with OTHER, say what changed from RUN to OTHER.

    The captures are checked against their seal first. Exits with the verdict's code (of OTHER, when two runs are compared).
    """
    from rlmismatch import assemble, axes, capture, report

    form = "json" if json_ else format_
    for waiver in waive:
        axes.field_by_key(waiver)
    reports = []
    for folder in (run, other) if other else (run,):
        capture.check_seal(folder)
        reports.append(assemble.report(folder, budget=budget, fail_on=fail_on, waive=waive))
    if other:
        click.echo(report.render_comparison(report.compare(reports[0], reports[1]), form), nl=False)
    else:
        click.echo(report.render(reports[0], form, verbose=verbose), nl=False)
    ctx.exit(reports[-1].verdict.exit_code)
