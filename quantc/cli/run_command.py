"""The command `quantc run`. Its dependencies are imported lazily, so that other commands start without them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantc.cli.options import CaptureMethod, Guarding, Json, MethodOption, Source, print_json
from quantc.cli.program_outputs import list_written, plan_files, show_log, write_program
from quantc.support.terminal import Screen

if TYPE_CHECKING:
    from quantc.hooks import Guard, Hook

REPRODUCER = Path("quantc-reproducer")


def run(
    pipeline: Annotated[str, typer.Argument(help='Pipeline text, such as "canonicalize,fuse".')],
    source: Source = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the result to a file; a .txt gets its tensors beside it.")
    ] = None,
    show_diff: Annotated[bool, typer.Option("--diff", help="Show what each pass changed.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="Show the time each pass took.")] = False,
    dump_to: Annotated[Path | None, typer.Option(help="Write the program after each pass to this folder.")] = None,
    guard: Annotated[Guarding, typer.Option(help="Compare the numbers before and after each pass.")] = Guarding.auto,
    reproducer: Annotated[Path, typer.Option(help="If a pass fails, write what shows it again here.")] = REPRODUCER,
    method: MethodOption = CaptureMethod.auto,
    as_json: Json = False,
) -> None:
    """Run a pipeline on a model, verifying after each pass."""
    from quantc.cli.model_source import load
    from quantc.hooks import Diff, DumpTo, Reproducer, Timing, Verify
    from quantc.pipeline.pipeline import Pipeline

    steps = Pipeline.parse(pipeline)
    if out is not None:
        plan_files(out, None)
    program = load(source, method.value)
    start = len(program.log)
    watch, clock, diffs = _guard(guard), Timing(), Diff()
    hooks: list[Hook] = [Reproducer(reproducer), Verify(), clock]
    hooks += [watch] if watch is not None else []
    hooks += [diffs] if show_diff else []
    hooks += [DumpTo(dump_to)] if dump_to is not None else []
    steps.run(program, hooks)
    if out is not None:
        write_program(program, out, None)
    if as_json:
        print_json(
            {
                "pipeline": str(steps),
                "stage": program.stage.label,
                "log": [asdict(entry) for entry in program.log[start:]],
                "guarded": watch.checked if watch is not None else [],
                "not_guarded": watch.skipped if watch is not None else [],
                **(
                    {"diff": [{"pass": str(pass_), **json.loads(found.to_json())} for pass_, found in diffs.rows]}
                    if show_diff
                    else {}
                ),
            }
        )
        return
    screen = Screen()
    show_log(screen, program, start)
    if show_diff:
        screen.diff(str(diffs) or "nothing changed")
    if timing:
        screen.text(str(clock))
    for reason in watch.skipped if watch is not None else ():
        typer.echo(f"numbers not compared: {reason}", err=True)
    if out is not None:
        list_written(out, None)


def _guard(when: Guarding) -> Guard | None:
    from quantc.pipeline.numeric_guard import SMALL, Guard

    if when is Guarding.never:
        return None
    return Guard(limit=SMALL if when is Guarding.auto else None)
