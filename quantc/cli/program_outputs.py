"""Output of programs by commands: the files of `--out`, and the log of passes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quantc.cli.options import Format
from quantc.errors import SaveError

if TYPE_CHECKING:
    from quantc.files.output_paths import Output
    from quantc.ir.program import DumpFormat, Program
    from quantc.support.terminal import Screen

SUFFIXES: dict[str, DumpFormat] = {".json": "json", ".dot": "dot", ".graphml": "graphml"}


def plan_files(out: Path, form: Format | None) -> list[Output]:
    """The files of `--out`. Raises ConfigError or SaveError, before the work is done, for those that cannot be written."""
    from quantc.files.endings import check_ending
    from quantc.files.output_paths import Output, check_outputs
    from quantc.text.files import constants_file, inputs_file
    from quantc.verbs.lower import artifact_of

    if form is None:
        if (target := artifact_of(out)) is not None:
            raise SaveError(
                f"{out} would have to be lowered for {target}, and this writes programs",
                where=f"--out {out}",
                advice=f"quantize it: quantc quantize SOURCE --backend {target} --out {out}",
            )
        check_ending(out, (".qc", ".txt", *SUFFIXES), "a program")
    if form is None and out.suffix == ".qc":
        outputs = [Output("program", out, "program")]
    elif form is None and out.suffix == ".txt":
        beside = {"constants": constants_file(out), "example inputs": inputs_file(out)}
        outputs = [Output("program", out, "text"), *(Output(what, at, "tensors") for what, at in beside.items())]
    else:
        chosen = form.value if form is not None else SUFFIXES.get(out.suffix, "text")
        outputs = [Output("program", out, chosen)]
    check_outputs(outputs, f"--out {out}")
    return outputs


def write_program(program: Program, out: Path, form: Format | None) -> None:
    """Write the files of `--out`."""
    from quantc.files.atomic_file import write_text
    from quantc.files.sealed_text import sealed_text
    from quantc.text.files import Snapshot

    kind = plan_files(out, form)[0].kind
    out.parent.mkdir(parents=True, exist_ok=True)
    if kind == "program":
        program.save(out)
    elif form is None and out.suffix == ".txt":
        Snapshot.of(program).write(out)
    else:
        chosen: Any = kind
        text = program.dump(chosen)
        write_text(out, sealed_text(text) if kind == "text" and out.suffix == ".txt" else text)


def list_written(out: Path, form: Format | None) -> None:
    """Print the files that were written, on stderr."""
    there = [str(output.path) for output in plan_files(out, form) if output.path.exists()]
    typer.echo(f"written to {', '.join(there)}", err=True)


def show_log(screen: Screen, program: Program, start: int = 0) -> None:
    """Print the log of passes, from an entry on."""
    rows = [
        (entry.name, "yes" if entry.changed else "no", f"{entry.seconds * 1e3:.1f}", "; ".join(entry.notes))
        for entry in program.log[start:]
    ]
    screen.table("log", ("pass", "changed", "ms", "notes"), rows)
