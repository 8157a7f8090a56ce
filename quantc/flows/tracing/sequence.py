"""A sequence of ops as one function: they are drawn as one graph on kernels, which runs as a lowered program does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantc.kernels.linear_sum import settle_float_summands
from quantc.kernels.packed import Kernel
from quantc.kernels.replayed import Replayed
from quantc.kernels.static_conv import settle_summands
from quantc.kernels.straight import straight_line, why_it_writes
from quantc.program import Program, Stage
from quantc.signature import Input, Signature
from quantc.types import type_of_value

if TYPE_CHECKING:
    from quantc.flows.tracing.deferred import Step

Line = Callable[..., Sequence[Tensor]]


def line_of(path: Sequence[Step], inputs: Sequence[Tensor], wanted: Sequence[int]) -> tuple[Line, Sequence[Tensor]]:
    """A function that runs a sequence on inputs of the same shapes and gives the results of some steps; and what these are
    now. Sums write over what they add to, where nobody else reads that."""
    graph, root = fx.Graph(), nn.Module()
    given = [graph.placeholder(f"x{index}") for index in range(len(inputs))]
    made: list[fx.Node] = []
    for step in path:
        operands = [made[read] if read >= 0 else given[~read] for read in step.reads]
        made.append(step.action.draw(graph, root, operands, f"s{step.place}"))
    graph.output(tuple(made[place] for place in wanted))
    module = fx.GraphModule(root, graph)
    results = _Typed(module).run(*inputs)
    in_spec = pytree.tree_flatten((tuple(inputs), {}))[1]
    signature = Signature(tuple(Input(node.name) for node in given), in_spec, pytree.tree_flatten([0] * len(wanted))[1])
    program = Program(module.graph, module, signature, name="sequence", method="tracing", stage=Stage.LOWERED)
    settle_summands(program)
    settle_float_summands(program)
    line = straight_line(module)
    return (Replayed(line) if why_it_writes(module) is None else line), results


class _Typed(fx.Interpreter):
    """Runs a graph, and writes down the types that its values have on these inputs."""

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        n.meta["val"] = type_of_value(made)
        return made


def twin_of(module: nn.Module) -> nn.Module:
    """A kernel with the same packed weights, which may be told to write over its summand; other modules as they are."""
    if not isinstance(module, Kernel) or not hasattr(module, "keep"):
        return module
    made = copy.copy(module)
    made._packed = module._packed
    return made
