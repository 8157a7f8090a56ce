"""Lifting of constants out of nested graphs, for the module that leaves quantc.

Inside quantc a branch refers to its own weights, so that patterns can see them. torch.export traces a branch with the
operands of its call and treats tensors inside it as examples without data, so the exported program could not be run.
The module that leaves quantc therefore passes constants as operands, under the names they had. Its nested graphs also
carry torch's metadata (`val`), which torch reads when it runs them with gradients.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from quantc.ir.dialect import argument, is_op
from quantc.ir.graph_tree import GraphTree, attribute
from quantc.ir.subgraphs import called_graphs, form_of
from quantc.ir.types import TensorType, TupleType, ValueType, type_of

ANY_SIZE = 2


def lift_constants(tree: GraphTree, learns: bool) -> tuple[fx.Graph, dict[str, Any]]:
    """A copy of the top graph in which calls pass the constants of their graphs as operands, and the attributes it
    refers to.

    The tensors are the program's own. A graph with several calls, or with a call of unknown form, is left unchanged.
    """
    modules = {id(module): module for path, graph in tree.graphs() if path and (module := graph.owning_module)}
    calls: Counter[int] = Counter()
    for _, graph in tree.graphs():
        for node in graph.nodes:
            calls.update(id(module) for module in called_graphs(tree, node))
        for node in graph.find_nodes(op="get_attr"):
            module = attribute(tree.owner(graph), str(node.target))
            if isinstance(module, fx.GraphModule) and any(form_of(user) is None for user in node.users):
                calls[id(module)] += 2
    lifting = _Lifting({key for key, count in calls.items() if count == 1}, learns)
    for key in reversed(modules):  # innermost first: operands of a nested graph must be in the enclosing one
        lifting.copy(modules[key])
    return lifting.copied(tree.graph, tree.root)


def with_checked_norms(graph: fx.Graph) -> fx.Graph:
    """A copy of the top graph whose norms raise, as torch's modules do, on input they cannot compute a variance of."""
    new, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    new.output(new.graph_copy(graph, nodes))
    for old, copied in nodes.items():
        copied.meta = dict(old.meta)
    spell_norms(new)
    return new


def spell_norms(graph: fx.Graph) -> None:
    """Call norms by torch's functional API, which checks the size first: one value a channel has no variance, and
    ATen's ops would silently write NaN to the running statistics."""
    for node in list(graph.nodes):
        if not is_op(node, "batch_norm", "instance_norm"):
            continue
        *operands, learns, momentum, eps = (
            argument(node, name)
            for name in (
                *("input", "running_mean", "running_var", "weight", "bias"),
                "training" if is_op(node, "batch_norm") else "use_input_stats",
                "momentum",
                "eps",
            )
        )
        node.target = functional.batch_norm if is_op(node, "batch_norm") else functional.instance_norm
        node.args, node.kwargs = (*operands, learns, momentum, eps), {}


class _Lifting:
    def __init__(self, open_: set[int], learns: bool) -> None:
        self.open = open_
        """Graphs (by id of their module) with exactly one call, which can be changed along with it."""
        self.learns = learns
        self.copies: dict[int, fx.GraphModule] = {}

    def copy(self, module: fx.GraphModule) -> None:
        graph, parts = self.copied(module.graph, module)
        self.copies[id(module)] = fx.GraphModule(parts, graph, class_name=type(module).__name__)

    def copied(self, graph: fx.Graph, owner: nn.Module) -> tuple[fx.Graph, dict[str, Any]]:
        """A copy of a graph whose calls pass the constants of the graphs they run, and the attributes it refers to."""
        new, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        results = new.graph_copy(graph, nodes)
        new.output(results)
        for old, copied in nodes.items():
            copied.meta = {**old.meta, "val": _example(type_of(old))}
        for node in list(new.nodes):
            self._hand_over(node, owner)
        if self.learns:
            spell_norms(new)
        parts: dict[str, Any] = {}
        for node in new.nodes:
            if node.op in ("get_attr", "call_module"):
                value = attribute(owner, str(node.target))
                parts[str(node.target)] = self.copies.get(id(value), value)
        return new, parts

    def _hand_over(self, node: fx.Node, owner: nn.Module) -> None:
        """Pass each tensor that the graphs of a call refer to as one operand; every graph takes all of them."""
        form = form_of(node)
        if form is None:
            return
        names = [str(at.target) for index in form.graphs if isinstance(at := node.args[index], fx.Node)]
        modules = [attribute(owner, name) for name in names]
        if any(id(module) not in self.open for module in modules):
            return
        copies = [self.copies[id(module)] for module in modules]
        given: dict[int, fx.Node] = {}
        for module, name in zip(copies, names, strict=True):
            for at in module.graph.find_nodes(op="get_attr"):
                value = attribute(module, str(at.target))
                if isinstance(value, torch.Tensor) and id(value) not in given:
                    with node.graph.inserting_before(node):
                        given[id(value)] = node.graph.create_node("get_attr", f"{name}.{at.target}")
                    given[id(value)].meta = dict(at.meta)
        node.args = form.with_more(node.args, list(given.values()))
        for module in copies:
            _take(module, given)


def _take(module: fx.GraphModule, given: dict[int, fx.Node]) -> None:
    """Replace the graph's own reads of tensors (by id) by new inputs, in that order."""
    graph = module.graph
    own = {at: id(attribute(module, str(at.target))) for at in graph.find_nodes(op="get_attr")}
    first = next(node for node in graph.nodes if node.op != "placeholder" and own.get(node) not in given)
    entries: dict[int, fx.Node] = {}
    for key, outer in given.items():
        with graph.inserting_before(first):
            entries[key] = graph.placeholder(f"given_{outer.name}")
        entries[key].meta = dict(outer.meta)
    for at, key in own.items():
        if key in entries:
            at.replace_all_uses_with(entries[key])
            graph.erase_node(at)
    module.recompile()


def _example(kind: ValueType | None) -> Any:
    """A value of a type, without data. torch reads only its kind, so a dynamic size may be any."""
    if isinstance(kind, TensorType):
        shape = [size if isinstance(size, int) else ANY_SIZE for size in kind.shape]
        return torch.empty(shape, dtype=kind.dtype, device="meta")
    if isinstance(kind, TupleType):
        return tuple(_example(item) for item in kind.items)
    return None
