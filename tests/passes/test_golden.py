"""Golden texts: what each pass makes of a program, in `tests/golden/<pass>/<case>.txt`.

A file holds the program before, a line of `=====`, the program after, and what the pass says of it in comments. Comments
before the first program say what the case is about; one that reads `run: fold-constants{max-growth-bytes=0}` is the
pipeline, where that is not the folder's name, and `calibrated, then: quantize` what runs once the program has seen its
example inputs, and a few batches like them where it fits weights; `trained, then: remove-fake-quantize` is the same for a program that trains. The plan, where there is one, is in comments too. Digests are left out of the programs: the constants are made from their
names and types, and the numbers are compared.

`python -m tests.passes.test_golden` writes every text after `=====` anew: read the difference before committing it.
"""

from __future__ import annotations

from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from quantc.hooks import Truth
from quantc.pipeline.pipeline import Pipeline, Preserves
from quantc.text.parser import parse
from tests.support.golden_texts import DIGEST, FILES, RULE, Golden

MIN_CASES = 3
"""For each pass."""
IDS = [f"{file.parent.name}/{file.stem}" for file in FILES]


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
