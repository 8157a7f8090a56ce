"""Smoothing of activations: factors from tensors to weights, through norms, attention and gates."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from quantc.ir.dialect import is_op, row_of
from quantc.ir.op_row import Family
from quantc.ir.program import Program
from quantc.recover.channel_groups import ChannelGroup
from quantc.recover.transforming import TransformPass

MIXING = ("mul", "div", "matmul", "sdpa")
"""Ops through which factors go along one of two operands."""


class Smooth(TransformPass):
    """Move the width of activations to the weights that read them, where a norm, an attention or a gate lies before.

    A channel of activations that is much larger than the others is divided by a factor, which the constants before take up:
    the gain of the norm that makes it (`1 + w` is one constant by then), the rows of the values whose heads an attention adds up,
    the rows of the projection that a gate multiplies. The columns of the weights behind are multiplied by it. All factors of a
    program are found together, as those of least predicted noise of weights and activations: no strength is guessed. It
    takes the Gram matrices and ranges that `qc.calibrate(..., collect="recover")` collects.

    These are the groups of channels that `equalize` finds too; this pass leaves those of plain chains of layers alone. A gain
    whose result is also read elsewhere, as by a sum, a result that is normalized afterwards, and a weight that two layers read
    stay as they are, with the reason.
    """

    name: ClassVar[str] = "smooth"

    def concerns(self, program: Program, group: ChannelGroup) -> bool:
        return any(_is_norm(node) for node in group.makers) or _is_mixed(group)


def _is_norm(node: fx.Node) -> bool:
    """True for a norm with a gain, and for a constant that multiplies."""
    row = row_of(node)
    return row is not None and (row.family is Family.NORM or is_op(node, "mul", "div"))


def _is_mixed(group: ChannelGroup) -> bool:
    """True if something between the makers and the readers combines two tensors."""
    makers, pending, seen = (
        set(group.makers),
        [node for reader in group.readers for node in reader.all_input_nodes],
        set[fx.Node](),
    )
    while pending:
        node = pending.pop()
        if node in seen or node in makers or node.op != "call_function":
            continue
        seen.add(node)
        if is_op(node, *MIXING):
            return True
        if (row := row_of(node)) is not None and row.family in (Family.MATMUL, Family.CONV, Family.NORM):
            continue
        pending += node.all_input_nodes
    return False
