"""Reproducers: a folder with the program just before a failing pass, and that pass."""

from __future__ import annotations

import json
import platform
import shlex
import traceback
from importlib.metadata import version
from pathlib import Path

from quantc.errors import PassError, QuantcError
from quantc.files.atomic_file import write_text
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Hook, Pass, Pipeline
from quantc.text.files import Snapshot

PACKAGES = ("quantc", "torch", "pydantic", "numpy")


class Reproducer(Hook):
    """On a pass failure, write to `folder` everything needed to reproduce it.

    - `program.txt`: the program before the failing pass, with its plan; `program.safetensors`: its constants and the
      plan's statistics (as they are then: a pass that writes into a tensor instead of making a new one is seen by its
      digest);
    - `program.inputs.safetensors`: the example inputs;
    - `pipeline.txt`: the failing pass, as pipeline text;
    - `error.txt`: the error with its traceback; `versions.json`: the versions it ran on.

    `quantc run "$(cat pipeline.txt)" program.txt` reproduces it.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._snapshot: Snapshot | None = None

    def before(self, program: Program, pass_: Pass) -> None:
        self._snapshot = Snapshot.of(program)

    def failed(self, program: Program, pass_: Pass, error: PassError) -> None:
        if self._snapshot is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write("pipeline.txt", str(pass_))
        self._write("error.txt", "".join(traceback.format_exception(error)))
        versions = {name: version(name) for name in PACKAGES}
        self._write("versions.json", json.dumps({"python": platform.python_version(), **versions}, indent=2))
        command = f"quantc run {shlex.quote(str(pass_))} {shlex.quote(str(self.folder / 'program.txt'))}"
        self._snapshot.write(self.folder / "program.txt")
        error.add_note(f"to see it again: {command}")
        if not _reads_back(pass_):
            error.add_note(
                f"pipeline text does not say all of {pass_.name}, as it names a quantizer that is no installed backend; "
                f"in Python: Pipeline((the_pass,)).run(read_text(Path({str(self.folder / 'program.txt')!r}))), "
                "with quantc.text.files.read_text"
            )

    def _write(self, name: str, text: str) -> None:
        write_text(self.folder / name, f"{text}\n")


def _reads_back(pass_: Pass) -> bool:
    try:
        return Pipeline.parse(str(pass_)).passes == (pass_,)
    except QuantcError:
        return False
