"""Duplication of dequantize ops: one per user."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import fx

from quantc.ir.program import Program, Stage
from quantc.ir.site_index import operand_nodes, rewire
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.qdq.ops import is_dequantize


class DuplicateDq(Pass):
    """Give each user of a dequantized tensor its own dequantize op.

    Some backends partition a pattern together with the dequantize ops before it, and can only do so if these have no
    other user. `dedup-qdq` undoes it.
    """

    name: ClassVar[str] = "duplicate-dq"
    needs: ClassVar[Stage] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    results: Literal["share", "own"] = "share"
    """"share" lets a result of the program use the op of its first reader; "own" gives each result one, for delegates
    that return integers."""

    def run(self, program: Program) -> Outcome:
        made = sum(_duplicate(program, graph, self.results) for _, graph in program.graphs())
        return Outcome(made > 0, (f"{made} ops added",) if made else ())


def _duplicate(program: Program, graph: fx.Graph, results: str) -> int:
    shared = {node for node in graph.nodes if is_dequantize(node) and len(node.users) > 1}
    seen: set[fx.Node] = set()
    made = 0
    for reader in list(graph.nodes):
        if not shared or (reader.op == "output" and results == "share") or shared.isdisjoint(reader.all_input_nodes):
            continue
        own: dict[fx.Node, fx.Node] = {}
        read = [source for source in reader.all_input_nodes if source in shared]
        for source in (source for source in read if source in seen):
            own[source] = program.emit(source.target, source.args, dict(source.kwargs), before=reader, like=source)
        seen.update(read)
        places = {index: own[node] for index, node in enumerate(operand_nodes(reader)) if node in own}
        if places:
            rewire(program, reader, places)
        made += len(own)
    return made
