"""Rewrite of an image mean that drops its axes to one that keeps them, and a flatten."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from quantc.ir.dialect import argument, is_op
from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType, tensor_type
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.builder import Calls

IMAGE = 4
"""Number of axes of images; the mean is over the last two."""


class SplitMean(Pass):
    """Rewrite a mean over the last two of four axes that drops them to one that keeps them, and a flatten.

    Some backends average images only if the result is an image again.
    """

    name: ClassVar[str] = "split-mean"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        found = [(node, kind) for node in program.nodes() if (kind := _kind(node)) is not None]
        for node, kind in found:
            calls = Calls(program, node)
            mean = calls.call(
                "mean", argument(node, "x"), [2, 3], True, kind=TensorType(kind.dtype, (*kind.shape, 1, 1))
            )
            program.forward(node, calls.call("flatten", mean, 1, kind=kind))
        return Outcome(bool(found), (f"split {len(found)}",) if found else ())


def _kind(node: fx.Node) -> TensorType | None:
    """Result type of a mean to split; None for any other node."""
    if not is_op(node, "mean") or argument(node, "keepdim"):
        return None
    source, kind = tensor_type(argument(node, "x")), tensor_type(node)
    axes, dtype = argument(node, "dim"), argument(node, "dtype")
    if source is None or kind is None or source.rank != IMAGE or dtype is not None or axes is None:
        return None
    return kind if sorted(axis % IMAGE for axis in axes) == [2, 3] else None
