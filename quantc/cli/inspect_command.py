"""The command `quantc inspect`. Its dependencies are imported lazily, so that other commands start without them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantc.cli.options import CaptureMethod, Format, Json, MethodOption, Source, print_json
from quantc.cli.program_outputs import list_written, plan_files, show_log, write_program
from quantc.support.terminal import Screen


def inspect(
    source: Source = None,
    form: Annotated[Format | None, typer.Option("--format", help="Print the program in this form.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the program to a file, in the form its name tells.")] = None,
    method: MethodOption = CaptureMethod.auto,
    sums: Annotated[bool, typer.Option("--accumulators", help="Show the bounds of every product's sums.")] = False,
    only: Annotated[
        str | None,
        typer.Option(help="With --format: a module by its path, or nodes from one to another.", metavar="PATH|A..B"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a model's capture method, ops, opaque parts and pass log.

    For a converted program, also whether its sums can overflow.
    """
    from quantc.cli.inspect_summary import summarize
    from quantc.cli.model_source import load
    from quantc.integer.proof.overflow_report import accumulators, why_not_provable
    from quantc.support.terminal import readable

    if only is not None and (form is None or out is not None):
        raise typer.BadParameter("it prints a part, in the form that --format names", param_hint="--only")
    if out is not None:
        plan_files(out, form)
    program = load(source, method.value)
    if out is not None:
        write_program(program, out, form)
    elif form is not None:
        Screen().text(program.dump(form.value, only=only))
        return
    summary = summarize(program)
    found = accumulators(program) if sums or why_not_provable(program) is None else None
    if as_json:
        print_json({**summary.to_json(), "accumulators": None if found is None else found.to_data()})
        return
    screen = Screen()
    listed = {"opaque nodes": summary.opaque, "nested graphs": summary.graphs}
    screen.fields(
        summary.name,
        {
            "captured by": f"{summary.method} ({summary.why})" if summary.why else summary.method,
            "stage": f"{summary.stage}, in {summary.mode} mode",
            "nodes": f"{summary.nodes:,}",
            "parameters": f"{summary.parameters:,}",
            "size": readable(summary.bytes),
            **{name: "\n".join(items) if items else "none" for name, items in listed.items()},
            **({} if found is None else {"accumulators": found.headline}),
            **({"warnings": "\n".join(summary.warnings)} if summary.warnings else {}),
        },
    )
    if sums and found is not None:
        screen.text(str(found))
    screen.table("ops", ("op", "count", "kind"), [(row.op, str(row.count), row.kind) for row in summary.ops])
    show_log(screen, program)
    if out is not None:
        list_written(out, form)
