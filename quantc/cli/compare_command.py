"""The command `quantc compare`. Its dependencies are imported lazily, so that other commands start without them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

from quantc.cli.options import CaptureMethod, Json, MethodOption
from quantc.support.terminal import Screen

if TYPE_CHECKING:
    from quantc.cli.run_compare import Compared, Structure

TOO_FAR = 3
"""The exit code of programs that are further apart than `--at-least` allows."""
MAX_ROWS = 20
MAX_LINES = 40
SOURCE = "A .qc, .pt2, .onnx or .pte file, a .txt dump, or package.module:factory."


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=f"What to compare with. {SOURCE}")],
    b: Annotated[str, typer.Argument(metavar="B", help="What is compared, given likewise.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Batches to run both on, as `quantc quantize` takes them. Without it: those that come with A or B, or "
            "else the example inputs.",
            metavar="FILE|MODULE:NAME",
        ),
    ] = None,
    noise: Annotated[
        int | None, typer.Option(help="Run on so many batches of seeded noise like the example inputs.", min=1)
    ] = None,
    most: Annotated[int | None, typer.Option("--batches", help="Run on no more batches than this.", min=1)] = None,
    at_least: Annotated[
        float | None,
        typer.Option(help=f"Leave with exit code {TOO_FAR} if the SQNR of the outputs is lower.", metavar="DB"),
    ] = None,
    show_diff: Annotated[
        bool, typer.Option("--diff", help="Show every line that differs, not only the first.")
    ] = False,
    method: MethodOption = CaptureMethod.auto,
    as_json: Json = False,
) -> None:
    """Run two models on the same inputs, and report how B differs from A: overall, op by op, and in structure.

    Lowered models, and models of other runtimes, are compared by their outputs.
    """
    from quantc.cli.run_compare import carry_out

    if data is not None and noise is not None:
        raise typer.BadParameter("give --data or --noise, not both", param_hint="--noise")
    found = carry_out(a, b, data, noise, most, method.value)
    is_near = at_least is None or (not math.isnan(found.sqnr) and found.sqnr >= at_least)
    if as_json:
        document = {**found.to_data(), "at_least": at_least, "is_near": is_near}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        show(Screen(), found, None if show_diff else MAX_LINES)
    if not is_near:
        typer.echo(f"{found.b.source} is not within {at_least:g} dB of {found.a.source}", err=True)
        raise typer.Exit(TOO_FAR)


def show(screen: Screen, found: Compared, most_lines: int | None) -> None:
    """Print the comparison."""
    from quantc.support.sqnr import format_sqnr
    from quantc.support.terminal import readable

    comparison = found.comparison
    outputs = [
        f"output {place}: {format_sqnr(sqnr)}{' dB' if math.isfinite(sqnr) else ''}, the largest difference is {largest:.4g}"
        for place, (sqnr, largest) in enumerate(zip(found.outputs, found.largest, strict=True))
        if not math.isnan(sqnr) or largest
    ]
    sizes = (
        {}
        if comparison is None
        else {"size": f"{readable(comparison.size.before)} and {readable(comparison.size.after)}"}
    )
    screen.fields(
        f"{found.b.source} against {found.a.source}",
        {
            "A": found.a.told,
            "B": found.b.told,
            "measured on": found.given.told,
            "SQNR": f"{format_sqnr(found.sqnr)}{' dB' if math.isfinite(found.sqnr) else ''}",
            "outputs": "\n".join(outputs) if outputs else "none hold floats",
            **sizes,
        },
    )
    if comparison is not None:
        _show_ops(screen, found)
    if found.structure is not None:
        _show_structure(screen, found.structure, most_lines)
    for note in found.notes:
        screen.text(f"note: {note}")


def _show_ops(screen: Screen, found: Compared) -> None:
    """Error of each op by itself where known, otherwise its cumulative error."""
    from quantc.inspect.comparison import COSTS, format_gain
    from quantc.support.sqnr import format_sqnr

    comparison = found.comparison
    if comparison is None:
        return
    own = tuple(row for row in comparison.costliest() if row.local != math.inf)
    rows = own or comparison.farthest()
    if not rows:
        screen.text("every op that both have gives the same in both" if comparison.layers else "no op is in both")
        return
    title = "what each quantized op of B costs, the worst first" if own else "the ops of B that are farthest from A"
    cells = [
        (
            *(row.node, row.op, row.rule, row.module, row.source),
            *(format_gain(row.gain), format_sqnr(row.local), format_sqnr(row.sqnr)),
        )
        for row in rows[:MAX_ROWS]
    ]
    screen.table(title, ("node", "op", "rule", "module", "source", COSTS, "alone, dB", "here, dB"), cells)
    if len(rows) > MAX_ROWS:
        screen.text(f"  … and {len(rows) - MAX_ROWS} more: --json has them all")


def _show_structure(screen: Screen, structure: Structure, most_lines: int | None) -> None:
    if not structure.diff:
        screen.text("structure: the same, constants too")
        return
    if structure.ops:
        cells = [(row.op, str(row.a), str(row.b)) for row in structure.ops]
        screen.table("ops they do not have equally often", ("op", "in A", "in B"), cells)
    if structure.decisions:
        cells = [(row.node, row.a, row.b) for row in structure.decisions[:MAX_ROWS]]
        screen.table("ops they do not quantize alike", ("node", "in A", "in B"), cells)
        if len(structure.decisions) > MAX_ROWS:
            screen.text(f"  … and {len(structure.decisions) - MAX_ROWS} more: --json has them all")
    *body, counts = str(structure.diff).splitlines()
    screen.text(f"structure: {counts}")
    # the first table already shows that only one is quantized; the lines are printed on request
    shown = body[: 0 if most_lines is not None and structure.is_quantizing else most_lines]
    if shown:
        screen.diff("\n".join(shown))
    if len(body) > len(shown):
        screen.text(f"  … {len(body) - len(shown)} {'more ' if shown else ''}lines: --diff shows them all")
