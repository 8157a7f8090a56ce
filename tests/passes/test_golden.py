"""Golden texts: what each pass makes of a program, in `tests/golden/<pass>/<case>.txt`.

A file holds the program before, a line of `=====`, the program after, and what the pass says of it in comments. Comments
before the first program say what the case is about; one that reads `run: fold-constants{max-growth-bytes=0}` is the
pipeline, where that is not the folder's name, and `calibrated, then: quantize` what runs once the program has seen its
example inputs; `trained, then: remove-fake-quantize` is the same for a program that trains. The plan, where there is one, is in comments too. Digests are left out of the programs: the constants are made from their
names and types, and the numbers are compared.

`python -m tests.passes.test_golden` writes every text after `=====` anew: read the difference before committing it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Pipeline, Preserves
from quantc.text.parser import parse
from tests.support.paths import TESTS
from tests.support.small_backend import SMALL
from tests.support.text_programs import program_of, see

BACKEND = SMALL.name
"""Cases name it in their pipelines: importing it registers it."""
FOLDER = TESTS / "golden"
FILES = sorted(FOLDER.glob("*/*.txt"))
RULE = "=====\n"
DIGEST = re.compile(r" #[0-9a-f]{8}\b")
LONG = re.compile(r"\b\d+\.\d{7,}\b")
"""A computed scale: the last digits depend on how a machine adds up."""
RUN = re.compile(r"^# run: (.+)$", re.MULTILINE)
THEN = re.compile(r"^# (?:calibrated|trained), then: (.+)$", re.MULTILINE)
MIN_CASES = 3
"""For each pass."""
IDS = [f"{file.parent.name}/{file.stem}" for file in FILES]


@dataclass(frozen=True)
class Golden:
    """One file: the pipeline, the text before, and the text after."""

    pipeline: Pipeline
    before: str
    after: str
    then: Pipeline = field(default_factory=Pipeline)

    @staticmethod
    def read(file: Path) -> Golden:
        before, _, after = file.read_text(encoding="utf-8").partition(RULE)
        found, then = RUN.search(before), THEN.search(before)
        pipeline = Pipeline.parse(found[1] if found else file.parent.name)
        return Golden(pipeline, before, after, Pipeline.parse(then[1]) if then else Pipeline())

    def run(self) -> tuple[str, Program, Guard]:
        """What the pipeline makes of it, as it would stand in the file."""
        program, guard = program_of(self.before), Guard()
        self.pipeline.run(program, [Truth(), Verify(), guard])
        plan = "" if self.then else str(program.plan)
        if self.then:
            see(program)
            self.then.run(program, [Truth(), Verify(), guard])
        notes = [f"# {note}\n" for entry in program.log for note in entry.notes]
        notes += [f"# {line}\n" for line in plan.splitlines()]
        text = DIGEST.sub("", program.dump("text", plan=False))
        return LONG.sub(lambda found: f"{float(found[0]):.4g}", text) + "".join(notes), program, guard


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_golden(file: Path) -> None:
    golden = Golden.read(file)
    text, program, guard = golden.run()
    assert text == golden.after
    passes = (*golden.pipeline, *golden.then)
    keeping = [pass_.name for pass_ in passes if pass_.preserves is not Preserves.NOTHING]
    assert guard.checked == keeping or program.example_inputs is None
    before, logged = program.dump("text", plan=False), len(program.log)
    again = [pass_ for pass_ in golden.then or golden.pipeline if pass_.before is None or pass_.before > program.stage]
    Pipeline(tuple(again)).run(program, [Truth()])
    assert not any(entry.changed for entry in program.log[logged:])
    assert program.dump("text", plan=False) == before


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_what_a_golden_text_says_parses_back(file: Path) -> None:
    after = "".join(line for line in Golden.read(file).after.splitlines(keepends=True) if not line.startswith("#"))
    assert DIGEST.sub("", parse(after).dump("text")) == after


def test_every_pass_has_golden_texts() -> None:
    """One where it fires, one at its edge, one that it leaves alone."""
    cases = Counter(file.parent.name for file in FILES)
    installed = {entry.name for entry in entry_points(group="quantc.passes") if entry.value.startswith("quantc.")}
    assert set(cases) == installed
    assert {name: count for name, count in cases.items() if count < MIN_CASES} == {}


def update() -> None:
    """Write what the passes do now."""
    for file in FILES:
        golden = Golden.read(file)
        file.write_text(golden.before + RULE + golden.run()[0], encoding="utf-8")


if __name__ == "__main__":
    update()
