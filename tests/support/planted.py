"""Failures planted in passes, here and in another process: `python -m tests.support.planted FOLDER ...` runs the reproducers
in these folders, each with the failure that it was written for, and prints what each tells."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from typer.testing import CliRunner

from quantc.ir.program import Program
from quantc.pipeline.pipeline import Outcome, Pass
from quantc.pipeline.registry import PASSES


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Let a pass do its work, and then fail with a digest of what it made."""
    kind = PASSES[name]
    original = kind.run

    def run(self: Pass, program: Program) -> bool | Outcome:
        original(self, program)
        made = blake2b(program.dump("text").encode(), digest_size=8).hexdigest()
        raise RuntimeError(f"planted in {name}, which made {made}")

    kind.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.run = original  # type: ignore[method-assign]


def reproduced(folder: Path) -> str:
    """What `quantc run` tells of a reproducer."""
    from quantc.cli.app import app

    text = (folder / "pipeline.txt").read_text().strip()
    again = folder / "again"
    with planted(text.partition("{")[0]):
        result = CliRunner().invoke(app, ["run", text, str(folder / "program.txt"), "--reproducer", str(again)])
    return " ".join(result.output.split())


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        sys.stdout.write(f"{argument}\t{reproduced(Path(argument))}\n")
