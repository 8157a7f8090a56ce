"""Rewrite of activations that are written by hand to one op each."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from torch import fx

from quantc.ir.alias_analysis import operands_written
from quantc.ir.dialect import aten, target_name
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.written_activations import Activation, Region, activation_of, regions_at


class FuseActivations(Pass):
    """Rewrite elementwise arithmetic that computes an activation of the dialect to that one op.

    `x * relu6(x + 3) / 6` becomes `hardswish`, `x * sigmoid(x)` `silu`, `0.5 * x * (1 + erf(x / sqrt(2)))` `gelu`,
    whatever the spelling: ops between one tensor and one result are evaluated in float64, and compared with the float64
    reference of each activation, at numbers of every magnitude, around each constant of theirs, and at the infinities.
    They may differ by rounding, and where the arithmetic overflows to nan. Arithmetic with an op that does next to nothing
    stays, such as `relu(x) + 1e-7`, and so does what reads a buffer that `state_dict` has.
    `x * sigmoid(c * x)` becomes `silu(c * x) / c`. Each op but the last may have no other reader.

    A backend would round each of the ops to 8 bits; an activation is rounded once.
    """

    name: ClassVar[str] = "fuse-activations"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    def run(self, program: Program) -> Outcome:
        done: Counter[str] = Counter()
        for _, graph in program.graphs():
            owner = program.owner(graph)
            if not any(operands_written(node, owner) for node in graph.nodes):
                _rewrite(program, graph, done)
        return Outcome(bool(done), tuple(f"found {count} {name}" for name, count in sorted(done.items())))


def _rewrite(program: Program, graph: fx.Graph, done: Counter[str]) -> None:
    order = {node: number for number, node in enumerate(graph.nodes)}
    gone: set[fx.Node] = set()
    for root in reversed(list(graph.nodes)):  # a larger region ends later
        if root in gone:
            continue
        for region in reversed(list(regions_at(program, root, order))):
            if (found := activation_of(program, region)) is not None:
                _put(program, region, found)
                done[target_name(found.target)] += 1
                gone.update(region.nodes)
                break


def _put(program: Program, region: Region, found: Activation) -> None:
    root, x = region.nodes[-1], region.x
    if found.factor != 1:
        x = program.emit(aten.mul.Tensor, (x, found.factor), before=root, like=root)
    new = program.emit(found.target, (x,), dict(found.options), before=root, like=root)
    if found.factor != 1:
        new = program.emit(aten.div.Tensor, (new, found.factor), before=root, like=root)
    program.inherit(root, new)
    root.name, new.name = new.name, root.name
    program.forward(root, new)
    for node in reversed(region.nodes[:-1]):
        program.erase(node)
