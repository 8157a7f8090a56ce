"""Resolution of sites that share qparams."""

from __future__ import annotations

from typing import ClassVar

from quantc.annotate.sharing import resolve_groups
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves


class Share(Pass):
    """Resolve annotations into groups of sites that share one scale and zero point.

    Sites are in one group if one is declared like the other, if they read one tensor with the same request, or if one
    reads exactly the form that the other yields. The result does not depend on the order of annotation. Cycles, and
    ties between sites with different requests, are errors that name the sites.
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
