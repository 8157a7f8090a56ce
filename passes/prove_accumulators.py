"""Prove that sums cannot overflow, or say which can."""

from __future__ import annotations

from typing import ClassVar

from quantc.integer.proof.overflow_report import accumulators
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass

MAX_NAMED = 3
"""How many products the notes name."""


class ProveAccumulators(Pass):
    """Bound the sums of every product of integers, for any input, from the weights and ranges there are.

    It changes nothing. Its notes say whether every 32-bit accumulator and, on processors that add pairs of products in
    16 bits first, every pair has room; if not, which products have not, the worst first, and the least that would
    help. `qc.convert` does that, as its `reduce_range` says. See docs/overflow.md.
    """

    name: ClassVar[str] = "prove-accumulators"
    needs: ClassVar[Stage] = Stage.FOLDED

    def run(self, program: Program) -> Outcome:
        found = accumulators(program)
        unsafe = found.unsafe
        more = (f"and {len(unsafe) - MAX_NAMED} more",) if len(unsafe) > MAX_NAMED else ()
        return Outcome(False, (found.headline, *(str(row) for row in unsafe[:MAX_NAMED]), *more))
