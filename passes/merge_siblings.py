"""Merging of layers that share an input."""

from __future__ import annotations

import operator
from typing import ClassVar

from torch import fx

from quantc.ir.program import Program, Stage
from quantc.ir.types import TupleType, type_of
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_nodes import forget_kernel, kernels_of, tell_kernel


class MergeSiblings(Pass):
    """Run kernels that read the same inputs as one.

    Queries, keys and values are three products of one tensor. Merged, it is scanned and packed once. Each result is
    an item of what the merged kernel yields.
    """

    name: ClassVar[str] = "merge-siblings"
    needs: ClassVar[Stage] = Stage.PLACED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        notes: list[str] = []
        for _, graph in program.graphs():
            alike: dict[tuple[object, ...], list[tuple[fx.Node, Kernel]]] = {}
            for node, kernel in kernels_of(program, graph):
                if kernel.joins is not None and not node.kwargs:
                    alike.setdefault((type(kernel), kernel.joins, node.args), []).append((node, kernel))
            for group in alike.values():
                if len(group) > 1:
                    names = ", ".join(str(program.placements.stands_for(node)) for node, _ in group)
                    notes.append(f"merged {len(group)} siblings: {names}")
                    _merge(program, graph, group)
        return Outcome(bool(notes), tuple(notes))


def _merge(program: Program, graph: fx.Graph, group: list[tuple[fx.Node, Kernel]]) -> None:
    nodes, kernels = [node for node, _ in group], [kernel for _, kernel in group]
    first, owner, placements = nodes[0], program.owner(graph), program.placements
    together = type(kernels[0]).joined(kernels)
    together.made_of = tuple(kernels)
    name = f"{first.target}_and_{len(nodes) - 1}_more"
    owner.add_module(name, together)
    whole = program.emit(name, first.args, before=first, value=TupleType(tuple(type_of(node) for node in nodes)))
    placements.stand_ins[whole] = tuple(str(placements.stands_for(node)) for node in nodes)
    parts = [
        program.emit(operator.getitem, (whole, index), before=first, like=node) for index, node in enumerate(nodes)
    ]
    for node, part, kernel in zip(nodes, parts, kernels, strict=True):
        placements.stand_ins[part] = placements.stands_for(node)
        tell_kernel(program, node, f"{kernel.extra_repr()}; {len(nodes)} in one")
        program.replace(node, part)
        forget_kernel(owner, str(node.target))  # its tensors are read from the merged kernel
