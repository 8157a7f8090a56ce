"""Whether the graphs of a higher-order op fit the call: as many inputs as operands, branches that agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch._ops import HigherOrderOperator

from quantc.dialect import target_name
from quantc.program import attribute


@dataclass(frozen=True, slots=True)
class _Form:
    """Where a call holds its graphs (by position), and how many operands each of them is given."""

    graphs: tuple[int, ...]
    operands: Callable[[tuple[Any, ...]], int]
    outputs_agree: bool


def _lengths(*positions: int) -> Callable[[tuple[Any, ...]], int]:
    return lambda args: sum(len(args[position]) for position in positions if position < len(args))


FORMS: dict[str, _Form] = {
    "cond": _Form((1, 2), _lengths(3), outputs_agree=True),
    "while_loop": _Form((0, 1), _lengths(2, 3), outputs_agree=False),
    "map_impl": _Form((0,), _lengths(1, 2), outputs_agree=False),
    "scan": _Form((0,), _lengths(1, 2, 3), outputs_agree=False),
    "wrap_with_set_grad_enabled": _Form((1,), lambda args: len(args) - 2, outputs_agree=False),
    "wrap_with_autocast": _Form((4,), lambda args: len(args) - 5, outputs_agree=False),
}


def why_not_nested(node: fx.Node, target: HigherOrderOperator, owner: nn.Module) -> Iterator[str]:
    """Every way in which a call of a higher-order op does not fit its graphs. Ops we do not know pass."""
    op = target_name(target).removeprefix("higher_order.")
    form = FORMS.get(op)
    if form is None or node.kwargs:
        return
    graphs: list[tuple[str, fx.Graph]] = []
    for position in form.graphs:
        found = _graph(node.args[position], owner) if position < len(node.args) else None
        if found is None:
            yield f"argument {position} of {op} must be a nested graph"
        else:
            graphs.append(found)
    try:
        given = form.operands(node.args)
    except TypeError:
        yield f"the operands of {op} must be tuples"
        return
    for name, graph in graphs:
        takes = len(graph.find_nodes(op="placeholder"))
        if takes != given:
            yield f"@{name} takes {takes} inputs, but is given {given}"
    counts = {name: _outputs(graph) for name, graph in graphs}
    if form.outputs_agree and len(set(counts.values())) > 1:
        listed = ", ".join(f"@{name} gives {count}" for name, count in counts.items())
        yield f"the branches must give as many outputs: {listed}"


def _graph(value: Any, owner: nn.Module) -> tuple[str, fx.Graph] | None:
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    module = attribute(owner, str(value.target))
    return (str(value.target), module.graph) if isinstance(module, fx.GraphModule) else None


def _outputs(graph: fx.Graph) -> int:
    for node in graph.find_nodes(op="output"):
        value = node.args[0] if node.args else ()
        return len(value) if isinstance(value, tuple | list) else 1
    return 0
