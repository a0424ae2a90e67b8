"""``rlmismatch axes``: what can differ, as a list. Imports no engine and no torch."""

from __future__ import annotations

import json

import click


@click.command("axes")
@click.argument("axis", required=False)
@click.option("--plants", is_flag=True, help="List the known faults that --plant can put in, and the verdict each must get.")
@click.option("--json", "json_", is_flag=True, help="The same as JSON.")
def command(axis: str | None, plants: bool, json_: bool) -> None:
    """List every axis, or everything about AXIS."""
    from tabulate import tabulate

    from rlmismatch import axes

    chosen = (axes.by_id(axis),) if axis else axes.ALL
    if plants:
        rows = [
            {"plant": p.id, "axis": a.id, "sides": "/".join(p.sides), "verdict": p.verdict, "built": p.built, "what": p.what}
            for a in chosen
            for p in a.plants
        ]
    elif axis:
        rows = [{"field": f.name, "tier": f.tier.value, "side": f.side, "meaning": f.meaning} for f in chosen[0].fields]
    else:
        rows = [{"axis": a.id, "state": a.built.replace("_", " "), "pins": "+".join(a.pins), "asks": a.asks} for a in chosen]
    if json_:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:  # every axis has fields, and none has to have a plant
        click.echo(f"{axis} has no plant; `rlmismatch axes --plants` lists those of all axes")
        return
    if axis and not plants:
        one = chosen[0]
        facts = {
            "knobs": _knobs(one.knobs),
            "pin": one.pin or "none",
            "measure": one.measure,
            "trap": one.trap or "none known",
            "structural zero": ", ".join(one.zero.values()) or "none",
        }
        click.echo(f"{one.id} ({one.built.replace('_', ' ')})\n{one.asks}\n")
        click.echo(tabulate(facts.items(), tablefmt="plain", maxcolwidths=[None, 80]) + "\n")
    # The last column is prose and takes what is left of 100 characters.
    taken = sum(max(len(str(v)) for v in [k, *(row[k] for row in rows)]) + 2 for k in list(rows[0])[:-1])
    click.echo(tabulate(rows, headers="keys", maxcolwidths=[*[None] * (len(rows[0]) - 1), max(24, 100 - taken)]))


def _knobs(knobs: object) -> str:
    items = dict(knobs).items() if isinstance(knobs, dict) else []
    return "; ".join(f"{name} = {'|'.join(map(str, values)) or 'free'}" for name, values in items) or "none"
