"""Find out which places share a scale."""

from __future__ import annotations

from typing import ClassVar

from quantc.annotate.sharing import resolve_groups
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves


class Share(Pass):
    """Resolve what was annotated into groups of places that share one scale and zero point.

    Places are in one group if one is declared to be like the other, if they read one tensor and ask for the same, or
    if one reads what the other yields in just that form. The result does not depend on the order of annotation.
    Circles, and ties between places that ask for different things, are errors that name the places.
    """

    name: ClassVar[str] = "share"
    needs: ClassVar[Stage] = Stage.ANNOTATED
    gives: ClassVar[Stage | None] = Stage.SHARED
    before: ClassVar[Stage | None] = Stage.OBSERVED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        groups = resolve_groups(program)
        changed = groups != program.plan.groups
        program.plan.groups = groups
        return Outcome(changed, (f"{len(groups)} groups",) if groups else ())
