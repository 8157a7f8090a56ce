"""Lowering from Q/DQ to the integer form."""

from __future__ import annotations

import operator
from typing import ClassVar, Literal

from torch import fx

from quantc.annotate.left_float import why_not_quantized
from quantc.integer.grid import grid_of
from quantc.integer.lowerings.requantize import requantize
from quantc.integer.match_lowering import Curves, NotIntegerError, Task
from quantc.integer.qdq_decomposition import open_boundaries
from quantc.integer.semantics import semantics_of
from quantc.ir.program import Program, Stage
from quantc.passes.eliminate_dead import EliminateDead
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.qdq.ops import is_quantize
from quantc.rewrite.constant_order import forget_unread
from quantc.spec.arithmetic import EXACT, Arithmetic, MultiplierChoice
from quantc.spec.formats import Timing

Boundaries = Literal["spelled", "whole"]


class LowerInteger(Pass):
    """Lower every quantized op to integer arithmetic.

    The table of the integer form (docs/integer-form.md) defines each op: exact sums in int32, then one rounding in
    float64 onto the grid of the result; or as the plan has it of the target, its `arithmetic`. Ops without an integer form stay as dequantize, op, quantize, with the quantize
    and dequantize ops decomposed to ATen; `coverage()` lists them with the reason.

    `multiplier` is the form in which accumulators are requantized: "float64", "fixed" with a 32-bit mantissa and a
    shift, or "shift" alone; "target" is that of the target.
    """

    name: ClassVar[str] = "lower-integer"
    needs: ClassVar[Stage] = Stage.FOLDED
    gives: ClassVar[Stage | None] = Stage.LOWERED
    before: ClassVar[Stage | None] = Stage.LOWERED
    preserves: ClassVar[Preserves] = Preserves.STEPWISE

    multiplier: MultiplierChoice = "target"
    curves: Curves = "exact"
    """Activations after products that are no clamps: "exact" tables of steps, or "float" as they are."""
    boundaries: Boundaries = "spelled"
    """Quantize and dequantize ops that are left: "spelled" out in ATen, or "whole" for kernels to take."""

    def run(self, program: Program) -> Outcome:
        written = 0
        notes: list[str] = []
        reasons_before = dict(program.plan.left_float.rows)
        found, reasons = matches(program), why_not_quantized(program)
        for nodes in found:
            task = Task(program, nodes, self.arithmetic(program, nodes[0]), self.curves)
            reason = lower(task)
            written += reason is None
            notes += task.notes
            if reason is not None:
                reasons |= dict.fromkeys(nodes, reason)
        self._rescale(program)
        _note_float(program, {node for nodes in found for node in nodes}, reasons)
        EliminateDead().run(program)  # replaced ops need not be decomposed
        opened = open_boundaries(program) if self.boundaries == "spelled" else 0
        forget_unread(program)
        changed = written + opened > 0 or program.plan.left_float.rows != reasons_before
        return Outcome(changed, (f"{written} matches compute on integers", *dict.fromkeys(notes)))

    def arithmetic(self, program: Program, node: fx.Node) -> Arithmetic:
        """Arithmetic of the target whose quantizer claimed a node, with the multiplier that was asked for."""
        claim = program.plan.claims.get(node)
        found = EXACT if claim is None else program.plan.arithmetic.get(claim.quantizer, EXACT)
        return found if self.multiplier == "target" else found.model_copy(update={"multiplier": self.multiplier})

    def _rescale(self, program: Program) -> None:
        """Requantize integers that are dequantized only to be quantized to another grid."""
        for node in [node for node in program.nodes() if is_quantize(node)]:
            task = Task(program, (node,))
            source, grid = task.maybe_quantized(node.args[0]), grid_of(program, node)
            if source is None or grid is None or not (source.grid.is_whole and grid.is_whole):
                continue
            if grid.equals(source.grid):
                program.forward(node, source.node)
                continue
            task.arithmetic = self.arithmetic(program, source.node)
            try:
                task.stand_in(node, requantize(task, source, grid))
            except NotIntegerError:
                continue  # it stays as dequantize, quantize


def _note_float(program: Program, claimed: set[fx.Node], reasons: dict[fx.Node, str]) -> None:
    """Record why each op that is still in float is so; `claimed` are those that were to be quantized.

    Nodes that are then neither claimed nor noted are steps: of an integer op, or of a quantize or dequantize op.
    """
    plan = program.plan
    for node in program.nodes():
        claim = plan.claims.get(node)
        if node in reasons:
            plan.left_float[node] = reasons[node]
        elif claim is not None and node in claimed:
            plan.left_float[node] = f"it is computed in float, on what {claim.rule} yields"


def lower(task: Task) -> str | None:
    """Lower one match to integers; the reason if it stays in float."""
    claim = task.program.plan.claims.get(task.core)
    row = semantics_of(task.core, Timing.STATIC if claim is None else claim.timing, task.arithmetic.semantics)
    if row is None:
        is_stored = claim is not None and claim.timing is Timing.WEIGHT_ONLY
        return "only its weight is quantized" if is_stored else "it has no integer form"
    try:
        row.write(task)
    except NotIntegerError as refusal:
        return str(refusal)
    task.keep_name()
    return None


def matches(program: Program) -> list[tuple[fx.Node, ...]]:
    """Claimed matches of a program, each in graph order, ordered by their last node."""
    found: dict[tuple[fx.Graph, str], list[fx.Node]] = {}
    claims = program.plan.claims
    for _, graph in program.graphs():
        for node in graph.nodes:
            claim = claims.get(node)
            if claim is not None and node.target is not operator.getitem:  # items belong to the op that yields them
                found.setdefault((graph, claim.root), []).append(node)
    return [tuple(nodes) for nodes in found.values()]
