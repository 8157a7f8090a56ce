"""The graphs of a model: the top one, those nested in it, and the modules that own what they refer to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from quantc.errors import QuantcError


@dataclass(eq=False)
class GraphTree:
    """The top graph, and the module that owns what graphs refer to."""

    graph: fx.Graph
    root: nn.Module

    def graphs(self) -> Iterator[tuple[str, fx.Graph]]:
        """Every graph with its path: the top one ("") first, then those of higher-order ops, outermost first."""
        pending: list[tuple[str, fx.Graph, nn.Module]] = [("", self.graph, self.root)]
        seen: set[int] = set()
        while pending:
            path, graph, owner = pending.pop(0)
            yield path, graph
            for node in graph.find_nodes(op="get_attr"):
                if node.meta.get("val") is not None:
                    continue  # a tensor: there are many, and looking each up takes time
                child = attribute(owner, str(node.target))
                if isinstance(child, fx.GraphModule) and id(child) not in seen:
                    seen.add(id(child))
                    pending.append((f"{path}/{node.target}".lstrip("/"), child.graph, child))

    def nodes(self) -> Iterator[fx.Node]:
        """Every node of every graph, in order."""
        for _, graph in self.graphs():
            yield from graph.nodes

    def owner(self, graph: fx.Graph) -> nn.Module:
        """The module that `graph`'s get_attr nodes refer into."""
        if graph is self.graph:
            return self.root
        module = graph.owning_module
        if module is None:
            raise QuantcError("a nested graph has no module", advice="capture the model again")
        return module


def attribute(root: nn.Module, target: str) -> Any:
    """The value that a get_attr target refers to, or None if it does not exist."""
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part, None)
        if value is None:
            return None
    return value
