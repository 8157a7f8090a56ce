"""A deployed model held to the Q/DQ form op by op: every op is fed what the runtime itself computed before it.

The model is deployed once more with all its quantized tensors as outputs. Then the Q/DQ form is run node by node, each
quantized tensor put in the place of its own: what differs is the doing of one op alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

import quantc as qc
from quantc.ir.program import Program
from quantc.qdq.ops import is_dequantize
from quantc.targets.onnx.onnx_export import export
from quantc.targets.onnx.profiles import profile_of
from quantc.targets.onnx.sessions import OnnxRuntime

Run = Callable[[Sequence[Tensor]], Sequence[Any]]


def worst_steps(program: Program, target: str, *inputs: Tensor) -> dict[str, float]:
    """For each tensor that is quantized with a fixed scale: by how many steps the runtime is off, at most."""
    watched = [node for node in program.graph.nodes if _is_watched(program, node)]
    if not watched:
        return {}
    seen = _runs(_opened(program, [node.name for node in watched]), target)(inputs)
    values = dict(zip((node.name for node in watched), seen[-len(watched) :], strict=True))
    judge = _Judge(program, values)
    judge.run(*inputs)
    return judge.steps


def _is_watched(program: Program, node: fx.Node) -> bool:
    """A dequantize op of an activation, with a scale for all of it that is known beforehand."""
    return is_dequantize(node) and str(node.target).endswith("per_tensor.default") and _source(node).op != "get_attr"


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _opened(program: Program, names: Sequence[str]) -> Program:
    """A copy whose outputs are followed by quantized tensors; those that read them inside keep dequantize ops of their own."""
    own = program.clone()
    nodes = {node.name: node for node in own.graph.nodes}
    (output,) = own.graph.find_nodes(op="output")
    twins = []
    for name in names:
        node = nodes[name]
        twins.append(own.emit(node.target, tuple(node.args), before=output, like=node))
    given: Any = output.args[0]
    output.args = ((*given, *twins),)
    own.touch()
    return own


def _runs(program: Program, target: str) -> Run:
    if target == "executorch":
        lowered = qc.lower(program, "executorch")
        return lambda inputs: lowered.run(*inputs)
    session = OnnxRuntime(export(program, profile_of(program, None)).model.SerializeToString(), 1)
    return lambda inputs: session(list(inputs))


class _Judge(fx.Interpreter):
    """Runs the Q/DQ form, and goes on from what the runtime computed."""

    def __init__(self, program: Program, values: dict[str, Tensor]) -> None:
        graph, root = program.graph, program.root
        super().__init__(fx.GraphModule(root, graph) if not isinstance(root, fx.GraphModule) else root, graph=graph)
        self.values, self.steps = values, dict[str, float]()

    @torch.no_grad()
    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n.name not in self.values:
            return made
        scale, seen = n.args[1], self.values[n.name]
        assert isinstance(scale, float)
        self.steps[n.name] = float((made.double() - seen.double()).abs().max()) / scale if made.numel() else 0.0
        return seen
