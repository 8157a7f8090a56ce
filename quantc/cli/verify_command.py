"""The command `quantc verify`. Its dependencies are imported lazily, so that other commands start without them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quantc.cli.options import CaptureMethod, Json, MethodOption, print_json
from quantc.support.terminal import Screen


def verify(
    source: Annotated[str, typer.Argument(help="A .qc or .pt2 file, a .txt dump, or package.module:factory.")],
    method: MethodOption = CaptureMethod.auto,
    as_json: Json = False,
) -> None:
    """Check that a program's file is intact, satisfies the IR's invariants, and runs."""
    from quantc.cli.model_source import load
    from quantc.cli.verify_file import Finding, check_up
    from quantc.support.terminal import readable

    program = load(source, method.value)
    path = Path(source)
    read = f"{readable(path.stat().st_size)}, read" if path.is_file() else "captured"
    digests = ", and every digest agrees" if path.suffix == ".qc" else ""
    findings = [Finding("source", f"{read}{digests}"), *check_up(program)]
    if as_json:
        print_json(
            {"program": program.name, "stage": program.stage.label, "findings": [asdict(row) for row in findings]}
        )
        return
    Screen().fields(f"{program.name} ({program.stage.label})", {row.checked: row.found for row in findings})
