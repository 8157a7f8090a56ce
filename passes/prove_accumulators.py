"""Overflow proofs for integer accumulators."""

from __future__ import annotations

from typing import ClassVar

from quantc.integer.proof.overflow_report import accumulators
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass

MAX_NAMED = 3
"""Maximum number of products that the notes name."""


class ProveAccumulators(Pass):
    """Bound the sums of every integer conv and matmul, for any input, from weights and ranges.

    It changes nothing. Its notes say whether every 32-bit accumulator and, on processors that add pairs of products in
    16 bits first, every pair sum fits; if not, they list the ops that do not, worst first, and the smallest change that
    helps. `qc.convert` applies it, as its `reduce_range` says. See docs/overflow.md.
    """

    name: ClassVar[str] = "prove-accumulators"
    needs: ClassVar[Stage] = Stage.FOLDED

    def run(self, program: Program) -> Outcome:
        found = accumulators(program)
        unsafe = found.unsafe
        more = (f"and {len(unsafe) - MAX_NAMED} more",) if len(unsafe) > MAX_NAMED else ()
        return Outcome(False, (found.headline, *(str(row) for row in unsafe[:MAX_NAMED]), *more))
