"""Decomposition of fused integer ops into ATen primitives."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from torch import fx

from quantc.errors import QuantcError
from quantc.integer.library import IntegerOp, op_of
from quantc.integer.trace_ops import OpWriter
from quantc.ir.dialect import argument, arguments
from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType, tensor_type
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.replacements import Substitution


class DecomposeInteger(Pass):
    """Decompose every integer op into ATen primitives, with the same bits.

    Each op becomes the reference that defines it: casts, shifts, sums, and `out_dtype` for matmuls and convolutions,
    which gives their accumulation dtype. Requantization is a multiplication in float64 and a rounding (or, with a fixed
    multiplier, a product of 64-bit integers and a shift). No op of `quantc` is left. The last node of each op keeps its
    name.
    """

    name: ClassVar[str] = "decompose-integer"
    needs: ClassVar[Stage] = Stage.LOWERED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        writer = OpWriter(program)
        count = sum(_decompose(program, graph, writer) for _, graph in list(program.graphs()))
        return Outcome(count > 0, (f"wrote out {count}",) if count else ())


def _decompose(program: Program, graph: fx.Graph, writer: OpWriter) -> int:
    walk = Substitution(program)
    several: dict[fx.Node, tuple[fx.Node, ...]] = {}
    count = 0
    for node in graph.nodes:
        walk.arrive(node)
        if node.target is operator.getitem and node.args[0] in several:
            whole = node.args[0]
            _stand(walk, node, several[whole][node.args[1]], whole.all_input_nodes)
        op = op_of(node.target)
        if op is None:
            continue
        count += 1
        made = _written(node, op, writer)
        if isinstance(made, tuple):
            several[node] = made
        else:
            _stand(walk, node, made, node.all_input_nodes)
    walk.finish()
    for node in several:
        program.erase(node)
    return count


def _written(node: fx.Node, op: IntegerOp, writer: OpWriter) -> Any:
    """The reference of a node's op, written before it."""
    rows = arguments(op.target)
    args = tuple(argument(node, row.aten_name) for row in rows if not row.keyword_only)
    named = {row.aten_name: argument(node, row.aten_name) for row in rows if row.keyword_only}
    return writer.write(op.reference, args, node, **named)


def _stand(walk: Substitution, node: fx.Node, made: fx.Node, inputs: list[fx.Node]) -> None:
    """Replace an op, or an item of its results, by a new node."""
    expected, found = tensor_type(node), tensor_type(made)
    if expected is not None and found is not None and (why := _why_not(expected, found)) is not None:
        raise QuantcError(
            f"the reference of {node.name} gives {found}, and the program says {expected}: {why}",
            where=walk.program.describe(node),
            advice="correct the reference, or the type that the lowering gives the node",
        )
    if expected is not None:
        made.meta["val"] = node.meta["val"]  # the same, and sizes spelled as everywhere in the program
    if made in inputs:
        walk.forward(node, made)
    else:
        walk.replace(node, made)


def _why_not(expected: TensorType, found: TensorType) -> str | None:
    """The reason why two types cannot be the same, or None; dynamic sizes may be spelled in two ways."""
    if expected.dtype != found.dtype:
        return "another dtype"
    if expected.rank != found.rank:
        return "another number of axes"
    pairs = zip(expected.shape, found.shape, strict=True)
    differ = any(left != right for left, right in pairs if isinstance(left, int) and isinstance(right, int))
    return "another size" if differ else None
