"""Rotation of hidden states."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from quantc.ir.program import Program, Stage
from quantc.pipeline.base_pass import Outcome, Pass, Preserves
from quantc.recover.constant_edits import Tied
from quantc.recover.rotating import rotate_streams


class Rotate(Pass):
    """Rotate the hidden states of a model, so that no channel is much larger than the others.

    A stream of tensors that are moved, added, normalized, and multiplied by numbers, but not component by component, may be
    multiplied by an orthogonal matrix if the constants at its ends are too: the residual stream of a transformer, the
    values of an attention, queries and keys without rotary embeddings. The matrix spreads each channel over all of them, and
    leaves the mean alone, so that layer norms need no change. Gains of norms go into the weights behind them first.

    Only constants change. What cannot be rotated is refused, with the reason: a gain whose result is added to the stream or
    returned, a function of single components, a table that is tied to another with a gain before it.
    """

    name: ClassVar[str] = "rotate"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    seed: int = Field(default=0, ge=0)
    """Chooses the signs of the matrices."""
    tied: Tied = "keep"
    """"keep" refuses where a table that several ops read would have to become several; "untie" makes them."""

    def run(self, program: Program) -> Outcome:
        if any(entry.name == str(self) and entry.changed for entry in program.log):
            return Outcome(False, ("it has run",))
        judgments = rotate_streams(program, self.seed, self.tied)
        return Outcome(any(each.fate == "kept" for each in judgments), tuple(map(str, judgments)), tuple(judgments))
