"""Golden texts of passes, read and run: see `tests/passes/test_golden.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.passes.leave_float import LeaveFloat
from quantc.pipeline.pipeline import Pipeline
from quantc.recover.fitting import FittingPass
from quantc.recover.judging_batches import judging_on
from quantc.recover.transforming import TransformPass
from tests.support.paths import TESTS
from tests.support.small_backend import SMALL
from tests.support.text_programs import batches_of, program_of, see, seen_again

BACKEND = SMALL.name
"""Cases name it in their pipelines: importing it registers it."""
FOLDER = TESTS / "golden"
FILES = sorted(FOLDER.glob("*/*.txt"))
RECOVERING = (FittingPass, TransformPass)
RULE = "=====\n"
DIGEST = re.compile(r" #[0-9a-f]{8}\b")
LONG = re.compile(r"\b\d+\.\d{7,}\b")
"""A computed scale: the last digits depend on how a machine adds up."""
RUN = re.compile(r"^# run: (.+)$", re.MULTILINE)
THEN = re.compile(r"^# (?:calibrated|trained), then: (.+)$", re.MULTILINE)


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
            see(program, "recover" if any(isinstance(step, RECOVERING) for step in self.then) else None)
            # the whole program is judged where a pass chooses by it; elsewhere texts show what layers decide
            judging = batches_of(program) if any(isinstance(step, LeaveFloat) for step in self.then) else ()
            with seen_again(), judging_on(judging):
                self.then.run(program, [Truth(), Verify(), guard])
        notes = [f"# {note}\n" for entry in program.log for note in entry.notes]
        notes += [f"# {line}\n" for line in plan.splitlines()]
        text = DIGEST.sub("", program.dump("text", plan=False))
        return LONG.sub(lambda found: f"{float(found[0]):.4g}", text) + "".join(notes), program, guard
