"""Hooks of a pipeline run: `pipeline.run(program, hooks=[Verify(), Guard(), timing := Timing()])`.

Hooks are called in the order given. One that raises an error of quantc's fails the pass it watched, as if the pass
itself had raised; any other exception is told as the hook's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from quantc.errors import PassError
from quantc.files.atomic_file import write_text
from quantc.ir.program import LogEntry, Program, Stage
from quantc.pipeline.numeric_guard import Guard
from quantc.pipeline.pipeline import Hook, Pass
from quantc.pipeline.reproducer import Reproducer

if TYPE_CHECKING:
    from quantc.text.diff import Diff as ProgramDiff

__all__ = ["Diff", "DumpTo", "Guard", "Hook", "Reproducer", "Timing", "Truth", "Verify"]


class Verify(Hook):
    """Check every rule of the IR after each pass that changed something."""

    def after(self, program: Program, pass_: Pass, changed: bool) -> None:
        if changed:
            program.verify()


class Truth(Hook):
    """Hold a pass to what it says of itself: "changed" exactly if the program's text, plan included, or its placements
    differ."""

    def __init__(self) -> None:
        self._digest = b""
        self._stage = Stage.CAPTURED

    def before(self, program: Program, pass_: Pass) -> None:
        self._stage = program.stage
        self._digest = self._read(program)

    def after(self, program: Program, pass_: Pass, changed: bool) -> None:
        differs = self._read(program) != self._digest
        if differs == changed:
            return
        said, is_so = ("a change", "has not changed") if changed else ("no change", "has changed")
        raise PassError(
            f"pass {pass_.name} reported {said}, but the program {is_so}",
            advice="return from `run` whether anything was changed; the Diff hook shows what was",
        )

    def _read(self, program: Program) -> bytes:
        # the pipeline, not the pass, moves the stage, and the text shows it
        stage, program.stage = program.stage, self._stage
        try:
            return blake2b(f"{program.dump('text')}\n{program.placements}".encode()).digest()
        finally:
            program.stage = stage


@dataclass
class Timing(Hook):
    """Collect the seconds each pass took; prints as a table."""

    rows: list[LogEntry] = field(default_factory=list)

    def after(self, program: Program, pass_: Pass, changed: bool) -> None:
        self.rows.append(program.log[-1])

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        width = max(width, len("total"))
        lines = [
            f"{row.name:<{width}}  {row.seconds * 1e3:>10.2f} ms  {'changed' if row.changed else '-'}"
            for row in self.rows
        ]
        return "\n".join([*lines, f"{'total':<{width}}  {self.seconds * 1e3:>10.2f} ms"])


@dataclass
class DumpTo(Hook):
    """Write the program's text before the first pass, and after each that changed it.

    The files are `00-captured.txt` (named after the stage the program came in), `01-canonicalize.txt`, and so on;
    the numbers count the passes, so a number that is missing is a pass that changed nothing.
    """

    folder: Path
    count: int = 0
    files: list[Path] = field(default_factory=list)

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.count = 0
        self.files = []

    def before(self, program: Program, pass_: Pass) -> None:
        if self.count == 0:
            self._write(program, program.stage.label)
        self.count += 1

    def after(self, program: Program, pass_: Pass, changed: bool) -> None:
        if changed:
            self._write(program, pass_.name)

    def _write(self, program: Program, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{self.count:02}-{name}.txt"
        write_text(file, program.dump("text"))
        self.files.append(file)


class Diff(Hook):
    """Collect what each pass changed, as `rows` of (pass, difference).

    Copies the program before each pass to compare with: for looking, not for every day.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[Pass, ProgramDiff]] = []
        self._before: Program | None = None

    def before(self, program: Program, pass_: Pass) -> None:
        self._before = program.clone()

    def after(self, program: Program, pass_: Pass, changed: bool) -> None:
        if changed and self._before is not None:
            self.rows.append((pass_, self._before.diff(program)))

    def __str__(self) -> str:
        return "\n\n".join(f"== {pass_}\n{difference}" for pass_, difference in self.rows)
