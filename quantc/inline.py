"""Regions that only set a mode (`no_grad`, `autocast` switched off) put back into the graph around them."""

from __future__ import annotations

from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.node import Argument, map_arg

from quantc.dialect import higher_order_name
from quantc.program import Program, attribute

GRADIENTS_LOST = "a no_grad region was inlined, so gradients would differ"


def _wrapped_graph(program: Program, node: fx.Node) -> tuple[fx.GraphModule, tuple[Argument, ...]] | None:
    """The graph of a `no_grad`/`enable_grad` region and its operands."""
    if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
        return None
    if higher_order_name(node.target) != "wrap_with_set_grad_enabled":
        return None
    region = node.args[1]
    if not isinstance(region, fx.Node):
        return None
    module = attribute(program.owner(node.graph), str(region.target))
    return (module, node.args[2:]) if isinstance(module, fx.GraphModule) else None


def inline_wrappers(program: Program) -> int:
    """Inline the grad-mode regions of a program that is not training; return how many there were."""
    if program.training:
        return 0
    count = 0
    for _, graph in program.graphs():
        for node in list(graph.nodes):
            found = _wrapped_graph(program, node)
            if found is not None:
                _inline(program, node, *found)
                program.note_inference_only(GRADIENTS_LOST)
                count += 1
    return count


def _inline(program: Program, call: fx.Node, module: fx.GraphModule, operands: tuple[Argument, ...]) -> None:
    values: dict[fx.Node, Argument] = {}
    inputs = iter(operands)
    outputs: Argument = None
    with call.graph.inserting_before(call):
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "output":
                outputs = map_arg(node.args[0], lambda operand: values[operand])
            else:
                copied = call.graph.node_copy(node, lambda operand: values[operand])
                copied.meta = dict(node.meta)
                values[node] = copied
                if (origin := program.origins.get(node)) is not None:
                    program.origins[copied] = origin
                if (mode := program.modes.get(node)) is not None:
                    program.modes[copied] = mode
    for user in list(call.users):
        item = outputs[user.args[1]]  # type: ignore[index]
        user.replace_all_uses_with(item)  # type: ignore[arg-type]
        program.erase(user)
    program.erase(call)
    for inner in list(module.graph.nodes):
        for table in (program.origins, program.modes, program.counters):
            table.drop(inner)
