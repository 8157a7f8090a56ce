"""Removal of redundant quantize and dequantize ops."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.rewrite.replacements import Substitution


class DedupQdq(Pass):
    """Merge identical quantize and dequantize ops of one tensor.

    A quantize after a dequantize with the same qparams is dropped too: its result equals the dequantize's input.
    """

    name: ClassVar[str] = "dedup-qdq"
    needs: ClassVar[Stage] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        merged = sum(_dedup(program, graph) for _, graph in program.graphs())
        return Outcome(merged > 0, (f"{merged} ops merged",) if merged else ())


def _dedup(program: Program, graph: fx.Graph) -> int:
    walk = Substitution(program)
    seen: dict[tuple[Any, ...], fx.Node] = {}
    merged = 0
    for node in graph.nodes:
        walk.arrive(node)
        if not is_quantize(node) and not is_dequantize(node):
            continue
        same = _undone(node) or seen.get(_key(node))
        if same is not None:
            walk.forward(node, same)
            merged += 1
        else:
            seen[_key(node)] = node
    walk.finish()
    return merged


def _key(node: fx.Node) -> tuple[Any, ...]:
    return (node.target, node.args, tuple(node.kwargs.items()))


def _undone(node: fx.Node) -> fx.Node | None:
    """Quantized tensor that a quantize restores: the input of a dequantize with the same qparams."""
    source = node.args[0]
    if not is_quantize(node) or not isinstance(source, fx.Node) or not is_dequantize(source):
        return None
    origin = source.args[0]
    if source.args[1:] != node.args[1:] or source.kwargs or not isinstance(origin, fx.Node):
        return None
    return origin
