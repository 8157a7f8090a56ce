"""The float form of a program, as rules see it: without Q/DQ ops and observers, with unchanged node names."""

from __future__ import annotations

from torch import fx

from quantc.ir.program import Program, Stage
from quantc.observe.module import observer_nodes
from quantc.qdq.ops import belongs_to_qdq, is_dequantize, is_layout, is_quantize


def float_view(program: Program) -> Program:
    """The program itself if nothing was inserted into it, else a copy without the insertions.

    The copy is for inspection: a weight that is stored quantized has the type of a float one, not its numbers.
    """
    if program.stage < Stage.QUANTIZED and not observer_nodes(program):
        return program
    view = program.draft()
    for node in observer_nodes(view):
        _take_out(view, node)
    for _, graph in view.graphs():
        for node in [node for node in graph.nodes if is_quantize(node) or is_dequantize(node) or is_layout(node)]:
            _take_out(view, node)
        for node in reversed([node for node in graph.nodes if belongs_to_qdq(node)]):
            if not node.users:
                graph.erase_node(node)  # a choice of qparams without users
    view.stage = min(view.stage, Stage.SHARED)
    return view


def _take_out(view: Program, node: fx.Node) -> None:
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return
    if not is_quantize(node) and "val" in node.meta:
        source.meta["val"] = node.meta["val"]
    view.forward(node, source)
